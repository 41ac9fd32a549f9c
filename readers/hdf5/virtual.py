"""Sources of virtual datasets: which files they are, and which rows each holds.

Search for the files: ``H5F_prefix_open_file`` of the library, and the documentation of ``H5Pset_virtual``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from matex_data._types import Integers
from matex_data.declared import declared
from matex_data.errors import DataError
from matex_data.storage.trust import NO_BASE

PREFIX, LINK_PREFIX = "HDF5_VDS_PREFIX", "HDF5_EXT_PREFIX"


@dataclass(frozen=True)
class VirtualSource:
    """Dataset of another file, or of the same one, that holds samples of a virtual dataset.

    Parameters
    ----------
    path : of the file, as HDF5 finds it; where it does not, the path beside the virtual dataset.
    name : of the dataset in the file.
    start, stop : range of rows of the virtual dataset with all samples that the source holds.
    """

    path: str
    name: str
    start: int
    stop: int


@declared
@dataclass(frozen=True)
class SourceFiles:
    """Files of the sources of a virtual dataset, to see that they exist when their rows are read.

    Parameters
    ----------
    paths : of the files, one for each source.
    start, stop : int64[n], range of rows of each source.
    """

    paths: tuple[str, ...]
    start: Integers
    stop: Integers

    def sources(self) -> Sequence[str]:
        return self.paths

    @classmethod
    def of(cls, sources: list[VirtualSource]) -> SourceFiles:
        """Return the files of these sources."""
        bounds = np.array([(source.start, source.stop) for source in sources], np.int64).reshape(-1, 2)
        return cls(tuple(source.path for source in sources), bounds[:, 0], bounds[:, 1])

    def missing(self, start: int, stop: int) -> str | None:
        """Return the path of a file with some of these rows that does not exist; None if all do."""
        used = np.flatnonzero((self.start < stop) & (self.stop > start)).tolist()
        return next((path for path in dict.fromkeys(self.paths[i] for i in used) if not Path(path).exists()), None)


def sources_of(dataset: h5py.Dataset, path: str) -> Iterator[VirtualSource]:
    """Yield the sources of a virtual dataset of the open file ``path``."""
    return (source for _, source in _mapped(dataset, path))


def whole_sources_of(dataset: h5py.Dataset, path: str) -> list[tuple[VirtualSource, int]] | None:
    """Return the sources of a virtual dataset in the order of its rows, and the first row in each of them.

    None unless each of them gives whole rows, and each row has one source.
    """
    inner, found = dataset.shape[1:], []
    for mapping, source in _mapped(dataset, path):
        rows = source.stop - source.start
        if is_endless(mapping.vspace):
            is_whole = mapping.vspace.get_regular_hyperslab()[3][1:] == inner
        else:
            is_whole = _whole_rows(mapping.vspace, inner) == (source.start, rows)
        of_source = _whole_rows(mapping.src_space, inner)
        if not is_whole or of_source is None or of_source[1] not in (None, rows):
            return None
        found.append((source, of_source[0]))
    found.sort(key=lambda pair: pair[0].start)
    starts, stops = [source.start for source, _ in found], [source.stop for source, _ in found]
    return found if [*starts, dataset.shape[0]] == [0, *stops] else None


def _whole_rows(space: h5py.h5s.SpaceID, inner: tuple[int, ...]) -> tuple[int, int | None] | None:
    """Return the first row and the number of rows of a selection of whole rows; None for another selection.

    The number is None for all rows of a source, whose shape HDF5 does not know before it has opened it.
    """
    if space.get_select_type() == h5py.h5s.SEL_ALL:
        return 0, None
    if is_endless(space) or not space.get_select_npoints():
        return None
    low, high = space.get_select_bounds()
    rows = int(high[0]) - int(low[0]) + 1
    return (int(low[0]), rows) if space.get_select_npoints() == rows * prod(inner) else None


def is_endless(space: h5py.h5s.SpaceID) -> bool:
    """Return whether a selection has a block, or as many blocks, as far as the dataset reaches."""
    is_regular = space.get_select_type() == h5py.h5s.SEL_HYPERSLABS and space.is_regular_hyperslab()
    return is_regular and any(h5py.h5s.UNLIMITED in numbers for numbers in space.get_regular_hyperslab())


def _mapped(dataset: h5py.Dataset, path: str) -> Iterator[tuple[Any, VirtualSource]]:
    """Yield h5py's mappings of a virtual dataset of the open file ``path``, each with one of its sources."""
    folders = folders_of_sources(dataset)
    for mapping in dataset.virtual_sources():
        for number, start, stop in _blocks(mapping.vspace, mapping.file_name, dataset.shape):
            file, name = (numbered(text, number) for text in (mapping.file_name, mapping.dset_name))
            found = path if file == "." else find_file(file, path, folders)
            yield mapping, VirtualSource(found, name, start, min(stop, dataset.shape[0]))


