"""Missing values. Readers deliver numbers as NaN and texts as empty; here they are replaced, masked or dropped.

Replacement and masks are made once all rows of a window are in memory. Dropping takes one read of the data when it is
opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array, Integers
from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.fields import (
    EMPTY_IS_MISSING,
    MASK,
    MISSING_INTEGER,
    Field,
    Schema,
    is_category,
    is_pattern,
    mask_of,
)
from matex_data.index.combined import exact
from matex_data.index.computed import Call, ComputedFields, compute_all
from matex_data.index.model import Index
from matex_data.index.runs import Runs, Samples
from matex_data.reading.plan import Arrays
from matex_data.reading.source import Source
from matex_data.sampling.schedule import rank_range
from matex_data.transforms.names import named_by_rules
from matex_data.transforms.select import select_samples

KEEP, MEAN, MEDIAN, MODE = "nan", "mean", "median", "mode"
MODES, RULES = (KEEP, "mask", "drop"), (KEEP, MEAN, MEDIAN, MODE)
TILE = 1 << 18  # numbers tested at once: temporary arrays stay in the processor's cache
Missing = str | float | Mapping[str, str | float]


def check_missing(missing: Missing) -> None:
    """Raise ``FormatError`` if ``missing`` is no valid value of ``missing=``."""
    by_field = isinstance(missing, Mapping)
    known, or_dict = (RULES, ", or a text for fields of texts") if by_field else (MODES, ", or a dict by field")
    for name, rule in (missing if isinstance(missing, Mapping) else {None: missing}).items():
        number = isinstance(rule, Real)
        text = by_field and isinstance(rule, str) and rule not in ("", *MODES)
        if not number and not text and rule not in known:
            raise FormatError(
                "unknown treatment of missing values",
                field=name,
                expected=f"missing= one of {known}, a number that replaces them{or_dict}",
                found=repr(rule),
            )


def fill_missing(index: Index, missing: Missing, names: Sequence[str] | None) -> Index:
    """Return an index whose missing numbers are replaced by ``missing``, or by 0 for "mask", with masks of all others.

    Parameters
    ----------
    index : index with missing numbers as NaN.
    missing : value of ``missing=``; for "nan" and "drop" the index is returned as it is. Of a dict, whose values are
        replaced already, only the masks that are requested and that the data do not have are made.
    names : requested fields, masks among them; None: all.

    Raises
    ------
    FormatError : the data already has a field with the name of a mask.
    FieldNotFound : a requested mask is that of no number.
    """
    if isinstance(missing, str) and missing != "mask":
        if missing == KEEP:
            check_no_integers(index.fields)
        return index
    by_field = isinstance(missing, Mapping)
    numbers = numbers_in(index)
    floats = [field for field in numbers if is_nullable(field)]
    requested = set(names or ()).difference(index.fields if by_field else ())
    whole = names is None and not by_field
    remedy = 'select fields with inputs= and targets=; with pad=, give missing= a number or "nan"'
    steps: list[ComputedFields] = []
    for field in (floats if whole else numbers) if by_field or missing == "mask" else ():
        if whole or MASK.format(field.name) in requested:
            name, raw_given = mask_of(field.name, index.fields, remedy), [field.name] if by_field else []
            mask = Field(name, field.shape, np.dtype(bool))
            steps.append(ComputedFields(partial(_mask, field), [field.name], {name: mask}, raw_given=raw_given))
            requested.discard(name)
    unmade = next((name for name in requested if name not in index.fields), None)
    if unmade is not None:
        raise FieldNotFound(
            "no field has this mask",
            field=unmade,
            expected=f"one of {near_matches(unmade, [MASK.format(field.name) for field in numbers])}, of numbers",
            remedy="name the field as well, on the same side, inputs= or targets=; lists have a mask with pad=; "
            "a missing class is a vector of zeros alone where one_hot= makes vectors, and else -1",
        )
    if not isinstance(missing, Mapping):  # in the memory that the masks are made of
        stored = {field.name: field.dtype.type(0 if isinstance(missing, str) else missing) for field in floats}
        steps += [filling(field, stored[field.name], f"missing {stored[field.name]}") for field in floats]
    return compute_all(index, steps)


def numbers_in(index: Index) -> list[Field]:
    """Return the fields that may have a mask. One-hot vectors have none: where a class is missing they are zeros."""
    raw = index.raw.fields  # which has classes in place of the vectors
    return [field for name, field in index.fields.items() if _is_number(field) and not is_category(raw[name])]


def _is_number(field: Field) -> bool:
    """Return whether a mask of a field tells its numbers; those that cannot be missing are all there."""
    return not field.ragged and (is_nullable(field) or (field.dtype.kind in "biu" and not is_category(field)))


def check_no_integers(fields: Mapping[str, Field]) -> None:
    """Raise ``FormatError`` for a field of integers whose missing values could not be told from others."""
    name = next((name for name, field in fields.items() if MISSING_INTEGER in field.attributes), None)
    if name is not None:
        raise FormatError(
            "integers that float64 cannot hold have missing values, for which there is no NaN",
            field=name,
            expected='missing="mask", "drop" or a number',
            found='missing="nan"',
        )


def filling(field: Field, value: Any, fills: str) -> ComputedFields:
    """Return the computation that replaces missing values of a field; of numbers, ``Index.raw`` has those before it.

    Parameters
    ----------
    value : that replaces missing ones; a text for texts.
    fills : see `Computation`.
    """
    raw_of = {field.name: field.name} if is_nullable(field) else {}
    fill = partial(_fill, field, value)
    return ComputedFields(fill, [field.name], {field.name: field}, views=dict, fills=fills, raw_of=raw_of)


def _fill(field: Field, value: Any, call: Call) -> None:
    """Replace the missing values of a field."""
    if field.name not in call.placed:
        call.fill(field.name, call.inputs[field.name])
    array = call.outs[field.name]
    stored = value.encode("utf-8", "surrogateescape") if isinstance(value, str) and array.dtype.kind != "U" else value
    step = max(1, TILE // max(1, prod(array.shape[1:])))
    for low in range(0, len(array), step):
        rows = array[low : low + step]
        absent = is_missing(rows, field)
        if absent.any():
            rows[absent] = stored


def _mask(field: Field, call: Call) -> None:
    call.fill(MASK.format(field.name), ~is_missing(call.inputs[field.name], field))


COMPLETE = "missing='drop'"  # the name of no other field


def find_complete(opened: Callable[[Index], Source], index: Index, samples: Samples | None) -> Samples:
    """Return the samples without any missing value, equal on all ranks. *Collective*: each rank reads its block.

    Parameters
    ----------
    opened : opens the files of an index. *Collective*.
    index : of the samples, before one-hot vectors and stacks are made of them.
    samples : samples to choose from, ascending; None: all.

    Raises
    ------
    DataError : the first error of any rank, on every rank.
    """
    names = [name for name, field in index.fields.items() if _may_be_missing(field)]
    samples = samples or Runs.between(0, len(index))
    if not names:
        return samples
    mark = ComputedFields(_complete, names, {COMPLETE: Field(COMPLETE, (), np.dtype(bool))})
    marked = compute_all(index, [mark]).select([COMPLETE])
    return select_samples(opened(marked), samples, COMPLETE)


def use_values(
    source: Source,
    samples: Samples,
    field: Field,
    use: Callable[[Integers, Array], None],
    problem: str | None,
    remedy: str | None = None,
) -> None:
    """Call ``use`` with positions in this rank's block and the values of a field there, until all are read.

    *Collective*.

    Parameters
    ----------
    field : with one value for each sample; of windows, that of the first row counts.
    problem, remedy : of the error; None: a missing value is none.

    Raises
    ------
    FormatError : a value is missing; on every rank.
    Exception : the first error of ``use`` on any rank, on every rank.
    """
    begin, _ = rank_range(samples.total, source.comm.rank, source.comm.size)

    def use_present(positions: Integers, arrays: Arrays) -> None:
        if len(positions):
            values = arrays[field.name].reshape(len(positions), -1)[:, 0]
            missing = np.flatnonzero(is_missing(values, field))
            if problem is not None and len(missing):
                number = samples.numbers(np.array([begin + positions[missing[0]]]))
                path, row = source.index.located(int(number[0]))
                found = "a missing value"
                raise FormatError(problem, file=path, field=field.name, row=row, found=found, remedy=remedy)
            use(positions, values)

    source.use_block(samples, [field.name], use_present)


def _may_be_missing(field: Field) -> bool:
    return not field.ragged and (is_nullable(field) or is_category(field) or _has_empty_texts(field))


def is_nullable(field: Field) -> bool:
    """Return whether a field has numbers, of which any may be missing."""
    return field.dtype.kind == "f" or MISSING_INTEGER in field.attributes


def _has_empty_texts(field: Field) -> bool:
    """Return whether an empty text of the field is a missing one."""
    return field.dtype.kind in "SUO" and bool(field.attributes.get(EMPTY_IS_MISSING, True))


def _complete(call: Call) -> None:
    """Mark the samples without missing values."""
    complete = [
        ~is_missing(array, call.fields[name]).any(axis=tuple(range(1, array.ndim)))
        for name, array in call.inputs.items()
    ]
    call.fill(COMPLETE, np.logical_and.reduce(complete))


def is_missing(array: Array, field: Field) -> NDArray[np.bool_]:
    """Return which values of a field are missing, of the shape of ``array``: NaN, empty texts, codes of no category."""
    if array.dtype.kind == "f":
        return np.isnan(array)
    if _has_empty_texts(field):
        return np.asarray((array == b"") | (array == "") if array.dtype.kind == "O" else array == array.dtype.type())
    if MISSING_INTEGER in field.attributes:
        return np.asarray(array == field.attributes[MISSING_INTEGER])
    return array < 0 if is_category(field) else np.zeros(array.shape, bool)


Sentinels = float | Sequence[float] | Mapping[str, float | Sequence[float]]
"""Numbers that are missing ones: of all fields of floats, or by name or pattern of the fields."""


def mark_missing(index: Index, sentinels: Sentinels | None, stored: Schema) -> Index:
    """Return the index with NaN in place of numbers that stand for missing ones.

    Integers, which have no NaN, are float64 then; only fields that ``sentinels`` names are converted.

    Parameters
    ----------
    index : of the data set.
    sentinels : the numbers.
    stored : fields that may have them.

    Raises
    ------
    FieldNotFound : a name is no field.
    FormatError : a named field has no numbers.
    """
    rules = sentinels if isinstance(sentinels, Mapping) else {} if sentinels is None else {"*": sentinels}
    named = isinstance(sentinels, Mapping)
    steps: list[ComputedFields] = []
    for name, rule in named_by_rules(rules, stored, "missing_values=").items():
        field = stored[name]
        if _applies(field, named, rule):
            marked = field if field.dtype.kind == "f" else replace(field, dtype=np.dtype(np.float64))
            numbers = _held(_listed(rules[rule]), field.dtype)
            steps.append(ComputedFields(partial(_mark, marked, numbers), [name], {name: marked}))
    return compute_all(index, steps)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple | np.ndarray) else [value]


def _held(numbers: Sequence[float], dtype: np.dtype[Any]) -> Array:
    """Return the numbers as a dtype has them, without those beyond its range, and without fractions of integers.

    >>> _held([-1, 0.5, 2**53 + 1, 1e30], np.dtype("i8")).tolist(), _held([1e30, 9], np.dtype("f2")).tolist()
    ([-1, 9007199254740993], [9.0])
    """
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            rounded: Array = np.array(numbers, np.float64).astype(dtype)
        return np.extract(np.isinf(rounded) <= np.isinf(np.array(numbers, np.float64)), rounded)
    limits = np.iinfo(dtype)
    return np.array([int(one) for one in numbers if limits.min <= one <= limits.max and one == int(one)], dtype)


def _applies(field: Field, named: bool, rule: str) -> bool:
    """Return whether a rule applies to a field; raise ``FormatError`` if it names one that it cannot apply to."""
    if field.dtype.kind == "f" and not field.nested:
        return True
    if named and field.dtype.kind in "iu" and not field.nested:
        return True
    if named and not is_pattern(rule):
        raise FormatError(
            "a field has no numbers, of which one could stand for missing ones",
            field=field.name,
            expected="a field of floats or integers in missing_values=",
            found=field.description,
        )
    return False


def _mark(field: Field, numbers: Array, call: Call) -> None:
    """Replace numbers of a field by NaN."""
    if field.ragged:
        lists = call.lists(field.name)
        call.fill(field.name, _marked(field, lists.values, numbers), lists.offsets)
    else:
        call.fill(field.name, _marked(field, call.inputs[field.name], numbers))


def _marked(field: Field, values: Array, numbers: Array) -> Array:
    """Return values in the dtype of a field, with NaN in place of these numbers, which have the dtype of the values."""
    return with_nan(field, values, np.isin(values, numbers))


def with_nan(field: Field, values: Array, missing: Array) -> Array:
    """Return values in the dtype of a field of floats, NaN where they are missing.

    Raises
    ------
    DecodeError : an integer is not exact in this dtype.
    """
    cast = exact(np.where(missing, values.dtype.type(0), values), field, "integers up to 2**53, beside missing values")
    cast[missing] = np.nan
    return cast
