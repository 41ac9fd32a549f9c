"""Ragged fields as dense ones of fixed length: zeros behind, surplus elements cut off, and a mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError, PartitionError
from matex_data.fields import MASK, Field, Schema
from matex_data.index.cache import ChunkCache
from matex_data.index.files import DerivedFiles
from matex_data.index.model import FileIndex, Index, Layout, ReadRequest, RowSelection, ranges
from matex_data.index.scatter import scatter
from matex_data.index.table import Column, Outputs, Table
from matex_data.transforms.names import ragged_fields
from matex_data.transforms.ragged import empty_samples, join_samples, read_fields

FIRST = "first"
Pad = Mapping[str, int]
"""Length of the dense samples, by field name or pattern."""
Keep = str | Mapping[str, str]
"""Rule by which elements are kept, for all fields or by field name or pattern: "first", or the field to sort by."""


def check_pad(pad: Pad) -> None:
    """Raise ``PartitionError`` if ``pad`` is no valid value of ``pad=``."""
    lengths = list(pad.values()) if isinstance(pad, Mapping) else [None]
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in lengths):
        raise PartitionError(
            "pad= needs a length for each field",
            expected='a dict of field names or patterns, such as {"Muon_pt": 8}, with lengths of 1 or more',
            found=repr(pad),
        )


def sort_fields(keep: Keep) -> list[str]:
    """Return the fields that ``keep`` sorts by."""
    rules = [keep] if isinstance(keep, str) else list(keep.values())
    return [name for name in dict.fromkeys(rules) if name != FIRST]


def pad_fields(index: Index, pad: Pad, keep: Keep, names: Sequence[str] | None) -> Index:
    """Return an index whose ragged fields are dense, with their masks.

    Parameters
    ----------
    index : index of the data set.
    pad : length of each dense field.
    keep : rule by which elements are kept if there are more.
    names : requested fields, masks among them; None: all fields, with all masks.

    Raises
    ------
    FieldNotFound : a name is no ragged field.
    FormatError : the elements are not of fixed size; a field to sort by has no numbers; the data already have a field
        with the name of a mask.
    """
    patterns = ragged_fields(index.fields, pad, "pad")
    lengths = {name: int(pad[pattern]) for name, pattern in patterns.items()}
    sort_by = _sort_by(index.fields, list(lengths), keep)
    masked = [name for name in lengths if names is None or MASK.format(name) in names]
    fields: dict[str, Field] = {}
    for name, field in index.fields.items():
        fields[name] = _padded(field, lengths[name]) if name in lengths else field
        if name in masked:
            mask = MASK.format(name)
            _check_new(mask, name, index.fields)
            fields[mask] = Field(mask, (lengths[name],), np.dtype(bool))
    files = DerivedFiles(index.files, partial(_pad_file, index.fields, lengths, sort_by, masked))
    return Index(fields, files, index.static, index.facts)


def _pad_file(
    fields: Schema,
    lengths: Mapping[str, int],
    sort_by: Mapping[str, str],
    masked: Sequence[str],
    _: int,
    file: FileIndex,
) -> FileIndex:
    """Return the index of a file with padded fields."""
    used = {name: file.layouts[name] for name in (*lengths, *sort_by.values())}
    table = Padded(file.path, used, {name: fields[name] for name in used}, lengths, sort_by, len(lengths) + len(masked))
    columns: dict[str, Layout] = {name: Column(table, name) for name in lengths}
    columns |= {MASK.format(name): Column(table, MASK.format(name)) for name in masked}
    return replace(file, layouts={**file.layouts, **columns})


def _padded(field: Field, length: int) -> Field:
    if field.dtype.hasobject:
        raise FormatError(
            "the field cannot be padded", field=field.name, expected="elements of fixed size", found=str(field.dtype)
        )
    return replace(field, shape=(length,), ragged=False)


def _check_new(mask: str, name: str, fields: Schema) -> None:
    if mask in fields:
        raise FormatError(
            "the data already have a field with the name of a mask",
            field=mask,
            remedy=f"select fields with inputs= and targets=, or leave {name!r} out of pad=",
        )


def _sort_by(fields: Schema, padded: Sequence[str], keep: Keep) -> dict[str, str]:
    """Return the field to sort by of each padded field; those that keep their first elements are left out."""
    if isinstance(keep, str):
        rules = dict.fromkeys(padded, keep)
    else:
        patterns = ragged_fields({name: fields[name] for name in padded}, keep, "keep")
        rules = {name: keep[pattern] for name, pattern in patterns.items()}
    found = {name: rule for name, rule in rules.items() if rule != FIRST}
    ragged_fields(fields, dict.fromkeys(found.values()), "keep")
    for rule in found.values():
        if fields[rule].dtype.kind not in "biuf":
            raise FormatError(
                "keep= sorts by numbers", field=rule, expected="integers or floats", found=str(fields[rule].dtype)
            )
    return found


@dataclass(frozen=True, eq=False)
class Padded(Table):
    """Dense samples of the ragged fields of one file, each a column of its name, and their masks.

    Parameters
    ----------
    path : of the file.
    layouts : of the ragged fields.
    fields : the ragged fields.
    lengths : length of the dense samples, by field.
    sort_by : field whose largest values are kept, by field; the other fields keep their first elements.
    width : number of columns.
    """

    path: str
    layouts: Mapping[str, Layout]
    fields: Schema
    lengths: Mapping[str, int]
    sort_by: Mapping[str, str]
    width: int

    @property
    def _largest(self) -> Layout:
        return max(self.layouts.values(), key=lambda layout: layout.stored_bytes())

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self._largest.rows

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return max(layout.block_rows for layout in self.layouts.values())

    def borders(self) -> Integers | None:
        return self._largest.borders()

    def stored_bytes(self) -> int:
        return sum(layout.stored_bytes() for layout in self.layouts.values())

    def end(self) -> int:
        return max(layout.end() for layout in self.layouts.values())

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        padded = {column: name for name in self.lengths for column in (MASK.format(name), name)}
        wanted: dict[str, list[tuple[bool, Array]]] = {}
        for column, out in outs:
            name = column if column in self.lengths else padded[column]
            wanted.setdefault(name, []).append((column != name, out))
        needed = dict.fromkeys([*wanted, *(self.sort_by[name] for name in wanted if name in self.sort_by)])
        count = len(rows.destination)
        samples = {name: empty_samples(self.fields[name], count, self.layouts[name]) for name in needed}
        selection = RowSelection(rows.start, rows.stop, np.arange(count))
        pad = partial(self._pad, samples, rows, wanted)
        yield from read_fields(self.layouts, selection, samples, cache, self.path, pad)

    def _pad(
        self, samples: Mapping[str, Array], rows: RowSelection, wanted: Mapping[str, list[tuple[bool, Array]]]
    ) -> None:
        """Write the dense samples, and the masks, of the wanted fields to their arrays."""
        orders: dict[str, tuple[Integers, Integers]] = {}
        for name, outs in wanted.items():
            content, counts = join_samples(samples[name], self.fields[name])
            key = self.sort_by.get(name)
            if key is not None:
                if key not in orders:
                    values, key_counts = join_samples(samples[key], self.fields[key])
                    orders[key] = descending(values, key_counts), key_counts
                order, key_counts = orders[key]
                self._check_counts(name, counts, key, key_counts, rows)
                content = content[order]
            kept = np.minimum(counts, self.lengths[name])
            filled = np.arange(self.lengths[name]) < kept[:, None]
            for is_mask, out in outs:
                scatter(out, rows.destination, filled if is_mask else _dense(content, counts, kept, filled))

    def _check_counts(self, name: str, counts: Integers, key: str, key_counts: Integers, rows: RowSelection) -> None:
        differ = np.flatnonzero(counts != key_counts)
        if len(differ):
            i = int(differ[0])
            raise FormatError(
                f"keep={key!r} sorts fields of equal lengths only",
                file=self.path,
                field=name,
                row=int(rows.numbers[i]),
                expected=f"{key_counts[i]} elements, as in {key!r}",
                found=f"{counts[i]} elements in {name!r}",
                remedy='name a field of the same objects for each group of fields: keep={"Muon_*": "Muon_pt", ...}',
            )


def descending(values: Array, counts: Integers) -> Integers:
    """Return the order in which the values of each sample descend; equal values stay in order, NaN is last.

    Parameters
    ----------
    values : numbers of all samples, one sample after the other.
    counts : int64[samples], numbers of each sample.

    Returns
    -------
    int64[values], indices of ``values``.

    Examples
    --------
    >>> descending(np.array([1.0, 3.0, 2.0, 5.0, 5.0]), np.array([3, 2])).tolist()
    [1, 2, 0, 3, 4]
    """
    opposite = -values if values.dtype.kind == "f" else np.invert(values)  # of an integer: -1 - value, without overflow
    return np.lexsort((opposite, np.repeat(np.arange(len(counts)), counts)))


def _dense(content: Array, counts: Integers, kept: Integers, filled: Array) -> Array:
    """Return an array of the shape of ``filled`` with the first ``kept`` elements of each sample, and zeros behind."""
    if kept.sum() < len(content):
        content = content[ranges(np.cumsum(counts) - counts, kept)]
    dense = np.zeros(filled.shape, content.dtype)
    dense[filled] = content
    return dense