def folders_of_sources(dataset: h5py.Dataset) -> list[str]:
    """Return the folders at which HDF5 looks first for the sources of a virtual dataset."""
    folder = os.fsdecode(dataset.id.get_access_plist().get_virtual_prefix())  # in which it has expanded ${ORIGIN}
    return [word for word in (*os.environ.get(PREFIX, "").split(":"), folder) if word]


def _blocks(space: h5py.h5s.SpaceID, file_name: str, shape: tuple[int, ...]) -> Iterator[tuple[int | None, int, int]]:
    """Yield number and rows of the blocks of a mapping to numbered files, or None and the rows of another mapping."""
    if space.get_select_type() != h5py.h5s.SEL_HYPERSLABS or not space.is_regular_hyperslab():
        low, high = space.get_select_bounds()
        yield None, int(low[0]), int(high[0]) + 1
        return
    start, stride, count, block = (tuple(map(int, numbers)) for numbers in space.get_regular_hyperslab())
    is_endless = h5py.h5s.UNLIMITED in (count[0], block[0])
    stop = shape[0] if is_endless else start[0] + (count[0] - 1) * stride[0] + block[0]
    unlimited = [axis for axis, n in enumerate(count) if n == h5py.h5s.UNLIMITED]
    if "%b" not in file_name.replace("%%", "") or not unlimited:
        yield None, start[0], stop
        return
    (axis,) = unlimited
    for number, first in enumerate(range(start[axis], shape[axis], stride[axis])):
        yield (number, first, first + block[0]) if axis == 0 else (number, start[0], stop)


def numbered(text: str, number: int | None) -> str:
    """Return a name with the number of its block in place of ``%b``; of a name with numbers, ``%%`` is a ``%``."""
    return text if number is None else "%".join(word.replace("%b", str(number)) for word in text.split("%%"))


def find_file(name: str, path: str, prefixes: list[str]) -> str:
    """Return the path of a file that another one names, at the first location that HDF5 looks at where there is one.

    Parameters
    ----------
    name : of the file in the other one.
    path : of the other one.
    prefixes : folders at which HDF5 looks first for a relative name, and for an absolute one that does not exist.

    Returns
    -------
    The path; that beside the other file, or an absolute one as it is, if there is no such file.

    Raises
    ------
    DataError : HDF5 would take a file of the working directory.
    """
    folder, is_absolute = Path(path).parent, Path(name).is_absolute()
    relative = Path(name).name if is_absolute else name
    here = Path(relative)
    before = [Path(name)] * is_absolute + [other / relative for other in (*map(Path, prefixes), folder)]
    candidates = chain([*before, here], (Path(path).resolve().parent / relative for _ in range(1)))  # seldom resolved
    found = next((candidate for candidate in candidates if os.path.exists(candidate)), None)  # noqa: PTH110 (any name)
    if found is here:
        raise DataError(
            "a file is named relative to the working directory",
            file=path,
            expected=f"{relative!r} in {str(folder)!r}",
            found=str(here.absolute()),
            remedy=f"move it, or set {PREFIX} or {LINK_PREFIX} to its folder: {NO_BASE}",
        )
    return str(found or (Path(name) if is_absolute else folder / relative))
