"""Windows of consecutive samples, for forecasting: each row of a window is read once, however many windows share it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError, PartitionError
from matex_data.fields import Field, Names, as_list
from matex_data.index.cache import ChunkCache
from matex_data.index.model import FileIndex, Index, Layout, ReadRequest, RowSelection, call_after_last
from matex_data.index.runs import compress
from matex_data.index.scatter import scatter
from matex_data.index.table import Column, Outputs, Table

AHEAD = "{}_ahead"  # name of a field that holds what follows a window
SHARED_BLOCKS = 8  # a block of windows is at least so many times as long as one: neighbours share most of their rows
NOTHING: Integers = np.empty(0, np.int64)


@dataclass(frozen=True)
class Shape:
    """Which rows make a sample: ``window`` from every ``stride``-th row on, and the ``horizon`` rows behind them."""

    window: int
    stride: int
    horizon: int

    def count(self, rows: int) -> int:
        """Samples of that many rows."""
        return max(0, (rows - self.window - self.horizon) // self.stride + 1)

    def rows(self, samples: Integers, ahead: bool) -> Integers:
        """int64[samples, window or horizon], the rows of each sample's inputs, or of what is ahead of them."""
        begin, length = (self.window, self.horizon) if ahead else (0, self.window)
        return samples[:, None] * self.stride + np.arange(begin, begin + length)


@dataclass(frozen=True, eq=False)
class Windows(Table):
    """The windows of one field of one file, and what is ahead of them, as columns "input" and "target"."""

    part: Layout
    field: Field
    shape: Shape
    width: int = 1

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.shape.count(self.part.rows)

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        longest = max(self.part.block_rows, SHARED_BLOCKS * (self.shape.window + self.shape.horizon))
        return max(1, longest // self.shape.stride)

    def borders(self) -> Integers | None:
        return None

    def stored_bytes(self) -> int:
        return self.part.stored_bytes()

    def end(self) -> int:
        return self.part.end()

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        samples = rows.numbers
        wanted = [self.shape.rows(samples, name == _TARGET) for name, _ in outs]
        numbers = np.unique(np.concatenate([rows.ravel() for rows in wanted]))
        base = self.field.empty(len(numbers))
        runs = compress(numbers)
        unique = RowSelection(runs.start, runs.start + runs.count, np.arange(len(numbers)))
        parts = list(self.part.requests(unique, base, cache)) or [ReadRequest(NOTHING, NOTHING)]
        positions = [np.searchsorted(numbers, rows) for rows in wanted]
        yield from call_after_last(parts, partial(_spread, base, rows.destination, positions, [out for _, out in outs]))


def _spread(base: Array, destination: Integers, positions: Sequence[Integers], outs: Sequence[Array]) -> None:
    for rows, out in zip(positions, outs, strict=True):
        if len(destination) == len(out) and out.dtype == base.dtype and out.flags.c_contiguous:
            order = np.empty_like(destination)
            order[destination] = np.arange(len(destination))
            np.take(base, rows[order], axis=0, out=out, mode="clip")
        else:
            scatter(out, destination, base[rows])


_INPUT, _TARGET = "input", "target"


def sliding_windows(
    index: Index, inputs: Names, targets: Names, window: int, stride: int, horizon: int | None
) -> tuple[Index, Names]:
    """An index whose samples are windows, and the names of its targets.

    Parameters
    ----------
    index : of samples that have an order.
    inputs : fields that a window is made of; each sample has the shape (window, *field shape).
    targets : fields whose rows behind the window are wanted, of shape (horizon, *field shape). None: those of
        ``inputs`` if there is a horizon.
    window, stride, horizon : in rows of the file. No window reaches from one file into the next.

    Raises
    ------
    PartitionError : a number below 1.
    FormatError : no file is long enough for a window.
    """
    if min(window, stride, 1 if horizon is None else horizon) < 1:
        raise PartitionError(
            "windows need at least one row",
            expected="window, stride and horizon of 1 or more",
            found=f"window={window}, stride={stride}, horizon={horizon}",
        )
    names = list(index.fields) if inputs is None else as_list(inputs)
    ahead = as_list(targets) or (names if horizon else [])
    shape = Shape(window, stride, (horizon or 1) if ahead else 0)
    fields = {name: _longer(index.fields[name], name, window) for name in names}
    fields |= {AHEAD.format(n): _longer(index.fields[n], AHEAD.format(n), shape.horizon) for n in ahead}
    files = [_windowed_file(file, index, names, ahead, shape) for file in index.files]
    if not any(file.rows for file in files):
        raise FormatError(
            "no file is long enough for a window",
            file=index.files[0].path,
            expected=f"at least {shape.window + shape.horizon} rows (window + horizon)",
            found=f"{max(file.rows for file in index.files)} rows in the longest of {len(files)} files",
        )
    bare = isinstance(targets, str) or (targets is None and isinstance(inputs, str))
    renamed = [AHEAD.format(name) for name in ahead]
    return Index(fields, files, index.static), (renamed[0] if bare else renamed) if ahead else None


def _windowed_file(
    file: FileIndex, index: Index, names: Sequence[str], ahead: Sequence[str], shape: Shape
) -> FileIndex:
    tables = {
        name: Windows(file.layouts[name], index.fields[name], shape)
        for name in {**dict.fromkeys(names), **dict.fromkeys(ahead)}
    }
    parts: dict[str, Layout] = {name: Column(tables[name], _INPUT) for name in names}
    parts |= {AHEAD.format(name): Column(tables[name], _TARGET) for name in ahead}
    return replace(file, rows=shape.count(file.rows), layouts=parts)


def _longer(field: Field, name: str, rows: int) -> Field:
    if field.ragged:
        raise FormatError("a field of varying length has no windows", field=field.name)
    return replace(field, name=name, shape=(rows, *field.shape))
