"""Fields of several files, united: the wider dtype, and missing values for what a file lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, Protocol

import numpy as np

from matex_data.errors import FormatError, shortened
from matex_data.fields import (
    ALL_MISSING,
    ALL_ROWS,
    AS_TEXT,
    COORDINATES,
    LISTS,
    NAMES_OF_CODES,
    PARTLY_MISSING,
    UNITS,
    Field,
    Schema,
    is_category,
    shown,
    unlike,
)
from matex_data.index.combined import MissingRows, UnitedRows
from matex_data.index.files import FileColumns, FileIndex, FileList
from matex_data.index.layout import Layout
from matex_data.index.library import Constant, FolderValue
from matex_data.index.model import Index
from matex_data.index.table import Column
from matex_data.warning import warn

MOST_NAMED = 8  # fields in a warning
REMEDY = "convert the files to one schema, or select the fields that can be united with inputs= and targets="
SAME_CALENDAR = (
    "write the times of all files with one calendar, such as ds.time.encoding['calendar'] = 'proleptic_gregorian' of "
    "xarray, which from 15 October 1582 on is the standard one; or leave the field out with inputs= and targets="
)


class Gathering(Protocol):
    """Ranks, as far as the union of fields needs them."""

    rank: int

    def allgather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank. *Collective*."""


@dataclass(frozen=True)
class Occurrence:
    """Field as the files have it that were looked at.

    Parameters
    ----------
    field : of all of them.
    path : of the first file that has it.
    files : number of those of which all samples have it.
    lacking : path of the first file that lacks it, or of which samples lack it; None: all have it.
    """

    field: Field
    path: str
    files: int
    lacking: str | None = None


