"""Sequence windows: samples of consecutive rows, for forecasting. Each row is read once, however many contain it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError, PartitionError
from matex_data.fields import MASK, ElementSpec, Field, Names, Schema, as_list, is_mask
from matex_data.index.computed import Made
from matex_data.index.files import DerivedFiles
from matex_data.index.model import EMPTY, FileIndex, Finish, FromOne, Index, Read, Wanted
from matex_data.index.runs import Chosen, Runs, Samples, ranges
from matex_data.index.scatter import scatter
from matex_data.locks import cached_property
from matex_data.sampling.split import Ties
from matex_data.transforms.joining import all_of
from matex_data.transforms.remade import Remade

AT_ONCE = 1 << 18  # rows of sequence windows that are found or copied at once
AHEAD = "{}_ahead"  # name of the field with the rows behind a sequence window
BLOCK_SEQUENCES = 8  # least length of a block, in sequence windows: neighbouring ones share most of their rows


@dataclass(frozen=True)
class SequenceShape:
    """Extent of sequence windows: ``length`` rows from every ``stride``-th row on, and the rows that are their target.

    Parameters
    ----------
    length, stride : in rows.
    horizon : rows of the target; 0: there is none.
    lead : rows from the last one of the sequence window to the first one of the target.
    """

    length: int
    stride: int
    horizon: int
    lead: int = 1

    @property
    def span(self) -> int:
        """Number of rows from the first one of a sequence window to the last one of it and its target."""
        return self.length + (self.lead - 1 + self.horizon if self.horizon else 0)

    def counts(self, rows: Array) -> Integers:
        """Return the number of sequence windows in each of several chains of rows, int64[chains]."""
        return np.maximum(0, (rows.astype(np.int64) - self.span) // self.stride + 1)

    @property
    def overlap(self) -> int:
        """Number of sequence windows behind one that may share rows with it or with its target."""
        return -(-self.span // self.stride) - 1

    def extent(self, ahead: bool) -> tuple[int, int]:
        """Return how far a sequence window, or its target, lies behind its first row, and its number of rows."""
        return (self.length - 1 + self.lead, self.horizon) if ahead else (0, self.length)

    def rows(self, begins: Integers, parts: Iterable[bool]) -> Runs:
        """Return the rows of sequence windows by their ascending first rows, or those of the targets, or both."""
        edges = [(begins + first, begins + first + length) for first, length in map(self.extent, parts)]
        start, stop = (np.concatenate([EMPTY, *side]) for side in zip((EMPTY, EMPTY), *edges, strict=True))
        order = np.argsort(start, kind="stable")
        start, stop = start[order], np.maximum.accumulate(stop[order])
        detached = np.append(np.ones(1, bool), start[1:] > stop[:-1])[: len(start)]
        return Runs(start[detached], stop[np.roll(detached, -1)] - start[detached])


@dataclass(frozen=True, eq=False)
class Chains:
    """Chains of files, each of which continues the one before, and the sequence windows that begin in each file.

    Parameters
    ----------
    begin : int64[files], rows of the same chain in front of each file.
    counts : int64[files], number of sequence windows that begin in each file.
    heads : int64[chains], the first file of each.
    """

    begin: Integers
    counts: Integers
    heads: Integers

    @classmethod
    def of(cls, rows: Array, shape: SequenceShape, continues: Array | None) -> Chains:
        """Return the chains of files.

        Parameters
        ----------
        rows : integers[files], rows of each file.
        shape : extent of the sequence windows.
        continues : bool[files], whether each file continues the one before; None: none does.
        """
        heads = np.arange(len(rows)) if continues is None else np.flatnonzero(~continues)
        before = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        of_file = np.repeat(heads, np.diff(np.append(heads, len(rows))))  # the head of the chain of each file
        begin = before[:-1] - before[of_file]
        counts = shape.counts(np.diff(before[np.append(heads, len(rows))]))
        most = np.repeat(counts, np.diff(np.append(heads, len(rows))))
        first, stop = (np.minimum(-(-edge // shape.stride), most) for edge in (begin, begin + rows))
        return cls(begin, stop - first, heads)


@dataclass(frozen=True, eq=False)
class SequenceRows(Made):
    """Sequence windows that begin in one file; see `Made`. The layouts are those of the file.

    Parameters
    ----------
    shape : extent of the sequence windows.
    """

    shape: SequenceShape = field(kw_only=True)

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        longest = max(self.layouts[0].block_rows, BLOCK_SEQUENCES * self.shape.span)
        return max(1, longest // self.shape.stride)

    def borders(self) -> None:
        return None


@dataclass(frozen=True, eq=False)
class Slid(FromOne):
    """Sequence windows of the rows of an index.

    Parameters
    ----------
    columns : by name of a field of sequence windows, that of its rows, and whether they are those of the target.
    shape : extent of the sequence windows.
    chains : the files.
    """

    columns: Mapping[str, tuple[str, bool]]
    shape: SequenceShape
    chains: Chains

    @property
    def raw(self) -> Schema:
        rows, lengths = self.base.raw.fields, (self.shape.length, self.shape.horizon)
        return {n: _extended(rows[base], n, lengths[ahead]) for n, (base, ahead) in self.columns.items()}

    @cached_property
    def _first(self) -> Integers:
        """First sequence window of each file, int64[files]."""
        return np.cumsum(self.chains.counts) - self.chains.counts

    def index(self, fields: Schema) -> Index:
        """Return the index of sequence windows with these fields; raise ``FormatError`` if one is ragged."""
        uneven = next((name for name, one in fields.items() if one.ragged), None)
        if uneven is not None:
            raise FormatError(
                "a field with samples of varying length has no windows",
                field=uneven,
                remedy="leave it out with inputs= and targets=, or give pad= a length for it",
            )
        slide = partial(_slide, self.columns, self.chains, self.shape)
        files = DerivedFiles(self.base.files, slide, self.chains.counts)
        return Index(fields, files, self.base.static, self.base.facts, self)

    def rows_of(self, samples: Samples) -> Samples:
        """Return the rows of sequence windows and of their targets."""
        used = np.zeros(len(self.base), bool)
        step = max(1, AT_ONCE // self.shape.span)
        for low in range(0, samples.total, step):
            begin = self._begins(samples.numbers(np.arange(low, min(low + step, samples.total))))
            rows = self.shape.rows(begin, {ahead for _, ahead in self.columns.values()})
            used[ranges(rows.start, rows.count)] = True
        return Chosen.of(used)

    def _begins(self, sequences: Integers) -> Integers:
        """Return the first row of each sequence window."""
        file = np.searchsorted(self._first, sequences, side="right") - 1
        begin = self.base.first_row[file] + -self.chains.begin[file] % self.shape.stride
        return begin + (sequences - self._first[file]) * self.shape.stride

    def plan(self, wanted: Wanted, read: Read, epoch: int) -> Finish | None:
        begin = self._begins(wanted.runs.numbers(np.arange(wanted.runs.total)))
        parts = {self.columns[name][1] for name in wanted.arrays}
        rows = self.shape.rows(begin, parts)
        names = dict.fromkeys(self.columns[name][0] for name in wanted.arrays)
        arrays = {name: wanted.fields(self.base)[name].empty(rows.total) for name in names}
        finish = read(0, Wanted(rows, np.arange(rows.total), arrays, raw=wanted.raw))
        positions = {ahead: rows.rank(begin + self.shape.extent(ahead)[0]) for ahead in parts}
        return all_of([finish, partial(self._spread, arrays, positions, wanted)])

    def _spread(self, arrays: dict[str, Array], positions: Mapping[bool, Integers], wanted: Wanted) -> None:
        """Copy the rows of each sequence window to its place."""
        for name, out in wanted.arrays.items():
            base, ahead = self.columns[name]
            _take(arrays[base], positions[ahead], wanted.destination, out)
        arrays.clear()


def _take(rows: Array, positions: Integers, destination: Integers, out: Array) -> None:
    """Assign ``out[destination[i]]`` as many rows from ``positions[i]`` on as it has."""
    inner, order = np.arange(out.shape[1]), None
    if len(destination) == len(out) and out.dtype == rows.dtype and out.flags.c_contiguous:
        order = np.empty_like(destination)
        order[destination] = np.arange(len(destination))
    step = max(1, AT_ONCE // max(1, len(inner)))
    for low in range(0, len(positions), step):
        part = slice(low, low + step)
        if order is not None:
            np.take(rows, positions[order[part]][:, None] + inner, axis=0, out=out[part], mode="clip")
        else:
            scatter(out, destination[part], rows[positions[part][:, None] + inner])


def sliding_sequences(
    index: Index, elements: ElementSpec, shape: SequenceShape, continues: Array | None = None
) -> tuple[Remade, ElementSpec]:
    """Return an index whose samples are sequence windows, and the structure of its batches.

    Parameters
    ----------
    index : index of samples in a meaningful order, such as time.
    elements : inputs are fields of a sequence window, of shape (length, *field shape); targets those of its target, of
        shape (horizon, *field shape). Without targets, these are the inputs if there is a horizon. Masks that the index
        does not have are left to `fill_missing`.
    shape : extent of the sequence windows, of `sequence_shape`.
    continues : bool[files], whether one may reach from the file before into each file; None: into none.

    Raises
    ------
    FormatError : no file is long enough for one; a field has samples of varying length, or the name of a target.
    """
    inputs, targets = elements.inputs, elements.targets
    names = list(index.fields) if inputs is None else as_list(inputs)
    ahead = (as_list(targets) or names) if shape.horizon else []
    rows = index.fields  # which have no masks that are yet to be made
    renamed = {
        n: MASK.format(AHEAD.format(n.removesuffix(MASK.format("")))) if is_mask(n, rows) else AHEAD.format(n)
        for n in ahead
    }
    taken = next((name for name in renamed.values() if name in names), None)
    if taken is not None:
        raise FormatError(
            "the inputs have a field with the name of a target",
            file=next(iter(index.files.paths), None),
            field=taken,
            remedy="leave it out of inputs=, or give it another name with derive=",
        )
    fields = {name: _extended(rows[name], name, shape.length) for name in names if name in rows}
    fields |= {name: _extended(rows[n], name, shape.horizon) for n, name in renamed.items() if n in rows}
    chains = Chains.of(index.files.rows, shape, continues)
    if not chains.counts.any():
        raise FormatError(
            "no file is long enough for a window",
            file=index.files.paths[0],
            expected=f"at least {shape.span} rows (window + lead - 1 + horizon)",
            found=f"{index.files.rows.max()} rows in the longest of {len(index.files)} files",
            remedy="give a smaller window= or horizon=, or along= where one file continues another",
        )
    bare = isinstance(targets, str) or (targets is None and isinstance(inputs, str))
    targets_ahead = (renamed[ahead[0]] if bare else list(renamed.values())) if ahead else None
    columns = {name: (name, False) for name in names if name in rows}
    columns |= {name: (n, True) for n, name in renamed.items() if n in rows}
    slid = Slid(index, columns, shape, chains).index(fields)
    ties = Ties(shape.overlap, slid.first_row[chains.heads], slid=True)
    given = names if ahead and inputs is None and targets is None else inputs  # a target is one of something
    return Remade(slid, ties, partial(_slide_further, chains, shape)), ElementSpec(given, targets_ahead)


def _slide_further(chains: Chains, shape: SequenceShape, index: Index) -> Index:
    """Return the index of sequence windows of all fields of an index."""
    fields = {name: _extended(one, name, shape.length) for name, one in index.fields.items()}
    return Slid(index, {name: (name, False) for name in fields}, shape, chains).index(fields)


def sequence_shape(window: int, stride: int, horizon: int | None, lead: int, targets: Names) -> SequenceShape:
    """Return the extent of sequence windows with these options of ``open_dataset``.

    Raises
    ------
    PartitionError : an extent is too small; there is a lead, but no target.
    """
    if min(window, stride, 1 if horizon is None else horizon) < 1 or lead < 0:
        raise PartitionError(
            "an extent of the sequence windows is too small",
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
    return SequenceShape(window, stride, (horizon or 1) if has_target else 0, lead)


def _slide(
    columns: Mapping[str, tuple[str, bool]], chains: Chains, shape: SequenceShape, number: int, file: FileIndex
) -> FileIndex:
    """Return the index of a file with the sequence windows that begin in it as samples."""
    count = int(chains.counts[number])
    layouts = {name: SequenceRows(count, (file.layouts[base],), shape=shape) for name, (base, _) in columns.items()}
    return replace(file, rows=count, layouts=layouts)


def _extended(one: Field, name: str, rows: int) -> Field:
    """Return the field with an axis of ``rows`` rows in front."""
    return replace(one, name=name, shape=(rows, *one.shape))
