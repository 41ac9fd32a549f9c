"""Field names and patterns in the options of transforms: ``"Muon_pt"``, ``"Muon_*"``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from matex_data._types import Integers
from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches
from matex_data.fields import MASK, Field, Schema, by_pattern, field_of, fits_any, is_pattern, matching


def check_lengths(problem: str, given: tuple[str, Integers], other: tuple[str, Integers], remedy: str) -> None:
    """Raise ``FormatError`` unless the lists of two fields have equally many elements in each sample.

    Parameters
    ----------
    problem, remedy : of the error.
    given, other : names of the fields, and int64[samples], their numbers of elements.
    """
    (name, lengths), (of_other, expected) = given, other
    differ = np.flatnonzero(lengths != expected)
    if len(differ):
        row = int(differ[0])
        raise FormatError(
            problem,
            field=name,
            row=row,
            expected=f"{expected[row]} elements, as in {of_other!r}",
            found=f"{lengths[row]} elements in {name!r}",
            remedy=remedy,
        )


def field_of_values(
    fields: Schema,
    name: str,
    problem: str,
    expected: str | None = "one number or text for each sample",
    kinds: str = "biufSUO",
    axes: Collection[int] = (0,),
) -> Field:
    """Return a field with one value for each sample, or one for each row of a sequence window.

    Parameters
    ----------
    problem, expected : of the error.
    kinds : of the dtypes that it may have.
    axes : numbers of axes that its samples may have.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : it is another one.
    """
    field = field_of(fields, name)
    if field.ragged or len(field.shape) not in axes or field.dtype.kind not in kinds:
        raise FormatError(problem, field=name, expected=expected, found=field.description)
    return field


def named_by_rules(rules: Collection[str], fields: Schema, option: str) -> dict[str, str]:
    """Return the name or pattern of a rule that each field fits: names come before patterns, these in their order.

    Raises
    ------
    FieldNotFound : a name is no field.
    """
    unknown = next((rule for rule in rules if rule not in fields and not is_pattern(rule)), None)
    if unknown is not None:
        raise FieldNotFound(
            f"{option} names no field among those that are read",
            field=unknown,
            expected=f"one of {near_matches(unknown, fields)}",
            remedy=f"correct the name, or select the field with inputs= and targets=, or leave it out of {option}",
        )
    return by_pattern(rules, fields)


def fields_to_read(
    names: Sequence[str] | None, masked: Iterable[str], is_field: Callable[[str], bool], *made: str
) -> list[str] | None:
    """Return the fields to read for the named ones. Masks that no file has are left out: they are made of fields.

    Parameters
    ----------
    names : requested names and patterns; None: all fields.
    masked : names and patterns of the fields that have masks.
    is_field : whether there is a field with the name of a mask.
    made : names of fields that transforms make of others; they may have masks, too.

    Examples
    --------
    >>> fields_to_read(["Muon_pt", "Muon_pt_mask", "trigger_mask"], ["Muon_*"], lambda name: False)
    ['Muon_pt', 'trigger_mask']
    """
    if names is None:
        return None
    requested, has_mask = fits_any([*names, *made]), fits_any(masked)

    def is_mask(name: str) -> bool:
        base = name.removesuffix(MASK.format(""))
        return base != name and requested(base) and has_mask(base) and not is_field(name)

    return [name for name in names if not is_mask(name)]


def ragged_fields(fields: Schema, patterns: Collection[str], option: str, of_arrays: bool = False) -> dict[str, str]:
    """Return the fields of lists that fit the patterns, each with the pattern; an exact name comes before a pattern.

    Parameters
    ----------
    fields : of the data set.
    patterns : names and patterns; a pattern leaves out fields that are not ragged, or have several axes that vary.
    option : name of the option, for the error.
    of_arrays : fields of lists of arrays of one shape count, too, such as the positions of atoms.

    Raises
    ------
    FieldNotFound : a name is no ragged field that is read, or a pattern fits none.
    FormatError : the samples of a named field are no lists, but have several axes.
    """
    axes = {name: field.inner for name, field in fields.items() if field.ragged and not field.nested}
    ragged = [
        name
        for name, inner in axes.items()
        if inner == (None,) or (of_arrays and inner.count(None) == 1 == inner.index(None) + 1)
    ]
    for pattern in patterns:
        if not matching(pattern, ragged):
            raise _not_ragged(pattern, fields, ragged, option)
    fitting = by_pattern(patterns, ragged)
    return {name: fitting[name] for name in ragged if name in fitting}


def _not_ragged(pattern: str, fields: Schema, ragged: Sequence[str], option: str) -> DataError:
    field = fields.get(pattern)
    if field is not None and field.ragged:
        return FormatError(
            f"{option}= is for fields whose samples are lists",
            field=pattern,
            expected="samples with one axis",
            found=field.description,
            remedy=f"leave the field out of {option}=; images get one shape by size=",
        )
    return FieldNotFound(
        f"{option}= names no field whose samples vary in length, among the fields that are read",
        field=pattern,
        expected=f"one of {near_matches(pattern, ragged)}",
        found="no such field" if field is None else field.description,
        remedy=f"correct the name, or select the field with inputs= and targets=, or leave it out of {option}=",
    )
