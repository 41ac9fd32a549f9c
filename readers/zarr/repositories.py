"""Versions of a Zarr store in an Icechunk repository, which the library of that name reads.

https://icechunk.io/en/latest/spec/
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from matex_data.declared import declared
from matex_data.errors import DataError, install_command
from matex_data.readers.zarr.stores import Store
from matex_data.storage.objects import is_url
from matex_data.storage.trust import NONE, Trust, resolved

MAIN = "main"  # branch that is read where no version is named
_LOGS = "warn,icechunk::storage=error"  # without a warning, of each rank, about writing to local folders


@declared
@dataclass(frozen=True)
class Snapshot(Store):
    """Snapshot of a repository: later commits do not change it.

    Parameters
    ----------
    snapshot : its identifier.
    containers : prefixes of the URLs of its virtual chunks, all of which are trusted.
    """

    path: str
    snapshot: str
    containers: tuple[str, ...] = ()
    by_key = True

    def get(self, key: str) -> bytes | None:
        from zarr.core.buffer import default_buffer_prototype
        from zarr.core.sync import sync

        with _as_data_errors(self.path):
            value = sync(self._store.get(key, default_buffer_prototype()))
        return None if value is None else bytes(value.to_bytes())

    def folders(self, folder: str) -> list[str]:
        from zarr.core.sync import sync

        async def names() -> list[str]:
            return sorted([name async for name in self._store.list_dir(folder)])

        with _as_data_errors(self.path):
            found: list[str] = sync(names())
        return [name for name in found if name != "zarr.json"]

    def extents(self, folder: str) -> None:
        return None

    @property
    def _store(self) -> Any:
        if _process() != os.getpid():
            remedy = "start the process by 'spawn'"
            raise DataError("a process that was forked cannot read the repository", file=self.path, remedy=remedy)
        return _opened(self.path, self.snapshot, self.containers)


def open_snapshot(path: str, version: str | None, trust: Trust = NONE) -> Snapshot:
    """Return a snapshot of a repository.

    Parameters
    ----------
    version : name of a branch or a tag, or identifier of a snapshot. None: the branch ``main``.
    trust : where its virtual chunks may lie, beside the folder of the repository.

    Raises
    ------
    DataError : there is no such version, or it is the name of a branch and of a tag, the repository cannot be read, or
        virtual chunks are not trusted.
    """
    with _as_data_errors(path):
        repository = _repository(path)
        branches, tags = repository.list_branches(), repository.list_tags()
        name = MAIN if version is None else version
        if name in branches and name in tags:
            remedy = "name the snapshot by its identifier, which 'icechunk.Repository.ancestry' shows"
            raise DataError("a version is not unique", file=path, found=f"branch and tag {name!r}", remedy=remedy)
        if name in branches:
            return _asked(repository, path, repository.lookup_branch(name), trust)
        if name in tags:
            return _asked(repository, path, repository.lookup_tag(name), trust)
        try:
            snapshot = repository.lookup_snapshot(name).id
        except _icechunk(path).IcechunkError as error:
            expected = f"a branch of {sorted(branches)}, a tag of {sorted(tags)} or a snapshot"
            raise DataError("no such version", file=path, expected=expected, found=repr(name)) from error
        return _asked(repository, path, snapshot, trust)


def _asked(repository: Any, path: str, snapshot: str, trust: Trust) -> Snapshot:
    """Return a snapshot, after its virtual chunks were asked for."""
    prefixes = sorted(repository.config.virtual_chunk_containers or {})
    if not prefixes:  # without these, the library reads no virtual chunk
        return Snapshot(path, snapshot)
    urls = set(repository.readonly_session(snapshot_id=snapshot).all_virtual_chunk_locations())
    for url in sorted(urls):
        trust.beside(path).check(resolved(path, url), path)
    return Snapshot(path, snapshot, tuple(name for name in prefixes if any(url.startswith(name) for url in urls)))


@lru_cache(1)
def _process() -> int:
    """Return the process that read first: the library's threads are its own, and a forked one would wait for them."""
    return os.getpid()


@lru_cache(64)
def _opened(path: str, snapshot: str, containers: tuple[str, ...]) -> Any:
    """Return the library's store of a snapshot."""
    return _repository(path, containers).readonly_session(snapshot_id=snapshot).store


def _repository(path: str, containers: tuple[str, ...] = ()) -> Any:
    """Return the library's repository.

    Virtual chunks are read from the stores of the user's variables, whatever the repository says of its stores.
    """
    icechunk = _icechunk(path)
    _process()
    if "ICECHUNK_LOG" not in os.environ:
        icechunk.set_logs_filter(_LOGS)
    if not containers:
        return icechunk.Repository.open(_storage(icechunk, path))
    found = {name: icechunk.VirtualChunkContainer(name, _chunk_store(icechunk, path, name)) for name in containers}
    config = icechunk.RepositoryConfig(virtual_chunk_containers=found)
    allowed = dict.fromkeys(containers)
    return icechunk.Repository.open(_storage(icechunk, path), config=config, authorize_virtual_chunk_access=allowed)


def _chunk_store(icechunk: Any, path: str, prefix: str) -> Any:
    """Return the library's description of the store of virtual chunks."""
    scheme, _, location = prefix.partition("://")
    if scheme == "file":
        return icechunk.local_filesystem_store(location)
    if scheme != "s3":
        expected = "chunks in local files, or s3://"
        raise DataError("virtual chunks of this store are not read", file=path, expected=expected, found=prefix)
    options = _s3_options()
    anonymous = os.environ.get("AWS_SKIP_SIGNATURE", "").lower() == "true"
    return icechunk.s3_store(anonymous=anonymous, s3_compatible=options["endpoint_url"] is not None, **options)


def _s3_options() -> dict[str, Any]:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return {
        "region": os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"),
        "endpoint_url": endpoint,
        "allow_http": (endpoint or "").startswith("http://"),
        "force_path_style": endpoint is not None,
    }


def _storage(icechunk: Any, path: str) -> Any:
    if not is_url(path):
        return icechunk.local_filesystem_storage(path)
    scheme, _, location = path.partition("://")
    bucket, _, prefix = location.rstrip("/").partition("/")
    if scheme != "s3":
        expected = "a folder, or s3://"
        raise DataError("repositories of this store are not read", file=path, expected=expected, found=f"{scheme}://")
    return icechunk.s3_storage(bucket=bucket, prefix=prefix or None, from_env=True, **_s3_options())


def _icechunk(path: str) -> Any:
    try:
        import icechunk
    except ImportError as error:
        remedy = install_command("matex_data[icechunk]")
        raise DataError("Icechunk repositories are read by icechunk", file=path, found=error, remedy=remedy) from error
    return icechunk


@contextmanager
def _as_data_errors(path: str) -> Iterator[None]:
    """Context manager: raise the errors of the library as `DataError`, by their first line."""
    icechunk = _icechunk(path)
    try:
        yield
    except icechunk.IcechunkError as error:
        found = str(error).strip().splitlines()[0].lstrip("x ")
        raise DataError("the repository cannot be read", file=path, found=found) from error
