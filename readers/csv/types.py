"""Types of columns: what the values look like, what all parts of the data agree on, and how they are delivered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from matex_data._types import Array
from matex_data.errors import DecodeError, FormatError

EPOCH = "seconds since 1970-01-01 00:00:00 UTC"
_ARROW = {
    "int64": pa.int64(),
    "uint64": pa.uint64(),
    "float64": pa.float64(),
    "null": pa.float64(),
    "bool": pa.bool_(),
    "text": pa.binary(),
    "category": pa.dictionary(pa.int32(), pa.binary()),
    "micro": pa.timestamp("us"),
    "nano": pa.timestamp("ns"),
    "zoned": pa.timestamp("us", "UTC"),
}
_JOINED = {
    frozenset(("int64", "uint64")): "uint64",
    frozenset(("int64", "float64")): "float64",
    frozenset(("uint64", "float64")): "float64",
    frozenset(("micro", "nano")): "nano",
}
_SECONDS = {"micro": 10**6, "nano": 10**9, "zoned": 10**6}


@dataclass(frozen=True)
class Seen:
    """What some values of a column look like.

    Parameters
    ----------
    kind : "null" if all are missing, else "int64", "uint64" (some are longer), "float64", "bool", "micro", "nano" or
        "zoned" (times), "text".
    missing : whether some are missing.
    values : the different ones, where these are asked for.
    negative : whether some are integers below 0.
    """

    kind: str = "null"
    missing: bool = False
    values: frozenset[bytes] = frozenset()
    negative: bool = False

    def with_(self, other: Seen) -> Seen:
        """What the values of both look like."""
        return Seen(
            _wider(self.kind, other.kind),
            self.missing or other.missing,
            self.values | other.values,
            self.negative or other.negative,
        )


def _wider(a: str, b: str) -> str:
    if a == b or b == "null":
        return a
    if a == "null":
        return b
    return _JOINED.get(frozenset((a, b)), "text")


def seen(column: pa.ChunkedArray, distinct: bool) -> Seen:
    """What the values of a parsed column look like; ``distinct``: and which they are."""
    kind, missing = _kind(column), column.null_count > 0
    negative = kind == "int64" and (pc.min(column).as_py() or 0) < 0
    if not distinct:
        return Seen(kind, missing, negative=negative)
    values = pc.unique(column).drop_null()
    values = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    return Seen(kind, missing, frozenset(values.cast(pa.binary()).to_pylist()), negative)


def _kind(column: pa.ChunkedArray) -> str:
    kind = column.type
    if pa.types.is_date(kind):
        return "micro"
    if pa.types.is_timestamp(kind):
        return "zoned" if kind.tz is not None else "nano" if kind.unit == "ns" else "micro"
    for name in ("null", "int64", "uint64", "bool"):
        if str(kind) == name:
            return name
    return "float64" if pa.types.is_floating(kind) else "text"


@dataclass(frozen=True)
class ColumnType:
    """How a column is parsed and delivered.

    Parameters
    ----------
    kind : as of ``Seen``, or "category", or "number" for one of the user's own choice.
    dtype : as delivered.
    categories : the vocabulary, whose positions are delivered; -1 stands for missing.
    """

    kind: str
    dtype: np.dtype[Any]
    categories: tuple[bytes, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def arrow(self) -> Any:
        """What Arrow is to parse the column as."""
        if self.kind == "number":
            return pa.float32() if self.dtype == np.float16 else pa.from_numpy_dtype(self.dtype)
        return _ARROW[self.kind]

    def values(self, column: pa.ChunkedArray) -> Array:
        """The column as NumPy array of ``dtype``, or one that can be assigned to such.

        Raises
        ------
        DecodeError : a value is missing, and the type cannot say so.
        """
        array: Any = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        if self.kind == "category":
            return self._codes(array)
        if self.kind == "text":
            return _numpy(array.fill_null(b"") if array.null_count else array)
        if array.null_count and self.dtype.kind != "f":
            raise DecodeError(
                "a value is missing, which the type of the column cannot say",
                expected=f"a value of {self.dtype} in every record",
                remedy="give dtype={name: 'float64'}, or open with infer='full'",
            )
        if self.kind == "bool":
            return _numpy(array.cast(pa.uint8()))
        return _seconds(array, _SECONDS[self.kind]) if self.kind in _SECONDS else _numpy(array)

    def _codes(self, array: Any) -> Array:
        numbers = {value: number for number, value in enumerate(self.categories)}
        known = np.array([numbers.get(value, -1) for value in array.dictionary.to_pylist()] + [-1], np.int32)
        codes: Array = known[_numpy(array.indices.fill_null(len(known) - 1))]
        return codes


def _numpy(array: Any) -> Array:
    converted: Array = array.to_numpy(zero_copy_only=False)
    return converted


def _seconds(array: Any, unit: int) -> Array:
    whole, part = np.divmod(_numpy(array.cast(pa.int64()).fill_null(0)), unit)
    seconds: Array = whole + part / unit  # in one division, nanoseconds would be rounded twice
    seconds[_numpy(array.is_null())] = np.nan
    return seconds


def chosen(name: str, wish: Any, categories: Sequence[Any] = ()) -> ColumnType:
    """The type that the user asks for by ``dtype=``.

    Raises
    ------
    FormatError : there is no such type.
    """
    if isinstance(wish, list | tuple):
        return _category(tuple(str(value).encode() for value in wish))
    if wish == "category":
        return _category(tuple(categories))
    if wish in (str, bytes, object, "str", "string", "bytes", "object"):
        return ColumnType("text", np.dtype(object))
    try:
        dtype = np.dtype("datetime64[us]" if wish in ("date", "datetime") else wish)
    except TypeError as error:
        raise _no_type(name, wish) from error
    if dtype.kind == "M":
        return _time("micro")
    if dtype.kind in "SU":
        return ColumnType("text", np.dtype(object))
    if dtype.kind == "b":
        return ColumnType("bool", dtype)
    if dtype.kind not in "iuf" or dtype.itemsize > 8:
        raise _no_type(name, wish)
    return ColumnType("number", dtype.newbyteorder("="))


def _no_type(name: str, wish: Any) -> FormatError:
    expected = "a dtype of integers, floats or booleans, 'str', 'category', a list of categories, or 'datetime'"
    return FormatError("there is no such type for a column", field=name, expected=expected, found=repr(wish))


def inferred(what: Seen, dates: bool) -> ColumnType:
    """The type of a column whose values look like this."""
    if what.kind in _SECONDS:
        return _time(what.kind) if dates else ColumnType("text", np.dtype(object))
    if what.kind == "text" or (what.kind == "uint64" and (what.missing or what.negative)):
        return ColumnType("text", np.dtype(object))  # no type of numbers holds all of them
    if what.kind == "uint64":
        return ColumnType("uint64", np.dtype(np.uint64))
    if what.kind == "bool":
        return ColumnType("bool", np.dtype(float if what.missing else bool))
    whole = what.kind == "int64" and not what.missing
    return ColumnType("int64", np.dtype(np.int64)) if whole else ColumnType("float64", np.dtype(np.float64))


def _time(kind: str) -> ColumnType:
    return ColumnType(kind, np.dtype(np.float64), attributes={"units": EPOCH})


def _category(values: tuple[bytes, ...]) -> ColumnType:
    return ColumnType("category", np.dtype(np.int32), values, {"categories": [value.decode() for value in values]})
