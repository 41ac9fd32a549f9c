"""Read interleaved fields, which alternate in every record of a file, with shared byte ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.index.cache import ChunkCache
from matex_data.index.model import Layout, ReadRequest, RowSelection
from matex_data.index.runs import runs_where
from matex_data.index.scatter import scatter
from matex_data.index.strided import SCATTER_BYTES, Strided
from matex_data.index.table import Column, Outputs, Table

WASTE = 0.04  # fraction of the bytes read that may belong to fields that are not selected
_Output = tuple[Strided, Array]


@dataclass(frozen=True, eq=False)
class InterleavedRecords(Table):
    """Records of several fields: rows of equal number and stride.

    Parameters
    ----------
    fields : the layout of each field in the records.
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
        outputs = [(self.fields[name], out) for name, out in outs if self.fields[name].row_bytes]
        if len(rows.destination):
            for group in _adjacent(outputs):
                yield from self._read(rows, group)

    def _read(self, rows: RowSelection, group: list[_Output]) -> Iterator[ReadRequest]:
        """Yield reads of the group's span in each record, or of whole runs of records if the span covers nearly all."""
        begin = group[0][0].offset
        span = max(field.offset + field.row_bytes for field, _ in group) - begin
        stride, numbers = group[0][0].stride, rows.numbers
        whole = stride - span <= WASTE * stride
        pitch = stride if whole else span
        step = max(1, SCATTER_BYTES // span)
        for i in range(0, len(numbers), step):
            selected = numbers[i : i + step]
            first, count = runs_where((np.diff(selected) == 1) & whole)
            nbytes = count * pitch
            nbytes[-1] -= pitch - span  # the file may end after the last record's span
            on_complete = partial(self._scatter, group, pitch, rows.destination[i : i + step])
            yield ReadRequest(begin + selected[first] * stride, nbytes, on_complete=on_complete)

    @staticmethod
    def _scatter(group: list[_Output], pitch: int, destination: Integers, data: Bytes) -> None:
        begin = group[0][0].offset
        for field, out in group:
            row = np.ndarray(field.shape, field.dtype, data, field.offset - begin)
            stored = np.lib.stride_tricks.as_strided(row, (len(destination), *field.shape), (pitch, *row.strides))
            scatter(out, destination, stored, field.convert)


def _adjacent(outputs: list[_Output]) -> list[list[_Output]]:
    """Group the fields that are close enough in a record to be read in one range."""
    groups: list[list[_Output]] = []
    used = 0
    for field, out in sorted(outputs, key=lambda pair: pair[0].offset):
        if groups:
            span = field.offset + field.row_bytes - groups[-1][0][0].offset
            if span - used - field.row_bytes <= WASTE * span:
                groups[-1].append((field, out))
                used += field.row_bytes
                continue
        groups.append([(field, out)])
        used = field.row_bytes
    return groups


def group_interleaved(layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layouts of one file with the interleaved fields among them as columns of one table."""
    records = {
        name: layout
        for name, layout in layouts.items()
        if isinstance(layout, Strided) and layout.stride > layout.row_bytes
    }
    if len(records) < 2 or len({layout.stride for layout in records.values()}) > 1:
        return dict(layouts)
    table = InterleavedRecords(records)
    return {name: Column(table, name) if name in records else layout for name, layout in layouts.items()}
