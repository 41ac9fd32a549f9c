"""Sliding windows of consecutive rows, for forecasting. Each row is read once, however many windows contain it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError, PartitionError
from matex_data.fields import Field, Names, Schema, as_list
from matex_data.index.cache import ChunkCache
from matex_data.index.files import DerivedFiles, FileTable
from matex_data.index.model import EMPTY, FileIndex, Index, Layout, ReadRequest, RowSelection, call_after_last
from matex_data.index.runs import compress
from matex_data.index.scatter import scatter
from matex_data.index.table import Column, Outputs, Table
from matex_data.sampling.split import Ties

AHEAD = "{}_ahead"  # name of the field with the rows behind a window
BLOCK_WINDOWS = 8  # least length of a block, in windows: neighbouring windows share most of their rows
INPUT, TARGET = "input", "target"


@dataclass(frozen=True)
class WindowShape:
    """Extent of the windows: ``window`` rows from every ``stride``-th row on, and the rows that are their target.

    Parameters
    ----------
    window, stride : in rows.
    horizon : rows of the target; 0: there is none.
    lead : rows from the last one of the window to the first one of the target.
    """

    window: int
    stride: int
    horizon: int
    lead: int = 1

    @property
    def span(self) -> int:
        """Number of rows from the first one of a window to the last one of the window and its target."""
        return self.window + (self.lead - 1 + self.horizon if self.horizon else 0)

    def counts(self, rows: Array) -> Integers:
        """Return the number of windows in each of several sequences of rows, int64[sequences]."""
        return np.maximum(0, (rows.astype(np.int64) - self.span) // self.stride + 1)

    @property
    def overlap(self) -> int:
        """Number of windows behind a window that may share rows with it or with its target."""
        return -(-self.span // self.stride) - 1

    def rows(self, begins: Integers, ahead: bool) -> Integers:
        """Return the rows of windows, int64[windows, window], by their first rows; or of the targets, with horizon."""
        first, length = (self.window - 1 + self.lead, self.horizon) if ahead else (0, self.window)
        return begins[:, None] + np.arange(first, first + length)


@dataclass(frozen=True, eq=False)
class Chains:
    """Sequences of files of which each continues the one before, and the windows that begin in each file.

    Parameters
    ----------
    begin : int64[files], rows of the same sequence in front of each file.
    windows : int64[files], number of windows that begin in each file.
    heads : int64[sequences], the first file of each.
    """

    begin: Integers
    windows: Integers
    heads: Integers

    @classmethod
    def of(cls, rows: Array, shape: WindowShape, continues: Array | None) -> Chains:
        """Return the sequences of files.

        Parameters
        ----------
        rows : integers[files], rows of each file.
        shape : extent of the windows.
        continues : bool[files], whether each file continues the one before; None: none does.
        """
        heads = np.arange(len(rows)) if continues is None else np.flatnonzero(~continues)
        before = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        of_file = np.repeat(heads, np.diff(np.append(heads, len(rows))))  # the head of the sequence of each file
        begin = before[:-1] - before[of_file]
        counts = shape.counts(np.diff(before[np.append(heads, len(rows))]))
        most = np.repeat(counts, np.diff(np.append(heads, len(rows))))
        first, stop = (np.minimum(-(-edge // shape.stride), most) for edge in (begin, begin + rows))
        return cls(begin, stop - first, heads)


@dataclass(frozen=True, eq=False)
class Windows(Table):
    """Windows of one field that begin in one file, and the rows ahead of them, as the columns "input" and "target".

    Parameters
    ----------
    layouts : layouts of the field: of the file, and of those behind it into which the windows reach.
    field : the field.
    shape : extent of the windows.
    first : first row of the first window.
    rows : number of windows.
    """

    layouts: tuple[Layout, ...]
    field: Field
    shape: WindowShape
    first: int
    rows: int
    width: int = 1

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        longest = max(self.layouts[0].block_rows, BLOCK_WINDOWS * self.shape.span)
        return max(1, longest // self.shape.stride)

    def borders(self) -> Integers | None:
        return None

    def stored_bytes(self) -> int:
        return self.layouts[0].stored_bytes()

    def end(self) -> int:
        return self.layouts[0].end()

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        begins = self.first + rows.numbers * self.shape.stride
        needed = [self.shape.rows(begins, name == TARGET) for name, _ in outs]
        numbers = np.unique(np.concatenate([rows.ravel() for rows in needed]))
        base = self.field.empty(len(numbers))
        reads = list(self._reads(numbers, base, cache)) or [ReadRequest(EMPTY, EMPTY)]
        positions = [np.searchsorted(numbers, rows) for rows in needed]
        yield from call_after_last(reads, partial(_spread, base, rows.destination, positions, [out for _, out in outs]))

    def _reads(self, numbers: Integers, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        """Yield the reads of these ascending rows, counted over all files, to consecutive rows of ``out``."""
        begin = 0
        for ahead, layout in enumerate(self.layouts):
            low, high = np.searchsorted(numbers, (begin, begin + layout.rows))
            if low < high:
                runs = compress(numbers[low:high] - begin)
                selection = RowSelection(runs.start, runs.start + runs.count, np.arange(low, high))
                for request in layout.requests(selection, out, cache):
                    yield replace(request, files_ahead=ahead) if ahead else request
            begin += layout.rows


def _spread(base: Array, destination: Integers, positions: Sequence[Integers], outs: Sequence[Array]) -> None:
    """Copy row ``positions[k][i]`` of ``base`` to row ``destination[i]`` of ``outs[k]``."""
    for rows, out in zip(positions, outs, strict=True):
        if len(destination) == len(out) and out.dtype == base.dtype and out.flags.c_contiguous:
            order = np.empty_like(destination)
            order[destination] = np.arange(len(destination))
            np.take(base, rows[order], axis=0, out=out, mode="clip")
        else:
            scatter(out, destination, base[rows])


@dataclass(frozen=True, eq=False)
class Sliding:
    """Index of windows.

    Parameters
    ----------
    index : whose samples are windows.
    targets : names of their targets.
    ties : windows that share rows.
    reshape : turns an index of further fields of the same files into one of their windows, without targets.
    """

    index: Index
    targets: Names
    ties: Ties
    reshape: Callable[[Index], Index]


def sliding_windows(
    index: Index, inputs: Names, targets: Names, shape: WindowShape, continues: Array | None = None
) -> Sliding:
    """Return an index whose samples are windows.

    Parameters
    ----------
    index : index of samples in a meaningful order, such as time.
    inputs : fields of a window; each sample has the shape (window, *field shape).
    targets : fields of the target; each sample has the shape (horizon, *field shape). None: ``inputs`` if there is a
        horizon.
    shape : extent of the windows, of `window_shape`.
    continues : bool[files], whether a window may reach from the file before into each file; None: into none.

    Raises
    ------
    FormatError : no file is long enough for a window; a field has samples of varying length.
    """
    names = list(index.fields) if inputs is None else as_list(inputs)
    ahead = (as_list(targets) or names) if shape.horizon else []
    fields = {name: _extended(index.fields[name], name, shape.window) for name in names}
    fields |= {AHEAD.format(n): _extended(index.fields[n], AHEAD.format(n), shape.horizon) for n in ahead}
    chains = Chains.of(index.files.rows, shape, continues)
    if not chains.windows.any():
        raise FormatError(
            "no file is long enough for a window",
            file=index.files.paths[0],
            expected=f"at least {shape.span} rows (window + lead - 1 + horizon)",
            found=f"{index.files.rows.max()} rows in the longest of {len(index.files)} files",
        )
    bare = isinstance(targets, str) or (targets is None and isinstance(inputs, str))
    renamed = [AHEAD.format(name) for name in ahead]
    targets_ahead = (renamed[0] if bare else renamed) if ahead else None
    slide = partial(_slide, index.files, chains, index.fields, names, ahead, shape)
    slid = Index(fields, DerivedFiles(index.files, slide, chains.windows), index.static)
    ties = Ties(shape.overlap, slid.first_row[chains.heads])
    return Sliding(slid, targets_ahead, ties, partial(_slide_further, chains, shape))


def _slide_further(chains: Chains, shape: WindowShape, index: Index) -> Index:
    """Return the index of windows of all fields of an index."""
    fields = {name: _extended(field, name, shape.window) for name, field in index.fields.items()}
    slide = partial(_slide, index.files, chains, index.fields, list(fields), [], shape)
    return Index(fields, DerivedFiles(index.files, slide, chains.windows))


def window_shape(window: int, stride: int, horizon: int | None, lead: int, targets: Names) -> WindowShape:
    """Return the extent of windows with these options of ``open_dataset``.

    Raises
    ------
    PartitionError : an extent is too small; there is a lead, but no target.
    """
    if min(window, stride, 1 if horizon is None else horizon) < 1 or lead < 0:
        raise PartitionError(
            "an extent of the windows is too small",
            expected="window, stride and horizon of 1 or more, lead of 0 or more",
            found=f"window={window}, stride={stride}, horizon={horizon}, lead={lead}",
        )
    has_target = bool(horizon or as_list(targets))
    if lead != 1 and not has_target:
        raise PartitionError(
            "lead= leads to the target, and these windows have none",
            expected="horizon=, or targets=",
            found=f"lead={lead} alone",
        )
    return WindowShape(window, stride, (horizon or 1) if has_target else 0, lead)


def _slide(
    files: FileTable,
    chains: Chains,
    fields: Schema,
    names: Sequence[str],
    ahead: Sequence[str],
    shape: WindowShape,
    number: int,
    file: FileIndex,
) -> FileIndex:
    """Return the index of a file with the windows that begin in it as samples."""
    count = int(chains.windows[number])
    first = int(-chains.begin[number] % shape.stride)
    needed, reached, entries = first + (count - 1) * shape.stride + shape.span, file.rows, [file]
    while count and reached < needed:
        entries.append(files[number + len(entries)])
        reached += entries[-1].rows
    tables = {
        name: Windows(tuple(entry.layouts[name] for entry in entries), fields[name], shape, first, count)
        for name in dict.fromkeys([*names, *ahead])
    }
    layouts: dict[str, Layout] = {name: Column(tables[name], INPUT) for name in names}
    layouts |= {AHEAD.format(name): Column(tables[name], TARGET) for name in ahead}
    return replace(file, rows=count, layouts=layouts)


def _extended(field: Field, name: str, rows: int) -> Field:
    """Return the field with an axis of ``rows`` rows in front."""
    if field.ragged:
        raise FormatError("a field with samples of varying length has no windows", field=field.name)
    return replace(field, name=name, shape=(rows, *field.shape))
