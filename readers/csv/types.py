"""Types of columns: inferred from their values or requested, agreed over all blocks and files, and delivered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import DecodeError, FormatError
from matex_data.fields import EPOCH
from matex_data.locks import cached_property
from matex_data.readers.arrow.times import seconds

_WHOLE = re.compile(rb"[-+]?[0-9]{1,20}")
_ARROW = {
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "float64": pa.float64(),
    "null": pa.float64(),
    "bool": pa.bool_(),
    "flag": bool,
    "text": pa.binary(),
    "category": pa.dictionary(pa.int32(), pa.binary()),
    "micro": pa.timestamp("us"),
    "nano": pa.timestamp("ns"),
    "zoned micro": pa.timestamp("us", "UTC"),
    "zoned nano": pa.timestamp("ns", "UTC"),
}
_COMMON_KIND = {
    frozenset(("int64", "uint64")): "uint64",
    frozenset(("int64", "float64")): "float64",
    frozenset(("uint64", "float64")): "float64",
    frozenset(("micro", "nano")): "nano",
    frozenset(("zoned micro", "zoned nano")): "zoned nano",
}
_TIMES = ("micro", "nano", "zoned micro", "zoned nano")


@dataclass(frozen=True)
class ColumnSummary:
    """Summary of the values of a column, as far as its type follows from it.

    Parameters
    ----------
    kind : "null" if all are missing; "int64"; "uint64" if a value needs it; "float64"; "bool"; "micro" or
        "nano" for times, also "zoned micro" and "zoned nano"; "text" for anything else.
    missing : a value is missing.
    negative : an integer is below 0.
    values : all different values, where these are needed.
    """

    kind: str = "null"
    missing: bool = False
    negative: bool = False
    values: frozenset[bytes] = frozenset()

    @classmethod
    def of(cls, column: pa.ChunkedArray, distinct: bool) -> ColumnSummary:
        """Summarize a parsed column; ``distinct``: with all its values."""
        kind, values = _kind(column.type), frozenset[bytes]()
        negative = kind == "int64" and (pc.min(column).as_py() or 0) < 0
        if distinct:
            values = frozenset(pc.unique(column).drop_null().cast(pa.binary()).to_pylist())
        return cls(kind, column.null_count > 0, negative, values)

    def merge(self, other: ColumnSummary) -> ColumnSummary:
        """Return the summary of the values of both."""
        kinds = {self.kind, other.kind} - {"null"}
        kind = "null" if not kinds else kinds.pop() if len(kinds) == 1 else _COMMON_KIND.get(frozenset(kinds), "text")
        missing, negative = self.missing or other.missing, self.negative or other.negative
        return ColumnSummary(kind, missing, negative, self.values | other.values)


def merge_summaries(summaries: Iterable[Mapping[str, ColumnSummary]]) -> dict[str, ColumnSummary]:
    """Merge summaries by name of the column."""
    by_name: dict[str, list[ColumnSummary]] = {}
    for columns in summaries:
        for name, summary in columns.items():
            by_name.setdefault(name, []).append(summary)
    return {name: reduce(ColumnSummary.merge, found) for name, found in by_name.items()}


def _kind(kind: Any) -> str:
    if pa.types.is_date(kind):
        return "micro"
    if pa.types.is_timestamp(kind):
        return ("zoned " if kind.tz is not None else "") + ("nano" if kind.unit == "ns" else "micro")
    if str(kind) in ("null", "int64", "uint64", "bool"):
        return str(kind)
    return "float64" if pa.types.is_floating(kind) else "text"


@declared
@dataclass(frozen=True)
class ColumnType:
    """Type as which a column is parsed and delivered.

    Parameters
    ----------
    kind : as of ``ColumnSummary``, or "category", or "number" or "flag" for a requested dtype.
    dtype : as delivered.
    categories : texts whose positions are delivered; -1 stands for a missing value.
    """

    kind: str
    dtype: np.dtype[Any]
    categories: tuple[bytes, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def arrow(self) -> Any:
        """Return the type as which ``Parser`` parses the column."""
        if self.kind == "number":
            return pa.float32() if self.dtype == np.float16 else pa.from_numpy_dtype(self.dtype)
        return _ARROW[self.kind]

    @cached_property
    def _positions(self) -> dict[bytes, int]:
        return {value: i for i, value in enumerate(self.categories)}

    def values(self, column: pa.ChunkedArray) -> Array:
        """Return the column as NumPy array that can be assigned to one of ``dtype``.

        Raises
        ------
        DecodeError : a value is missing, and the type has no value for that.
        """
        array: Any = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if self.kind == "category":
            position = (self._positions.get(value, -1) for value in array.dictionary.to_pylist())
            codes = np.array([*position, -1], np.int32)
            return np.asarray(codes[_to_numpy(array.indices.fill_null(len(codes) - 1))])
        if self.kind == "text":
            return _to_numpy(array.fill_null(b"") if array.null_count else array)
        if array.null_count and self.dtype.kind != "f":
            raise DecodeError(
                "a value is missing, which the type of the column cannot express",
                expected=f"a value of {self.dtype} in every record",
                remedy="give this column the dtype= 'float64', or none, and infer='full'",
            )
        if self.kind in ("bool", "flag"):
            return _to_numpy(array.cast(pa.uint8()))
        return seconds(array) if self.kind in _TIMES else _to_numpy(array)


def _to_numpy(array: Any) -> Array:
    converted: Array = array.to_numpy(zero_copy_only=False)
    return converted


TEXT = ColumnType("text", np.dtype(object))


def is_inferred(dtype: Any) -> bool:
    """Return whether the values of a column decide on its type: without one of the user, and for times."""
    found = _numpy(dtype)
    return dtype is None or (found is not None and found.kind == "M")


def requested_type(name: str, dtype: Any, summary: ColumnSummary) -> ColumnType:
    """Return the type for one of the user's ``dtype=``.

    Parameters
    ----------
    summary : of the column: all values of categories, the kind of times.

    Raises
    ------
    FormatError : there is no such type.
    """
    if isinstance(dtype, list | tuple):
        return _category(tuple(str(value).encode() for value in dtype))
    if dtype == "category":
        whole = all(map(_WHOLE.fullmatch, summary.values))
        return _category(tuple(sorted(summary.values, key=(lambda value: (int(value), value)) if whole else None)))
    if dtype in (str, bytes, object, "str", "string", "bytes", "object"):
        return TEXT
    found = _numpy(dtype)
    if found is None or found.kind not in "MSUbiuf" or (found.kind in "iuf" and found.itemsize > 8):
        expected = "a dtype of integers, floats or booleans, 'str', 'category', a list of categories, or 'datetime'"
        raise FormatError("there is no such type for a column", field=name, expected=expected, found=repr(dtype))
    if found.kind == "M":
        return _time(summary.kind if summary.kind in _TIMES else "micro")
    if found.kind in "SU":
        return TEXT
    return ColumnType("flag", found) if found.kind == "b" else ColumnType("number", found.newbyteorder("="))


def _numpy(dtype: Any) -> np.dtype[Any] | None:
    """Return a user's type as NumPy's; None: NumPy has no such type."""
    try:
        return np.dtype("datetime64[us]" if dtype in ("date", "datetime") else dtype)
    except (TypeError, ValueError):
        return None


def inferred_type(summary: ColumnSummary, parse_dates: bool) -> ColumnType:
    """Return the type of a column with such values."""
    if summary.kind in _TIMES:
        return _time(summary.kind) if parse_dates else TEXT
    if summary.kind == "text" or (summary.kind == "uint64" and (summary.missing or summary.negative)):
        return TEXT  # no type of numbers holds all of them
    if summary.kind == "uint64":
        return ColumnType("uint64", np.dtype(np.uint64))
    if summary.kind == "bool":
        return ColumnType("bool", np.dtype(float if summary.missing else bool))
    integers = summary.kind == "int64" and not summary.missing
    return ColumnType("int64", np.dtype(np.int64)) if integers else ColumnType("float64", np.dtype(np.float64))


def _time(kind: str) -> ColumnType:
    return ColumnType(kind, np.dtype(np.float64), attributes={"units": EPOCH})


def _category(values: tuple[bytes, ...]) -> ColumnType:
    return ColumnType("category", np.dtype(np.int32), values, {"categories": [value.decode() for value in values]})