@dataclass(frozen=True)
class UnitedFields:
    """Fields of files, and facts that the files must share.

    Parameters
    ----------
    path : of the first file.
    first : names of its fields.
    files : number of files.
    occurrences : fields by name.
    facts : by name: a text, and the first file that has it.
    fills : values that fields have where a file lacks them, by name; others are missing there.
    """

    path: str
    first: frozenset[str]
    files: int
    occurrences: Mapping[str, Occurrence]
    facts: Mapping[str, tuple[str, str]]
    fills: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, path: str, fields: Schema, facts: Mapping[str, str] | None = None, fills: Mapping[str, Any] | None = None
    ) -> UnitedFields:
        """Return the union of one file."""
        partly = {name for name, field in fields.items() if field.attributes.get(PARTLY_MISSING)}
        found = {
            n: Occurrence(field, path, int(n not in partly), path if n in partly else None)
            for n, field in fields.items()
        }
        texts = {name: (text, path) for name, text in (facts or {}).items()}
        return cls(path, frozenset(fields), 1, found, texts, fills or {})

    def of_files(self, files: int) -> UnitedFields:
        """Return the union of so many files with the same fields."""
        found = {name: replace(found, files=files * found.files) for name, found in self.occurrences.items()}
        return replace(self, files=files, occurrences=found)

    def joined(self, other: UnitedFields) -> UnitedFields:
        """Return the union of these files and of others behind them.

        Raises
        ------
        FormatError : a field cannot be united, or a fact differs. It names both files.
        """
        found = {name: self._joined(other, name) for name in {**self.occurrences, **other.occurrences}}
        return replace(self, files=self.files + other.files, occurrences=found, facts=self._facts(other))

    def _joined(self, other: UnitedFields, name: str) -> Occurrence:
        mine, theirs = self.occurrences.get(name), other.occurrences.get(name)
        if mine is None or theirs is None:
            one = mine or theirs
            assert one is not None
            return replace(one, lacking=self.path if mine is None else mine.lacking or other.path)
        field = united(mine.field, theirs.field)
        if field is None:
            key = unlike(mine.field, theirs.field)
            shared = "have the same fields" if key is None else f"agree on {key!r} of {name!r}"
            raise FormatError(
                f"the files do not {shared}",
                file=theirs.path,
                field=name,
                expected=f"{shown(mine.field, key)}, as in {mine.path!r}",
                found=shown(theirs.field, key),
                remedy=SAME_CALENDAR if key == "calendar" else REMEDY,
            )
        told = {key: theirs.field.attributes[key] for key in UNITS if key in theirs.field.attributes}
        field = replace(field, attributes={**told, **field.attributes})
        return Occurrence(field, mine.path, mine.files + theirs.files, mine.lacking or theirs.lacking)

    def completed(self) -> UnitedFields:
        """Return the union, of all files, whose fields hold what stands for them in the files that lack them.

        Raises
        ------
        FormatError : a field can hold neither its value of ``absent=``, nor a missing one.
        """
        found = {
            name: one if one.lacking is None else replace(one, field=self._fillable(one, one.lacking))
            for name, one in self.occurrences.items()
        }
        return replace(self, occurrences=found)

    def _fillable(self, found: Occurrence, lacking: str) -> Field:
        """Return a field that may have its value of ``absent=``, or else that may be missing."""
        name = found.field.name
        return filled_field(found.field, self.fills[name]) if name in self.fills else _nullable(found, lacking)

    def with_absent(self, names: Iterable[str]) -> UnitedFields:
        """Return the union with those of these fields that no file has, and ``absent=`` gives."""
        lacking = [name for name in names if name in self.fills and name not in self.occurrences]
        new = {name: Occurrence(_field_of(name, self.fills[name]), self.path, 0, self.path) for name in lacking}
        return replace(self, occurrences={**self.occurrences, **new})

    def _facts(self, other: UnitedFields) -> dict[str, tuple[str, str]]:
        for name in {**self.facts, **other.facts}:
            mine, theirs = self.facts.get(name), other.facts.get(name)
            differs = mine[0] != theirs[0] if mine and theirs else not self._may_lack(other, name)
            if differs:
                raise FormatError(
                    f"the files do not agree on {name}",
                    file=theirs[1] if theirs else other.path,
                    expected=f"{mine[0] if mine else 'unspecified'}, as in {mine[1] if mine else self.path!r}",
                    found=theirs[0] if theirs else "unspecified",
                    remedy=f"open only files that agree on {name}, or convert them",
                )
        return {**other.facts, **self.facts}

    def _may_lack(self, other: UnitedFields, fact: str) -> bool:
        """Return whether a fact that only some of the files have is one of a field that the others lack."""
        lacking = {
            name
            for name in {**self.occurrences, **other.occurrences}
            if name not in self.occurrences or name not in other.occurrences
        }
        if lacking and fact.startswith(COORDINATES):  # of its axes
            return True
        return any(fact == name or fact.endswith((f"of {name}", f"of {name!r}")) for name in lacking)

    @property
    def fields(self) -> dict[str, Field]:
        """Fields of a sample of all files, by name."""
        return {name: found.field for name, found in self.occurrences.items()}

    @property
    def texts(self) -> dict[str, str]:
        """Facts of all files, by name."""
        return {name: text for name, (text, _) in self.facts.items()}

    @property
    def lacking(self) -> dict[str, Occurrence]:
        """Fields that files lack, and for which ``absent=`` has no value."""
        return {n: found for n, found in self.occurrences.items() if found.lacking is not None and n not in self.fills}

    def warn(self) -> None:
        """Warn of the fields that files lack."""
        lacking = self.lacking
        if lacking:
            every = (
                f"{name!r} in {self.files - found.files} of {self.files} files, such as {found.lacking!r}"
                for name, found in lacking.items()
            )
            shown = "; ".join(shortened(every, MOST_NAMED))
            warn(f"fields that files or samples lack are missing there, as missing= treats it: {shown}")


def unite(ranks: Gathering, own: Iterable[UnitedFields]) -> UnitedFields:
    """Return the union of the files of all ranks; rank 0 warns of fields that files lack. *Collective*.

    Parameters
    ----------
    ranks : the ranks, one of which has a file at least.
    own : unions of the files of this rank.

    Raises
    ------
    FormatError : fields cannot be united. It is the same on all ranks.
    UserWarning : files lack fields, and warnings are errors. It is the same on all ranks.
    """
    mine: UnitedFields | FormatError | None
    try:
        mine = _reduced(own)
    except FormatError as error:
        mine = error
    by_rank = ranks.allgather(mine)
    for one in by_rank:
        if isinstance(one, FormatError):
            raise one
    whole = _reduced(one for one in by_rank if one is not None)
    assert whole is not None
    whole = whole.completed()
    if whole.lacking:
        _warn_once(ranks, whole)
    return whole


