"""Sliding windows of consecutive rows, for forecasting. Each row is read once, however many windows contain it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError, PartitionError
from matex_data.fields import Field, Names, Schema, as_list
from matex_data.index.cache import ChunkCache
from matex_data.index.files import DerivedFiles
from matex_data.index.model import FileIndex, Index, Layout, ReadRequest, RowSelection, call_after_last
from matex_data.index.runs import compress
from matex_data.index.scatter import scatter
from matex_data.index.table import Column, Outputs, Table

AHEAD = "{}_ahead"  # name of the field with the rows behind a window
BLOCK_WINDOWS = 8  # least length of a block, in windows: neighbouring windows share most of their rows
INPUT, TARGET = "input", "target"
_NO_BYTES: Integers = np.empty(0, np.int64)


@dataclass(frozen=True)
class WindowShape:
    """Extent of the windows: ``window`` rows from every ``stride``-th row on, and the ``horizon`` rows behind them."""

    window: int
    stride: int
    horizon: int

    def count(self, rows: int) -> int:
        """Return the number of windows in a file of that many rows."""
        return max(0, (rows - self.window - self.horizon) // self.stride + 1)

    def counts(self, rows: Array) -> Integers:
        """Return the number of windows in each of several files, int64[files]."""
        return np.maximum(0, (rows.astype(np.int64) - self.window - self.horizon) // self.stride + 1)

    @property
    def overlap(self) -> int:
        """Number of windows behind a window that share rows with it or with its target."""
        return -(-(self.window + self.horizon) // self.stride) - 1

    def rows(self, samples: Integers, ahead: bool) -> Integers:
        """Return the rows of each window, int64[samples, window]; or of those ahead of it, int64[samples, horizon]."""
        begin, length = (self.window, self.horizon) if ahead else (0, self.window)
        return samples[:, None] * self.stride + np.arange(begin, begin + length)


@dataclass(frozen=True, eq=False)
class Windows(Table):
    """Windows of one field of one file, and the rows ahead of them, as the columns "input" and "target".

    Parameters
    ----------
    layout : layout of the field.
    field : the field.
    shape : extent of the windows.
    """

    layout: Layout
    field: Field
    shape: WindowShape
    width: int = 1

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.shape.count(self.layout.rows)

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        longest = max(self.layout.block_rows, BLOCK_WINDOWS * (self.shape.window + self.shape.horizon))
        return max(1, longest // self.shape.stride)

    def borders(self) -> Integers | None:
        return None

    def stored_bytes(self) -> int:
        return self.layout.stored_bytes()

    def end(self) -> int:
        return self.layout.end()

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        samples = rows.numbers
        needed = [self.shape.rows(samples, name == TARGET) for name, _ in outs]
        numbers = np.unique(np.concatenate([rows.ravel() for rows in needed]))
        base = self.field.empty(len(numbers))
        runs = compress(numbers)
        unique = RowSelection(runs.start, runs.start + runs.count, np.arange(len(numbers)))
        reads = list(self.layout.requests(unique, base, cache)) or [ReadRequest(_NO_BYTES, _NO_BYTES)]
        positions = [np.searchsorted(numbers, rows) for rows in needed]
        yield from call_after_last(reads, partial(_spread, base, rows.destination, positions, [out for _, out in outs]))


def _spread(base: Array, destination: Integers, positions: Sequence[Integers], outs: Sequence[Array]) -> None:
    """Copy row ``positions[k][i]`` of ``base`` to row ``destination[i]`` of ``outs[k]``."""
    for rows, out in zip(positions, outs, strict=True):
        if len(destination) == len(out) and out.dtype == base.dtype and out.flags.c_contiguous:
            order = np.empty_like(destination)
            order[destination] = np.arange(len(destination))
            np.take(base, rows[order], axis=0, out=out, mode="clip")
        else:
            scatter(out, destination, base[rows])


def sliding_windows(
    index: Index, inputs: Names, targets: Names, window: int, stride: int, horizon: int | None
) -> tuple[Index, Names, int]:
    """Return an index whose samples are windows, the names of its targets, and the windows that share rows with one.

    Parameters
    ----------
    index : index of samples in a meaningful order, such as time.
    inputs : fields of a window; each sample has the shape (window, *field shape).
    targets : fields of the rows behind a window; each sample has the shape (horizon, *field shape). None: ``inputs``
        if there is a horizon.
    window, stride, horizon : extents in rows. No window reaches from one file into the next.

    Raises
    ------
    PartitionError : an extent is below 1.
    FormatError : no file is long enough for a window; a field has samples of varying length.
    """
    if min(window, stride, 1 if horizon is None else horizon) < 1:
        raise PartitionError(
            "an extent of the windows is too small",
            expected="window, stride and horizon of 1 or more",
            found=f"window={window}, stride={stride}, horizon={horizon}",
        )
    names = list(index.fields) if inputs is None else as_list(inputs)
    ahead = as_list(targets) or (names if horizon else [])
    shape = WindowShape(window, stride, (horizon or 1) if ahead else 0)
    fields = {name: _extended(index.fields[name], name, window) for name in names}
    fields |= {AHEAD.format(n): _extended(index.fields[n], AHEAD.format(n), shape.horizon) for n in ahead}
    rows = shape.counts(index.files.rows)
    if not rows.any():
        raise FormatError(
            "no file is long enough for a window",
            file=index.files.paths[0],
            expected=f"at least {shape.window + shape.horizon} rows (window + horizon)",
            found=f"{index.files.rows.max()} rows in the longest of {len(rows)} files",
        )
    bare = isinstance(targets, str) or (targets is None and isinstance(inputs, str))
    renamed = [AHEAD.format(name) for name in ahead]
    targets_ahead = (renamed[0] if bare else renamed) if ahead else None
    files = DerivedFiles(index.files, partial(_slide, index.fields, names, ahead, shape), rows)
    return Index(fields, files, index.static), targets_ahead, shape.overlap


def _slide(
    fields: Schema, names: Sequence[str], ahead: Sequence[str], shape: WindowShape, _: int, file: FileIndex
) -> FileIndex:
    """Return the index of a file with windows as samples."""
    tables = {
        name: Windows(file.layouts[name], fields[name], shape)
        for name in {**dict.fromkeys(names), **dict.fromkeys(ahead)}
    }
    layouts: dict[str, Layout] = {name: Column(tables[name], INPUT) for name in names}
    layouts |= {AHEAD.format(name): Column(tables[name], TARGET) for name in ahead}
    return replace(file, rows=shape.count(file.rows), layouts=layouts)


def _extended(field: Field, name: str, rows: int) -> Field:
    """Return the field with an axis of ``rows`` rows in front."""
    if field.ragged:
        raise FormatError("a field with samples of varying length has no windows", field=field.name)
    return replace(field, name=name, shape=(rows, *field.shape))
