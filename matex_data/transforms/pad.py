"""Ragged fields as dense ones of fixed length: zeros behind, surplus elements cut off, and a mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from matex_data._types import Array, Integers
from matex_data.errors import FormatError, PartitionError
from matex_data.fields import MASK, Field, Schema, mask_of
from matex_data.index.computed import Call, ComputedFields, compute_all
from matex_data.index.model import Index, ranges
from matex_data.transforms.names import check_lengths, ragged_fields

FIRST = "first"
ORDER = "order of {}"  # name of the order in which the elements of a field descend
KEPT = "kept of {}"  # name of the lists of the elements that a dense field has
Pad = Mapping[str, int]
"""Length of the dense samples, by field name or pattern."""
Keep = str | Mapping[str, str]
"""Rule by which elements are kept, for all fields or by field name or pattern: "first", or the field to sort by."""


def check_pad(pad: Pad) -> None:
    """Raise ``PartitionError`` if lengths of ``pad=`` are too small."""
    if any(length < 1 for length in pad.values()):
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
    names : requested fields, masks that the data do not have among them; None: all fields, with all masks.

    Raises
    ------
    FieldNotFound : a name is no ragged field.
    FormatError : the elements are not of fixed size; a field to sort by has no numbers; the data already have a field
        with the name of a mask.
    """
    patterns = ragged_fields(index.fields, pad, "pad", of_arrays=True)
    lengths = {name: int(pad[pattern]) for name, pattern in patterns.items()}
    sort_by = _sort_by(index.fields, list(lengths), keep)
    wanted = None if names is None else set(names).difference(index.fields)
    masked = [name for name in lengths if wanted is None or MASK.format(name) in wanted]
    order: list[str] = []
    for name in index.fields:
        order.append(name)
        if name in masked:
            remedy = f"select fields with inputs= and targets=, or leave {name!r} out of pad="
            order.append(mask_of(name, index.fields, remedy))
    steps: list[ComputedFields] = []
    for key in dict.fromkeys(sort_by.values()):
        descends = Field(ORDER.format(key), (), np.dtype(np.int64), ragged=True)
        steps.append(ComputedFields(partial(_order, key), [key], {descends.name: descends}))
    for name, length in lengths.items():
        field, rule, kept = index.fields[name], sort_by.get(name), KEPT.format(name)
        fields = {name: _padded(field, length), kept: replace(field, name=kept)}
        if name in masked:
            fields[MASK.format(name)] = Field(MASK.format(name), (length,), np.dtype(bool))
        given = [name] if rule is None else [name, ORDER.format(rule)]
        steps.append(ComputedFields(partial(_pad, name, rule, length), given, fields, raw_of={name: kept}))
    return compute_all(index, steps).select(order)


def _order(key: str, call: Call) -> None:
    """Compute the order in which the elements of each sample descend."""
    lists = call.lists(key)
    call.fill(ORDER.format(key), descending(lists.values, lists.lengths), lists.offsets)


def _pad(name: str, key: str | None, length: int, call: Call) -> None:
    """Fill the dense samples of a field, their mask, and lists of the elements that they have."""
    lists = call.lists(name)
    content, counts = lists.values, lists.lengths
    if key is not None:
        order = call.lists(ORDER.format(key))
        check_lengths(
            f"keep={key!r} sorts fields of equal lengths only",
            (name, counts),
            (key, order.lengths),
            'name a field of the same objects for each group of fields: keep={"Muon_*": "Muon_pt", ...}',
        )
        content = content[order.values]
    kept = np.minimum(counts, length)
    if kept.sum() < len(content):
        content = content[ranges(np.cumsum(counts) - counts, kept)]
    call.fill(KEPT.format(name), content, np.concatenate([[0], np.cumsum(kept)]))
    dense, filled = dense_samples(content, kept, length)
    call.fill(MASK.format(name), filled)
    call.fill(name, dense)


def _padded(field: Field, length: int) -> Field:
    if field.dtype.hasobject:
        raise FormatError(
            "the field cannot be padded", field=field.name, expected="elements of fixed size", found=field.dtype_name
        )
    return replace(field, shape=(length, *field.element_shape), ragged=False, inner=(None,))


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


def dense_samples(content: Array, counts: Integers, length: int) -> tuple[Array, Array]:
    """Return lists as dense samples with zeros behind, and bool[samples, length], where these have elements.

    Parameters
    ----------
    content : elements, one sample after the other.
    counts : int64[samples], elements of each sample, at most ``length``.

    Examples
    --------
    >>> dense, filled = dense_samples(np.array([1, 2, 3]), np.array([2, 0, 1]), 2)
    >>> dense.tolist(), filled.tolist()
    ([[1, 2], [0, 0], [3, 0]], [[True, True], [False, False], [True, False]])
    """
    filled = np.arange(length) < counts[:, None]
    dense = np.zeros((*filled.shape, *content.shape[1:]), content.dtype)
    dense[filled] = content
    return dense, filled
