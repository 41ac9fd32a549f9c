"""Values of Arrow arrays as NumPy arrays: no copy where Arrow holds them as NumPy does."""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from math import prod
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from matex_data._types import Array
from matex_data.errors import DecodeError
from matex_data.index.combined import exact
from matex_data.index.ragged import RaggedArray, nested
from matex_data.readers.arrow.times import seconds
from matex_data.readers.parquet.members import ColumnField, Step

DIGITS = 10**15 - 1  # greatest number of 15 digits, so many of which float64 holds
POWER = 22  # greatest power of ten that float64 holds
WIDEST = 38  # digits of a decimal number of 128 bits

ColumnValues = Any
"""Rows of one field: an array; `RaggedArray` for lists of numbers; an object array for deeper lists."""


def decode(column: pa.ChunkedArray, member: ColumnField) -> ColumnValues:
    """Return the rows of a field.

    Raises
    ------
    DecodeError : a value is missing that its type cannot express, or is not exact in the field's dtype. Its row counts
        from the first of the column.
    """
    array = _joined(column)
    rows = len(array)
    array, lists = _descend(array, member.steps)
    try:
        values = _plain(array, member)
    except DecodeError as error:
        raise error.at_row(_row(error.row or 0, lists, rows, len(array))) from error
    shape = member.field.shape if not member.field.ragged else member.field.element_shape
    values = values.reshape(len(values) // max(1, prod(shape)), *shape) if shape else values
    if not lists:
        return values
    values = values.astype(member.field.dtype, copy=False)
    if len(lists) == 1 and not values.dtype.hasobject:
        return RaggedArray(values, lists[0])
    return nested(values, lists)


def values_at(column: pa.ChunkedArray, steps: Sequence[Step]) -> pa.Array:
    """Return the values at the end of steps from a column, without the lists around them."""
    return _descend(_joined(column), steps)[0]


def _joined(column: pa.ChunkedArray) -> pa.Array:
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    if isinstance(array, pa.ChunkedArray):  # of no chunks
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], column.type)
    return array


def _descend(array: pa.Array, steps: Sequence[Step]) -> tuple[pa.Array, list[Array]]:
    """Return the values at the end of the steps, and the offsets of each list of any length, the outer ones first."""
    lists: list[Array] = []
    left = list(steps)
    while left:
        step = left.pop(0)
        size = step
        if isinstance(array.type, pa.FixedShapeTensorType):
            del left[: len(array.type.shape) - 1]
            size = prod(array.type.shape)
        while isinstance(array, pa.ExtensionArray):
            array = array.storage
        if isinstance(step, str):
            array = pc.struct_field(array, step)
            continue
        absent = np.asarray(array.is_null()) if array.null_count else None
        if isinstance(array, pa.FixedSizeListArray):
            array = _fixed(array, absent)
            continue
        offsets = np.asarray(array.offsets).astype(np.int64)
        lengths = np.diff(offsets)
        if absent is None:
            array, offsets = array.values.slice(offsets[0], offsets[-1] - offsets[0]), offsets - offsets[0]
        else:  # a list that is missing is read as an empty one, or as missing values where all have one length
            lengths[absent] = 0
            array, offsets = array.flatten(), np.append(0, np.cumsum(lengths))
        if size is None:
            lists.append(offsets)
        elif absent is not None and (lengths[~absent] == size).all():
            array = _with_gaps(array, absent, int(size))
        elif (uneven := lengths != size).any():
            raise DecodeError(
                "an array has another shape",
                row=int(uneven.argmax()),
                expected=f"{size} elements",
                found="another number",
            )
    while isinstance(array, pa.ExtensionArray):
        array = array.storage
    return array, lists


def _fixed(array: pa.FixedSizeListArray, absent: Array | None) -> pa.Array:
    """Return the values of lists of one length, which are missing where the list is."""
    values = array.flatten()
    return values if absent is None else _with_gaps(values, absent, array.type.list_size)


def _with_gaps(values: pa.Array, absent: Array, size: int) -> pa.Array:
    """Return the values of lists of one length, and missing ones for lists that are absent."""
    present = np.repeat(~absent, size)
    at = np.cumsum(present) - 1
    return values.take(pa.array(at, pa.int64(), mask=~present))


def _row(element: int, lists: Sequence[Array], rows: int, elements: int) -> int:
    """Return the row in which an element lies."""
    if not lists:
        return element * rows // max(1, elements)
    element = element * int(lists[-1][-1]) // max(1, elements)
    for offsets in reversed(lists):
        element = int(np.searchsorted(offsets, element, side="right")) - 1
    return element


