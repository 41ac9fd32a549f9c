"""Icechunk repositories: versions, values against the zarr package, ranks, and what cannot be read."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import icechunk
import numpy as np
import pytest
import zarr
from mpi4py import MPI

import matex_data as md
from matex_data.readers.zarr import repositories
from matex_data.readers.zarr.reader import open_store
from tests.support.format_suite import same
from tests.support.object_store import BUCKET, object_store

ROWS = 90


def _storage(where: str) -> Any:
    if not where.startswith("s3://"):
        return icechunk.local_filesystem_storage(where)
    options: Any = {"allow_http": True, "force_path_style": True, "region": "us-east-1"}
    prefix = where.removeprefix(f"s3://{BUCKET}/")
    endpoint = os.environ["AWS_ENDPOINT_URL"]
    return icechunk.s3_storage(bucket=BUCKET, prefix=prefix, endpoint_url=endpoint, from_env=True, **options)


def _write(where: str) -> list[str]:
    """Write two versions, of which the first is tagged ``v1``, and return the identifiers of their snapshots."""
    repository = icechunk.Repository.create(_storage(where))
    rng = np.random.default_rng(0)
    session = repository.writable_session("main")
    group = zarr.create_group(session.store)
    chunks = {"x": (8, 40), "y": (16,)}
    for name, values in (("x", rng.normal(size=(ROWS, 40)).astype("f4")), ("y", np.arange(ROWS))):
        array = group.create_array(
            name,
            shape=values.shape,
            chunks=chunks[name],
            dtype=values.dtype,
            dimension_names=("time", "c")[: values.ndim],
        )
        array[:] = values
    snapshots = [session.commit("first")]
    repository.create_tag("v1", snapshots[0])
    session = repository.writable_session("main")
    zarr.open_group(session.store)["x"][5:20] = -1  # type: ignore[index]
    return [*snapshots, session.commit("second")]


def _expected(where: str, snapshot: str) -> dict[str, Any]:
    session = icechunk.Repository.open(_storage(where)).readonly_session(snapshot_id=snapshot)
    group: Any = zarr.open_group(session.store, mode="r")
    return {name: group[name][...] for name in ("x", "y")}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[str]]:
    path = str(tmp_path_factory.mktemp("icechunk") / "run")
    return path, _write(path)


def _load(path: str, **options: Any) -> dict[str, Any]:
    return md.open_dataset(path, comm=MPI.COMM_SELF, **options).load()


def test_versions(repository: tuple[str, list[str]]) -> None:
    path, (first, second) = repository
    for version, snapshot in ((None, second), ("main", second), ("v1", first), (first, first)):
        library = _expected(path, snapshot)
        found = _load(path, version=version)
        assert set(found) == {"x", "y"}
        for name, values in library.items():
            same(found[name], values)


def _batches(comm: MPI.Intracomm, path: str) -> list[Any]:
    data = md.open_dataset(path, comm=comm, inputs="x", targets="y")
    return list(data.batches(24, shuffle=True, seed=3, remainder="keep"))


@pytest.mark.rank_counts(2, slow=(1, 3))
def test_ranks_read_their_own_chunks(pool: Any, repository: tuple[str, list[str]]) -> None:
    path, (_, second) = repository
    library = _expected(path, second)
    batches = [batch for of_rank in pool.run(_batches, path) for batch in of_rank]
    x, y = (np.concatenate([batch[k] for batch in batches]) for k in (0, 1))
    same(x[np.argsort(y)], library["x"])
    same(np.sort(y), library["y"])


def test_a_commit_does_not_change_what_is_open(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    _, second = _write(path)
    data, library = md.open_dataset(path, comm=MPI.COMM_SELF), _expected(path, second)
    session = icechunk.Repository.open(_storage(path)).writable_session("main")
    zarr.open_group(session.store)["x"][:] = 7  # type: ignore[index]
    session.commit("third")
    same(data.load()["x"], library["x"])
    assert (_load(path)["x"] == 7).all()


def test_what_cannot_be_read_is_told(repository: tuple[str, list[str]], tmp_path: Path) -> None:
    path, _ = repository
    with pytest.raises(md.DataError, match=r"(?s)no such version.*\['main'\].*\['v1'\].*'v2'"):
        _load(path, version="v2")
    zarr.save_array(str(tmp_path / "plain.zarr"), np.arange(9))
    with pytest.raises(md.DataError, match="the store has no versions"):
        _load(str(tmp_path / "plain.zarr"), version="main")
    sharded = str(tmp_path / "sharded")
    session = icechunk.Repository.create(_storage(sharded)).writable_session("main")
    group = zarr.create_group(session.store)
    group.create_array("x", shape=(64,), chunks=(4,), shards=(16,), dtype="i4")[:] = 1
    session.commit("shards")
    with pytest.raises(md.FormatError, match="shards in a store that reads by key alone"):
        _load(sharded, inputs="x")


def test_a_missing_file_of_a_chunk_is_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "run")
    _write(path)
    data = md.open_dataset(path, comm=MPI.COMM_SELF, inputs="x")
    for file in Path(path, "chunks").iterdir():
        file.unlink()
    with pytest.raises(md.DataError, match="the repository cannot be read"):
        data.load()


def test_a_forked_process_is_told(repository: tuple[str, list[str]]) -> None:
    """The library's threads stay in the process that made them: a forked one would wait for ever."""
    path, _ = repository
    store = open_store(path)
    assert store.get("zarr.json")
    child = os.fork()
    if not child:
        signal.alarm(20)  # ends it, whatever it waits for
        try:
            store.get("zarr.json")
        except md.DataError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_share_few_opened_snapshots(repository: tuple[str, list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    path, snapshots = repository
    monkeypatch.setattr(repositories, "_opened", lru_cache(2)(repositories._opened.__wrapped__))
    stores = [open_store(path, version) for version in (*snapshots, "v1", None)]
    expected = [store.get("x/c/1/0") for store in stores]
    assert expected[0] == expected[2] != expected[1] == expected[3]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda i: stores[i % 4].get("x/c/1/0"), range(200)))
    assert found == expected * 50


@pytest.mark.slow
def test_repositories_in_a_store_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        url = f"s3://{BUCKET}/runs/one"
        _, second = _write(url)
        library = _expected(url, second)
        for name, values in _load(url).items():
            same(values, library[name])


def test_an_index_would_stay_at_its_snapshot(repository: tuple[str, list[str]], tmp_path: Path) -> None:
    path, _ = repository
    with pytest.raises(md.FormatError, match="cannot be stored"):
        md.open_dataset(path, comm=MPI.COMM_SELF, index=tmp_path / "run.matex")