def _warn_once(ranks: Gathering, union: UnitedFields) -> None:
    """Warn on rank 0; raise the warning on all ranks where the user has made it an error. *Collective*."""
    raised: UserWarning | None = None
    try:
        if ranks.rank == 0:
            union.warn()
    except UserWarning as error:
        raised = error
    (first, *_) = ranks.allgather(raised)
    if first is not None:
        raise first


def counted(
    files: Iterable[tuple[str, Schema, Mapping[str, str]]], fills: Mapping[str, Any] | None = None
) -> list[UnitedFields]:
    """Return the unions of files with the same fields and facts, in the order of their first files.

    Parameters
    ----------
    files : path, fields and facts of each file.
    fills : values that fields have where a file lacks them, by name; None: fields are missing there.
    """
    unions: dict[Hashable, UnitedFields] = {}
    counts = Counter[Hashable]()
    for path, fields, facts in files:
        key = schema_key(fields, facts)
        if key not in unions:
            unions[key] = UnitedFields.of(path, fields, facts, fills)
        counts[key] += 1
    return [union.of_files(counts[key]) for key, union in unions.items()]


def schema_key(fields: Schema, facts: Mapping[str, str]) -> Hashable:
    """Return a key that is equal for files that are united with others in the same way."""
    marks = (
        (name, key, str(value))
        for name, field in fields.items()
        for key, value in field.attributes.items()
        if key in _MARKS
    )
    return (*fields.values(), *marks, *facts.items())


_MARKS = {ALL_MISSING, ALL_ROWS, PARTLY_MISSING, AS_TEXT, *UNITS, *NAMES_OF_CODES}


def _reduced(unions: Iterable[UnitedFields]) -> UnitedFields | None:
    listed = list(unions)
    return reduce(UnitedFields.joined, listed) if listed else None


def united(first: Field, other: Field) -> Field | None:
    """Return the field whose samples can be those of both; None: there is none.

    >>> small, large = (Field("n", (), np.dtype(kind)) for kind in ("i4", "i8"))
    >>> united(small, large).dtype, united(small, Field("n", (), np.dtype("f4"))).dtype
    (dtype('int64'), dtype('float64'))
    >>> united(small, Field("n", (2,), np.dtype("i4"))) is None
    True
    """
    if _is_null(other):
        return _missing_as(first, other)
    if _is_null(first):
        return _missing_as(other, first)
    if unlike(first, other) is not None:
        return None
    if first.attributes.get(AS_TEXT) and not other.attributes.get(AS_TEXT):
        return other if _is_text(other) else united(_without(first, AS_TEXT), other)
    if other.attributes.get(AS_TEXT) and not first.attributes.get(AS_TEXT):
        return first if _is_text(first) else united(first, _without(other, AS_TEXT))
    if first == other:
        return first
    dtype = _common(first.dtype, other.dtype)
    if dtype is None:
        return None
    alike = (first.shape, first.ragged, first.inner) == (other.shape, other.ragged, other.inner)
    if alike:
        return replace(first, dtype=dtype)
    if first.attributes.get(ALL_ROWS) and other.attributes.get(ALL_ROWS) and first.nested == other.nested:
        shape = _common_shape(first.sample_shape, other.sample_shape)
        return None if shape is None else ragged_field(replace(first, dtype=dtype), shape)
    if first.attributes.get(LISTS) and other.attributes.get(LISTS):
        shape = _common_shape(first.sample_shape, other.sample_shape)
        shape = [None] if shape is None and max(len(first.sample_shape), len(other.sample_shape)) <= 1 else shape
        return None if shape is None else ragged_field(replace(first, dtype=dtype), shape)
    lists = [field for field in (first, other) if field.ragged]
    arrays = [field for field in (first, other) if not field.ragged and len(field.shape) == 1]
    if len(lists) == len(arrays) == 1 and lists[0].inner == (None,) and not lists[0].shape and not lists[0].nested:
        return replace(lists[0], dtype=dtype)
    return None


