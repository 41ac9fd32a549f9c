"""Groups of an HDF5 file as samples: one field for each dataset that all groups have, such as those of molecules."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import h5py
import numpy as np

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import FormatError
from matex_data.fields import ALL_ROWS, Field
from matex_data.index.columns import compact
from matex_data.index.jagged import Scattered
from matex_data.index.model import Index, Layout
from matex_data.index.united import ragged_field
from matex_data.paths import natural_sorted
from matex_data.readers.catalogue import Catalogue, Entry
from matex_data.readers.decoding import narrow
from matex_data.readers.hdf5.chunks import begin_of
from matex_data.readers.hdf5.files import TrustedFile
from matex_data.readers.hdf5.names import links_of, reported
from matex_data.readers.hdf5.rows import ItemRows
from matex_data.readers.hdf5.types import array_element, element_type, has_bytes_of

DEEPEST = 4  # groups above the samples
MOST_LOOKED_AT = 8  # groups of one, of which the first ones tell what the others are
BLOCK_ROWS = 16  # arrays that are compressed, or texts, of a block
MOST_BYTES = 1 << 60  # of an array, far above what files have: sums of sizes do not overflow


def index_groups(file: TrustedFile, path: str, names: Sequence[str] | None, group: str | None) -> Index:
    """Return the index of a file in which a group is a sample.

    Parameters
    ----------
    names : datasets by their paths in a group, or patterns of these; None: those that all groups have.
    group : that holds the samples; None: the one that has most groups.

    Raises
    ------
    FieldNotFound : no group has such a dataset.
    FormatError : there are no groups, or they differ in a field.
    """
    parent = _most_groups(file, path) if group is None else group.strip("/")
    samples, found = _read(file, path, parent)
    encoded = [os.fsencode(sample) for sample in samples]
    groups = np.frombuffer(b"".join(encoded), np.uint8), compact(np.cumsum([0, *map(len, encoded)]))
    entries: dict[str, Entry] = {}
    for name, column in found.items():
        made = None if column.problem else column.field(name)
        layout = None if made is None else partial(column.layout, path, made, parent, *groups)
        entries[name] = column.problem if made is None or layout is None else (made, layout)
    return Catalogue.of(path, entries).index(names)


def _most_groups(file: TrustedFile, path: str) -> str:
    """Return the name of the group that has most groups, of which the first ones at each level are looked at."""
    most, best, pending = 0, "", [("", 0)]
    while pending:
        name, depth = pending.pop(0)
        groups = natural_sorted(_groups_of(file, name))
        if len(groups) > most:
            most, best = len(groups), name
        if depth < DEEPEST:
            pending += [(f"{name}/{inner}".strip("/"), depth + 1) for inner in groups[:MOST_LOOKED_AT]]
    if not most:
        raise FormatError(
            "the file has no groups",
            file=path,
            expected="groups with arrays, each of which is a sample",
            remedy="open it without sample='group': rows are samples; or with sample='file'",
        )
    return best


def _groups_of(file: TrustedFile, name: str) -> list[str]:
    parent = h5py.h5g.open(file.id, os.fsencode(name or "/"))
    kinds = ((link, h5py.h5g.get_objinfo(parent, link, follow_link=False).type) for _, link, _ in links_of(parent))
    return [os.fsdecode(link) for link, kind in kinds if kind == h5py.h5g.GROUP]


@dataclass
class _Column:
    """Datasets of one name in all groups, in the order of the groups.

    Parameters
    ----------
    dataset : the first one.
    kind : its type in the file.
    offset, lengths : byte position and shape of each dataset, as one list; 0 without bytes.
    plain : all have byte ranges that NumPy has a type for.
    problem : what is wrong with it; "": nothing.
    """

    dataset: h5py.Dataset
    kind: h5py.h5t.TypeID
    axes: int
    offset: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[int] = field(default_factory=lambda: array("q"))
    plain: bool = True
    problem: str = ""

    @classmethod
    def of(cls, dataset: h5py.Dataset) -> _Column:
        """Return the column of which a dataset is the first one."""
        kind = dataset.id.get_type()
        column = cls(dataset, kind, dataset.ndim)
        memory = element_type(dataset)
        stored, item, ragged = array_element(memory)
        if ragged or item or dataset.shape is None:
            column.problem = "its elements have no fixed size"
        column.plain = stored.names is None and has_bytes_of(kind, memory)
        return column

    def add(self, opened: h5py.h5d.DatasetID, name: str) -> None:
        """Add the dataset of the next group."""
        shape, offset = opened.shape, begin_of(opened)
        if shape is None or len(shape) != self.axes or opened.get_type() != self.kind:
            self.problem = self.problem or f"{name!r} has another type or number of axes"
            shape = (0,) * self.axes
        if math.prod(shape) * self.kind.get_size() > MOST_BYTES:
            self.problem = self.problem or f"{name!r} claims an array of {shape}"
            shape = (0,) * self.axes
        self.plain &= offset is not None or 0 in shape
        self.offset.append(offset or 0)
        self.lengths.extend(shape)

    @property
    def shapes(self) -> Array:
        """Shapes of the datasets, int64[groups, axes]."""
        return np.frombuffer(self.lengths, np.int64).reshape(len(self.offset), self.axes)

    def field(self, name: str) -> Field:
        """Return the field, dense if all shapes agree."""
        shapes = self.shapes
        equal = (shapes == shapes[0]).all(axis=0).tolist()
        shape = [length if same else None for length, same in zip(shapes[0].tolist(), equal, strict=True)]
        stored = array_element(element_type(self.dataset))[0]
        dtype = np.dtype(object) if stored.hasobject else np.dtype(stored.newbyteorder("="))
        return ragged_field(Field(name, (), dtype, attributes={ALL_ROWS: True}), shape)

    def layout(self, path: str, made: Field, parent: str, groups: Array, ends: Array) -> Layout:
        """Return the layout of the field: byte ranges where there are such; see `GroupRows`."""
        if self.plain:
            stored = array_element(element_type(self.dataset))[0]
            return Scattered(narrow(np.frombuffer(self.offset, np.int64)), narrow(self.shapes), stored)
        nbytes = int(self.shapes.prod(axis=1).sum()) * made.dtype.itemsize
        rows, kind = len(self.offset), (made.dtype, made.ragged, nbytes)
        return GroupRows(path, made.name, rows, max(1, min(BLOCK_ROWS, rows)), *kind, parent, groups, ends)


def _read(file: TrustedFile, path: str, parent: str) -> tuple[list[str], dict[str, _Column]]:
    """Return the names of the groups in a group, and the columns of their datasets; raise ``FormatError`` if there are
    no groups with datasets, or one cannot be read.
    """
    columns: dict[str, _Column] = {}
    with reported("the groups of the file cannot be read", path):
        groups = natural_sorted(_groups_of(file, parent))
        above = h5py.h5g.open(file.id, os.fsencode(parent or "/"))
        for number, group in enumerate(groups):
            for name, opened in _datasets(h5py.h5g.open(above, os.fsencode(group)), b""):
                column = columns.get(name)
                if column is None:
                    column = columns[name] = _Column.of(_asked(file, f"{parent}/{group}/{name}"))
                    column.problem = column.problem or (f"{groups[0]!r} lacks it" if number else "")
                elif begin_of(opened) is None:
                    _asked(file, f"{parent}/{group}/{name}")
                if len(column.offset) < number:
                    column.problem = column.problem or f"{groups[len(column.offset)]!r} lacks it"
                else:
                    column.add(opened, group)
    for column in columns.values():
        if len(column.offset) < len(groups):
            column.problem = column.problem or f"{groups[len(column.offset)]!r} lacks it"
    return groups, columns


def _datasets(group: h5py.h5g.GroupID, prefix: bytes) -> Iterator[tuple[str, h5py.h5d.DatasetID]]:
    """Yield the datasets within a group that hard links lead to, with their paths from it."""
    for _, link, name in reversed(links_of(group, prefix)):
        kind = h5py.h5g.get_objinfo(group, link, follow_link=False).type
        if kind == h5py.h5g.DATASET:
            yield os.fsdecode(name), h5py.h5d.open(group, link)
        elif kind == h5py.h5g.GROUP and prefix.count(b"/") < DEEPEST:
            yield from _datasets(h5py.h5g.open(group, link), name + b"/")


def _asked(file: TrustedFile, name: str) -> h5py.Dataset:
    """Return a dataset, after the files that it leads to were asked for."""
    found: h5py.Dataset = file[name]
    return found


@declared
@dataclass(frozen=True, eq=False)
class GroupRows(ItemRows):
    """Datasets of one name in groups.

    Parameters
    ----------
    parent : group that has the groups.
    groups : uint8[n], the names of the groups, one after the other.
    ends : integers[rows + 1], where they begin, and end.
    """

    parent: str
    groups: Array
    ends: Array

    def items(self, start: int, stop: int) -> list[Array]:
        file = self.opened(self._dataset(0)).file
        return [np.asarray(file[self._dataset(number)][()], self.dtype) for number in range(start, stop)]

    def _dataset(self, number: int) -> str:
        group = os.fsdecode(self.groups[int(self.ends[number]) : int(self.ends[number + 1])].tobytes())
        return f"{self.parent}/{group}/{self.name}"
