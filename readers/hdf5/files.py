"""HDF5 files that are open. The other files that they name, with links, raw data or sources, are asked for first.

HDF5 follows names on its own as soon as an object is opened or read. So the objects of an open file are had by their
names alone, and `Trust` decides as each of them is opened.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import h5py

from matex_data.errors import DataError
from matex_data.readers.formats import HDF5_MAGIC
from matex_data.readers.hdf5.names import HDF5_ERRORS
from matex_data.readers.hdf5.virtual import LINK_PREFIX, find_file, folders_of_sources, is_endless, numbered
from matex_data.storage.files import open_binary
from matex_data.storage.objects import is_url
from matex_data.storage.trust import NO_BASE, Trust

OWN_DRIVER = "matex_data"
MOST_LINKS = 16  # one behind the other, as in HDF5
RAW_PREFIX = "HDF5_EXTFILE_PREFIX"
ORIGIN = "${ORIGIN}"
SUPERBLOCK_BYTES = 96  # at most, of versions 0 and 1
BASE_ADDRESS = {0: 24, 1: 28}
"""Where four addresses begin in a superblock of each version: the last is that of the driver information block."""
OPEN_FOR_WRITING = "already open for"  # in the error of a file that is being written, or was not closed


class _Gate:
    """Mixin of an open file and of its groups: objects by name, after what they lead to was asked for."""

    _trust: Trust
    _path: str
    _asked: set[tuple[str, str]]
    _names: set[str]  # whose links were asked for
    id: Any

    def begin(self, path: str, trust: Trust, asked: set[tuple[str, str]]) -> None:
        """Set the path of the file, what it is trusted with, and what was asked for: files and names of datasets."""
        self._path, self._trust, self._asked, self._names = path, trust.beside(path), asked, set()

    def __getitem__(self, name: Any) -> Any:
        self._ask_links(name)
        found: Any = object_at(self, name, super().__getitem__)  # type: ignore[misc]
        if type(found) is h5py.Group:
            group = _TrustedGroup(found.id)
            group.begin(os.fsdecode(h5py.h5f.get_name(found.id)), self._trust, self._asked)
            return group
        if isinstance(found, h5py.Dataset):
            self._ask_others(found)
        return found

    def __contains__(self, name: Any) -> bool:
        self._ask_links(name.rpartition("/")[0])  # the last link is not followed
        return super().__contains__(name)  # type: ignore[misc, no-any-return]

    def get(self, name: Any, default: Any = None, getclass: bool = False, getlink: bool = False) -> Any:
        self._ask_links(name.rpartition("/")[0] if getlink else name)
        return super().get(name, default, getclass, getlink)  # type: ignore[misc]

    def _ask_links(self, name: Any, depth: int = 0) -> None:
        """Ask for the files to which the links of a name lead, one behind the other."""
        name = os.fsdecode(name) if isinstance(name, bytes) else name
        if isinstance(name, str) and name not in self._names:
            self._follow(name, depth)
            self._names.add(name)  # without it after an error: whoever asks again is told again

    def _follow(self, name: str, depth: int) -> None:
        if depth > MOST_LINKS:
            raise KeyError(f"{name!r}: the links lead in a circle")
        root = "/" if name.startswith("/") else ""
        words = [word for word in name.split("/") if word not in ("", ".")]  # as HDF5 skips them
        for end in range(1, len(words) + 1):
            link = root + "/".join(words[:end])
            try:
                kind = self.id.links.get_info(os.fsencode(link)).type
                value = None if kind == h5py.h5l.TYPE_HARD else self.id.links.get_val(os.fsencode(link))
            except HDF5_ERRORS:
                return  # whoever opens it is told
            if value is None:
                continue
            if kind == h5py.h5l.TYPE_EXTERNAL:
                file, inner = map(os.fsdecode, value)
                self._ask_file(file, "/".join([inner, *words[end:]]), name, depth + 1)
            else:
                target = os.fsdecode(value)
                above = root + "/".join(words[: end - 1])
                whole = target if target.startswith("/") or not above else f"{above}/{target}"
                self._ask_links("/".join([whole, *words[end:]]), depth + 1)
            return

    def _ask_file(self, named: str, inner: str, link: str, depth: int) -> None:
        """Ask for the target of an external link, and for the targets of the links in it."""
        if is_url(self._path):
            raise KeyError(f"{link!r} is a link to another file, {named!r}, which is not read from a store")
        target = find_file(named, self._path, [word for word in os.environ.get(LINK_PREFIX, "").split(":") if word])
        self._trust.check_hdf5(target, self._path, link)
        with suppress(*HDF5_ERRORS), open_file(target, self._trust, self._asked) as other:
            other._ask_links(f"/{inner}", depth)

    def _ask_others(self, dataset: h5py.Dataset, is_source: bool = False) -> None:
        """Ask for the files of the raw data, or of the sources, of a dataset."""
        plist = dataset.id.get_create_plist()
        is_virtual = plist.get_layout() == h5py.h5d.VIRTUAL
        if not is_virtual and not plist.get_external_count():
            return
        path, name = os.fsdecode(h5py.h5f.get_name(dataset.id)), str(dataset.name)
        path = self._path if is_url(self._path) else path
        if is_url(path) or (path, name) in self._asked:
            return  # of a store, no other files are read
        self._asked.add((path, name))  # before its sources, which may lead back to it
        try:
            self._ask_all(dataset, path, name, is_source)
        except DataError:
            self._asked.discard((path, name))  # whoever asks again is told again
            raise

    def _ask_all(self, dataset: h5py.Dataset, path: str, name: str, is_source: bool) -> None:
        plist, trust = dataset.id.get_create_plist(), self._trust.beside(path)
        if os.environ.get(RAW_PREFIX):
            trust |= Trust.of([raw_prefix(path)])
        for raw in raw_files(plist, path):
            trust.check(raw, path, name)
        if is_source and plist.get_external_count() and not os.environ.get(RAW_PREFIX):
            _refuse_relative_raw(plist, path, name)
        if plist.get_layout() == h5py.h5d.VIRTUAL:
            self._ask_sources(dataset, path, name)

    def _ask_sources(self, dataset: h5py.Dataset, path: str, name: str) -> None:
        """Ask for the sources of a virtual dataset, and for what they lead to. Its shape is known only after that."""
        folders = folders_of_sources(dataset)
        for mapping in dataset.virtual_sources():
            is_numbered = "%b" in f"{mapping.file_name}{mapping.dset_name}".replace("%%", "")
            for number in count() if is_numbered and is_endless(mapping.vspace) else [None]:
                file, inner = (numbered(text, number) for text in (mapping.file_name, mapping.dset_name))
                target = path if file == "." else find_file(file, path, folders)
                self._trust.beside(path).check_hdf5(target, path, name)
                if not self._asked_source(target, inner):
                    break  # HDF5 looks no further, too

    def _asked_source(self, path: str, name: str) -> bool:
        """Return whether there is a source, after what it leads to was asked for."""
        with suppress(*HDF5_ERRORS), open_file(path, self._trust, self._asked) as file:
            file._ask_links(name)
            file._ask_others(h5py.Dataset(h5py.h5d.open(file.id, os.fsencode(name))), is_source=True)
            return True
        return False


class TrustedFile(_Gate, h5py.File):  # type: ignore[misc]
    """HDF5 file that is open for reading."""


class _TrustedGroup(_Gate, h5py.Group):  # type: ignore[misc]
    """Group of an open file."""


_kept = threading.local()  # the file that this thread keeps open, and its path


@contextmanager
def kept_open(path: str) -> Iterator[None]:
    """Context manager: keep a file open in this thread, and let `open_file` return it meanwhile."""
    with _opened(TrustedFile, path) as file:
        _kept.path, _kept.file = path, file
        try:
            yield
        finally:
            _kept.path = _kept.file = None


def open_file(
    path: str, trust: Trust | None = None, asked: set[tuple[str, str]] | None = None, swmr: bool = False
) -> AbstractContextManager[TrustedFile]:
    """Return a context manager of a file that is open for reading.

    Parameters
    ----------
    trust : where its bytes may come from beside its own folder; None: from nowhere.
    asked : files and names of datasets that were asked for.
    swmr : another program may write the file ("single writer, multiple readers" of HDF5).
    """
    is_kept = getattr(_kept, "path", None) == path
    file = _kept.file if is_kept else _opened(TrustedFile, path, swmr)
    file.begin(path, trust or Trust(), set() if asked is None else asked)
    return nullcontext(file) if is_kept else file


def open_indexed(path: str) -> h5py.File:
    """Open a file whose objects were asked for before, as those that an index names, also one that is being written."""
    try:
        return _opened(h5py.File, path)
    except OSError as error:
        if OPEN_FOR_WRITING not in str(error):
            raise
        return _opened(h5py.File, path, swmr=True)


def _opened(kind: type[h5py.File], path: str, swmr: bool = False) -> Any:
    """Open a file for reading, without locks: many parallel file systems do not support them.

    HDF5 shares one open file among all that open it in a process, and refuses other flags of locking. It does so for
    each driver: the one that could log, and reads as the default one does, leaves the default one to the user.
    """
    h5py.register_driver(OWN_DRIVER, _set_own_driver)
    if is_url(path):
        file = open_binary(path)
        _check_driver_block(file)
        return kind(file, "r")
    with open_binary(path) as file:
        _check_driver_block(file)
    return kind(path, "r", driver=OWN_DRIVER, locking=False, swmr=swmr)


def _check_driver_block(file: BinaryIO) -> None:
    """Raise ``OSError`` if the driver information block claims more than the file has: HDF5 takes memory for the claim.

    It stands behind a superblock of version 0 or 1 (HDF5 File Format Specification 3.0, II.A and II.B), whose addresses
    count from its base address.
    """
    head = file.read(SUPERBLOCK_BYTES)
    if len(head) < SUPERBLOCK_BYTES or not head.startswith(HDF5_MAGIC[0][1]) or head[8] not in BASE_ADDRESS:
        return
    begin, width = BASE_ADDRESS[head[8]], head[13]
    base, _, _, block = (int.from_bytes(head[begin + i * width :][:width], "little") for i in range(4))
    size = file.seek(0, os.SEEK_END)
    if base + block < size:  # there is one
        file.seek(base + block)
        claimed = int.from_bytes(file.read(8)[4:], "little")
        if claimed > size:
            raise OSError(f"damaged: its driver information block claims {claimed:,} bytes, and the file has {size:,}")


def _set_own_driver(plist: h5py.h5p.PropFAID) -> None:
    plist.set_fapl_log(b"", 0, 0)  # without flags nothing is logged, and no log file is made


def object_at(group: h5py.Group, name: Any, by_name: Callable[[Any], Any]) -> Any:
    """Return an object of a group; a dataset with raw data in other files has them beside its own file.

    Without this, HDF5 would begin at the working directory. Of an open dataset it refuses another folder.

    Parameters
    ----------
    by_name : h5py's function of the group.
    """
    try:
        found = by_name(name)
        if isinstance(found, h5py.Dataset):
            _refresh(found)
        if not isinstance(found, h5py.Dataset) or not found.id.get_create_plist().get_external_count():
            return found
        found.id._close()
    except HDF5_ERRORS as error:
        if "external file prefix" not in str(error):
            raise
    return _beside_raw(group, name)


def _refresh(dataset: h5py.Dataset) -> None:
    """Make the type of texts, or lists, of a file that is open more than once refer to this opening of it.

    All openings have one type in memory, with a pointer to that which has read last. If this one has been closed,
    ``H5Dget_create_plist`` of a fill value, which texts of netCDF have, ends the process (HDF5 1.14.6). A read sets it.
    """
    with suppress(*HDF5_ERRORS):
        name = h5py.h5f.get_name(dataset.id)
        if not dataset.dtype.hasobject or _open_files().count(name) < 2:
            return
        if dataset.id.get_offset() is None:
            dataset.id.get_num_chunks()  # an error, if other files have the elements, which may not be trusted
        dataset[(slice(0, 1),) * dataset.ndim]


def _open_files() -> list[bytes]:
    return [h5py.h5f.get_name(file) for file in h5py.h5f.get_obj_ids(h5py.h5f.OBJ_ALL, h5py.h5f.OBJ_FILE)]


def _beside_raw(group: h5py.Group, name: str) -> h5py.Dataset:
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_efile_prefix(ORIGIN.encode())
    return h5py.Dataset(h5py.h5d.open(group.id, os.fsencode(name), access))


def raw_prefix(path: str) -> str:
    """Return the folder at which relative names of raw data files begin."""
    named = os.environ.get(RAW_PREFIX, "")
    return named.replace(ORIGIN, str(Path(path).absolute().parent)) if named else str(Path(path).parent)


def raw_files(plist: h5py.h5p.PropDCID, path: str) -> list[str]:
    """Return the paths of the raw data files of a dataset of the file ``path``, by its creation properties."""
    names = (os.fsdecode(plist.get_external(i)[0]) for i in range(plist.get_external_count()))
    return [str(Path(raw_prefix(path)) / name) for name in names]


def _refuse_relative_raw(plist: h5py.h5p.PropDCID, path: str, name: str) -> None:
    """Raise ``DataError`` if HDF5 would look in the working directory for raw data of a virtual dataset's source."""
    for i in range(plist.get_external_count()):
        raw = os.fsdecode(plist.get_external(i)[0])
        if not raw.startswith("/"):
            raise DataError(
                "a source of a virtual dataset has raw data in a file that is named without its folder",
                file=path,
                field=name,
                expected="the whole path of the file",
                found=repr(raw),
                remedy=f"set {RAW_PREFIX} to its folder: {NO_BASE}",
            )