def _missing_as(field: Field, null: Field) -> Field | None:
    """Return a field whose values may be missing, as those of a file that has none: of all rows, as many as it has."""
    rows = field.attributes.get(ALL_ROWS) and null.attributes.get(ALL_ROWS) and not field.nested
    shape = _common_shape(field.sample_shape, null.sample_shape) if rows else None
    one = nullable(field if shape is None else replace(field, ragged=False))
    return one if one is None or shape is None else ragged_field(one, shape)


def _common_shape(first: Sequence[int | None], other: Sequence[int | None]) -> list[int | None] | None:
    """Return the shape with None for the axes that differ in length; None: they differ in number."""
    return [a if a == b else None for a, b in zip(first, other, strict=True)] if len(first) == len(other) else None


def ragged_field(field: Field, shape: Sequence[int | None]) -> Field:
    """Return a field with samples of a shape, in which axes that vary are None."""
    lengths = tuple(length for length in shape if length is not None)
    if len(lengths) == len(shape):
        return replace(field, shape=lengths, ragged=field.nested)
    return replace(field, shape=(), ragged=True, inner=tuple(shape))


def _is_text(field: Field) -> bool:
    return field.dtype == object and not field.ragged and not field.shape


def _without(field: Field, attribute: str) -> Field:
    return replace(field, attributes={name: value for name, value in field.attributes.items() if name != attribute})


def _common(first: np.dtype[Any], other: np.dtype[Any]) -> np.dtype[Any] | None:
    """Return the dtype that holds the values of both; None: there is none."""
    kinds = {first.kind, other.kind}
    if first == other:
        return first
    if kinds <= set("biufc"):
        common = np.result_type(first, other)
        return None if common.kind == "f" and kinds <= set("iu") else common
    if kinds <= {"S", "O"}:
        return np.dtype(object)
    return np.result_type(first, other) if kinds in ({"S"}, {"U"}) else None


def nullable(field: Field) -> Field | None:
    """Return a field whose values may be missing: NaN, an empty text, an empty list, a code of -1; None: there is none.

    >>> nullable(Field("n", (), np.dtype("i4"))).dtype
    dtype('float64')
    """
    if field.ragged or field.dtype.kind in "fcSUO" or is_category(field):
        return field
    return replace(field, dtype=np.dtype(np.float64)) if field.dtype.kind in "biu" else None


def filled_field(field: Field, value: Any) -> Field:
    """Return the field that holds its values, and a value of ``absent=`` as well.

    >>> filled_field(Field("n", (), np.dtype("i4")), -1).dtype, filled_field(Field("n", (), np.dtype("i4")), 0.5).dtype
    (dtype('int32'), dtype('float64'))

    Raises
    ------
    FormatError : it can hold no such value.
    """
    dtype = _field_of(field.name, value).dtype
    common = None if field.ragged else field.dtype if _holds(field.dtype, value) else _common(field.dtype, dtype)
    if common is None:
        raise FormatError(
            "a value of absent= is none of the field",
            field=field.name,
            expected=field.description,
            found=repr(value),
            remedy="leave it out of absent=: lists are empty in files that lack them" if field.ragged else None,
        )
    return replace(field, dtype=common)


def _holds(dtype: np.dtype[Any], value: Any) -> bool:
    """Return whether a dtype holds a value of ``absent=``, floats to their precision."""
    if isinstance(value, str | bytes) or dtype.kind in "SUO":
        return isinstance(value, str | bytes) and dtype.kind in "SUO"
    if dtype.kind in "fc":
        return True
    least, most = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return bool(least <= value <= most and value == int(value))


def _field_of(name: str, value: Any) -> Field:
    """Return the field of a value of ``absent=`` that no file has."""
    dtype = np.asarray(value).dtype
    return Field(name, (), np.dtype(object) if dtype.kind in "SUO" else dtype)


def _fill_value(field: Field, value: Any) -> Any:
    """Return a value of ``absent=`` as rows of the field have it."""
    if field.dtype.kind in "SO":
        return value.encode() if isinstance(value, str) else value
    return field.dtype.type(value).item()


