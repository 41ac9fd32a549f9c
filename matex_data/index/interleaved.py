"""Fields that take turns in every record: those that are wanted are read together where they lie side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Layout, ReadRequest, RowSelection
from matex_data.index.scatter import scatter
from matex_data.index.strided import SCATTER_BYTES, Strided
from matex_data.index.table import Column, Outputs, Table

WASTE = 0.04  # of what is read, that may lie between wanted fields
Wanted = tuple[Strided, Array]


@dataclass(frozen=True, eq=False)
class InterleavedRecords(Table):
    """Rows of several fields at the same even distance in one file.

    Parameters
    ----------
    fields : where each lies; all of the same number of rows and stride.
    """

    fields: Mapping[str, Strided]

    @property
    def rows(self) -> int:  # type: ignore[override]
        return next(iter(self.fields.values())).rows

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return 1

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.fields)

    def borders(self) -> Integers | None:
        return None

    def stored_bytes(self) -> int:
        return sum(field.stored_bytes() for field in self.fields.values())

    def end(self) -> int:
        return max(field.end() for field in self.fields.values())

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        wanted = [(self.fields[name], out) for name, out in outs if self.fields[name].row_bytes]
        if len(rows.destination):
            for group in _neighbours(wanted):
                yield from self._read(rows, group)

    def _read(self, rows: RowSelection, group: list[Wanted]) -> Iterator[ReadRequest]:
        """A group's part of every record, or whole runs of records if nearly all of them is wanted."""
        begin = group[0][0].offset
        span = max(field.offset + field.row_bytes for field, _ in group) - begin
        stride, numbers = group[0][0].stride, rows.numbers
        whole = stride - span <= WASTE * stride
        pitch = stride if whole else span
        step = max(1, SCATTER_BYTES // span)
        for i in range(0, len(numbers), step):
            some = numbers[i : i + step]
            unbroken = (np.diff(some) == 1) & whole
            first = np.flatnonzero(np.concatenate([[True], ~unbroken]))
            count = np.diff(np.append(first, len(some)))
            nbytes = count * pitch
            nbytes[-1] -= pitch - span  # behind the last record the file may end
            finish = partial(self._finish, group, pitch, rows.destination[i : i + step])
            yield ReadRequest(begin + some[first] * stride, nbytes, on_complete=finish)

    @staticmethod
    def _finish(group: list[Wanted], pitch: int, destination: Integers, data: Bytes) -> None:
        begin = group[0][0].offset
        for field, out in group:
            row = np.ndarray(field.shape, field.dtype, data, field.offset - begin)
            stored = np.lib.stride_tricks.as_strided(row, (len(destination), *field.shape), (pitch, *row.strides))
            scatter(out, destination, stored, field.convert)


def _neighbours(wanted: list[Wanted]) -> list[list[Wanted]]:
    """Fields that are read together: little lies between them."""
    groups: list[list[Wanted]] = []
    used = 0
    for field, out in sorted(wanted, key=lambda pair: pair[0].offset):
        if groups:
            span = field.offset + field.row_bytes - groups[-1][0][0].offset
            if span - used - field.row_bytes <= WASTE * span:
                groups[-1].append((field, out))
                used += field.row_bytes
                continue
        groups.append([(field, out)])
        used = field.row_bytes
    return groups


def group_interleaved(parts: Mapping[str, Layout]) -> dict[str, Layout]:
    """The parts of one file; those that take turns in its records as columns of one table."""
    turns = {name: part for name, part in parts.items() if isinstance(part, Strided) and part.stride > part.row_bytes}
    strides = {part.stride for part in turns.values()}
    if len(turns) < 2 or len(strides) > 1:
        return dict(parts)
    table = InterleavedRecords(turns)
    return {name: Column(table, name) if name in turns else part for name, part in parts.items()}