def _plain(array: pa.Array, member: ColumnField) -> Array:
    """Return values of one of the kinds of `ColumnField`; the row of an error is the number of the value."""
    if pa.types.is_dictionary(array.type):
        if member.kind == "text":
            return _repeated_texts(array)
        array = array.dictionary_decode()
    dtype = member.field.dtype
    match member.kind:
        case "text":
            return _texts(array)
        case "time":
            values = seconds(array)
        case "decimal":
            values = _decimals(array, member.requested and dtype.kind == "f")
        case "null":
            values = np.full(len(array), np.nan)
        case _:
            values = _numbers(array.cast(pa.uint8()) if member.kind == "bool" else array, member)
    if dtype.kind == "f":
        return values
    if array.null_count:
        raise DecodeError(
            "a value is missing, which the type of the column cannot express",
            row=int(np.asarray(array.is_null()).argmax()),
            expected="a value",
            found="null",
            remedy="fill missing values before you write the file, or give dtype={name: 'float64'} for numbers",
        )
    return _whole(values, dtype)


def _numbers(array: pa.Array, member: ColumnField) -> Array:
    """Return numbers as they are stored; integers of a field of floats as those, with NaN for missing ones."""
    dtype = member.field.dtype
    if not pa.types.is_integer(array.type) or dtype.kind != "f":
        values: Array = array.to_numpy(zero_copy_only=False)
        return values
    whole = array.fill_null(0).to_numpy(zero_copy_only=False)
    if member.requested:
        values = whole.astype(dtype)
    else:
        values = exact(whole, member.field, "integers up to 2**53, beside which values are missing", int)
    if array.null_count:
        values[np.asarray(array.is_null())] = np.nan
    return values


def _texts(array: pa.Array) -> Array:
    if not pa.types.is_fixed_size_binary(array.type):
        array = array.cast(pa.large_binary())
    texts: Array = array.to_numpy(zero_copy_only=False)
    if array.null_count:
        texts[np.asarray(array.is_null())] = b""
    return texts


def _repeated_texts(array: pa.DictionaryArray) -> Array:
    """Return texts of which each is in memory once."""
    indices = array.indices.cast(pa.int64()).fill_null(len(array.dictionary))  # which their own type may not hold
    texts = np.append(_texts(array.dictionary), np.array([b""], object))
    return texts[indices.to_numpy(zero_copy_only=False)]  # type: ignore[no-any-return]


def _decimals(array: pa.Array, rounded: bool) -> Array:
    """Return decimal numbers as float64, correctly rounded.

    Of up to 15 digits, and powers of ten up to `POWER`, both numbers of the division are exact.

    Parameters
    ----------
    rounded : the user has requested floats, which may have fewer digits.

    Raises
    ------
    DecodeError : a number has more digits than a float, which would be written as another number.
    """
    scale = array.type.scale
    is_absent = np.asarray(array.is_null())
    if array.type.precision > WIDEST or abs(scale) > POWER:
        values, large = np.zeros(len(array)), np.flatnonzero(~is_absent)
    else:
        wide = array.cast(pa.decimal128(array.type.precision, scale)).fill_null(0)
        words = np.frombuffer(wide.buffers()[1], "<i8")[2 * wide.offset : 2 * (wide.offset + len(wide))]
        low, high = words[::2], words[1::2]
        values = low / 10.0**scale if scale >= 0 else low * 10.0**-scale
        large = np.flatnonzero((low < -DIGITS) | (low > DIGITS) | (high != low >> 63))
    for row in large.tolist():
        number = array[row].as_py()
        values[row] = float(number)
        if not rounded and Decimal(repr(float(number))) != number:
            raise DecodeError(
                "a decimal number has more digits than float64",
                row=row,
                expected=f"a number that float64 holds, such as {float(number)!r}",
                found=str(number),
                remedy="dtype={name: 'float64'} rounds the numbers of the column",
            )
    values[is_absent] = np.nan
    return values


def _whole(values: Array, dtype: np.dtype[Any]) -> Array:
    """Return numbers in a dtype of integers or truth values; raise ``DecodeError`` for one that it does not hold."""
    if values.dtype == dtype:
        return values
    with np.errstate(invalid="ignore"):  # what no integer holds becomes another number, and is found below
        whole = values.astype(dtype)
    if (other := whole != values).any():
        row = int(other.argmax())
        remedy = "give a dtype that holds all numbers of the column: dtype={name: 'float64'}"
        raise DecodeError(
            "a number is not of the requested dtype", row=row, expected=dtype, found=values[row], remedy=remedy
        )
    return whole