def _nullable(found: Occurrence, lacking: str) -> Field:
    field = nullable(found.field)
    if field is None:
        raise FormatError(
            "the files do not have the same fields",
            file=lacking,
            field=found.field.name,
            expected=f"{found.field.description}, as in {found.path!r}",
            found="no such field, and its values cannot be missing",
            remedy=REMEDY,
        )
    return field


def check_common(path: str, fields: Schema, union: UnitedFields) -> None:
    """Raise ``FormatError`` if a file, all fields of which are read, has none of those of the first file."""
    if fields and union.first and union.first.isdisjoint(fields):
        raise FormatError(
            "the files do not have the same fields",
            file=path,
            expected=f"one at least of {', '.join(sorted(union.first)[:MOST_NAMED])}, as in {union.path!r}",
            found=", ".join(list(fields)[:MOST_NAMED]),
            remedy=REMEDY,
        )


def adapted(file: FileIndex, fields: Schema, union: UnitedFields) -> FileIndex:
    """Return the entry of a file with the fields of all files.

    Parameters
    ----------
    file : with layouts for ``fields``.
    """
    layouts: dict[str, Layout] = {}
    for name, found in union.occurrences.items():
        absent = name not in fields or (_is_null(fields[name]) and found.field != fields[name])
        if name not in fields and name in union.fills:
            layouts[name] = Constant(file.rows, _fill_value(found.field, union.fills[name]))
        elif absent:
            field = _plain(found.field)
            if name in fields and field.ragged and not field.nested and fields[name].shape:  # all rows of the file
                field = replace(field, inner=(fields[name].shape[0], *field.inner[1:]))
            layouts[name] = MissingRows(file.rows, field)
        else:
            layouts[name] = _adapted(file.layouts[name], fields[name], found.field)
    # All columns of a table are read by one call, which has one kind of output.
    tables = {layout.layout.table for layout in layouts.values() if _is_united_column(layout)}  # type: ignore[attr-defined]
    for name, layout in layouts.items():
        if isinstance(layout, Column) and layout.table in tables:
            layouts[name] = UnitedRows(layout, _plain(fields[name]), _plain(union.occurrences[name].field))
    return replace(file, layouts=layouts)


def _adapted(layout: Layout, stored: Field, field: Field) -> Layout:
    if field == stored or (stored.attributes.get(ALL_ROWS) and field.dtype == stored.dtype):
        return layout
    if isinstance(layout, FolderValue) and field.dtype == object:
        return Constant(layout.rows, layout.written)
    return UnitedRows(layout, _plain(stored), _plain(field))


def _is_united_column(layout: Layout) -> bool:
    return isinstance(layout, UnitedRows) and isinstance(layout.layout, Column)


def _plain(field: Field) -> Field:
    return replace(field, attributes={"nested": True} if field.nested else {})


def concatenate(indexes: Sequence[Index], is_first: bool = True) -> Index:
    """Return one index of the files of all, in order, with their united fields.

    Parameters
    ----------
    indexes : at least one.
    is_first : this is the rank that warns of fields that files lack.

    Raises
    ------
    FormatError : fields cannot be united, or facts differ.
    """
    union = _reduced(UnitedFields.of(index.files.paths[0], index.fields, index.facts) for index in indexes)
    assert union is not None
    union = union.completed()
    if is_first:
        union.warn()
    files = [adapted(file, index.fields, union) for index in indexes for file in index.files]
    return Index(union.fields, FileList(files), indexes[0].static, union.texts)


def is_alike(fields: Schema, union: UnitedFields) -> bool:
    """Return whether a file with these fields needs no adaptation."""
    return list(fields) == list(union.occurrences) and fields == union.fields


def is_united(index: Index) -> bool:
    """Return whether files of a stored index have other fields than all have, which the index does not tell."""
    assert isinstance(index.files, FileColumns)
    layouts = (layout for file in index.files.exemplars for layout in file.layouts.values())
    ragged = (field.ragged and field.attributes.get(ALL_ROWS) for field in index.fields.values())
    return any(ragged) or any(isinstance(layout, UnitedRows | MissingRows) for layout in layouts)


def _is_null(field: Field) -> bool:
    return bool(field.attributes.get(ALL_MISSING))
