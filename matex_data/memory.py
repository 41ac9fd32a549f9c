"""Arrays in memory as a data set: dicts of arrays, pandas' data frames, xarray's data sets."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.fields import EXACT, MISSING_INTEGER, Field, expand_names
from matex_data.index.library import MemoryRows
from matex_data.index.model import FileIndex, Index

NAME = "memory"  # in place of the path of a file
EPOCH = {"units": "seconds since 1970-01-01 00:00:00 UTC"}
SECONDS = {"units": "seconds"}
DIGESTED = 1024  # rows at a time
EXAMPLE = '{"image": images, "label": labels}'


def is_in_memory(data: Any) -> bool:
    """Return whether an argument of ``open_dataset`` is arrays, and no paths."""
    return isinstance(data, Mapping) or _is_of(data, "pandas", "DataFrame") or _is_of(data, "xarray", "Dataset")


def index_arrays(data: Any, sample_dim: str | None = None) -> Index:
    """Return the index of arrays in memory, which it does not copy.

    Numbers keep their dtype; nullable and masked ones become float64, in which missing values are NaN. Integers that
    float64 cannot hold stay integers, of which one (`MISSING_INTEGER`) stands for missing values. Texts are UTF-8
    bytes, empty if they are missing. Times are float64 seconds since 1970-01-01, durations float64 seconds. A sequence
    of arrays of different lengths is a ragged field.

    Parameters
    ----------
    data : dict of arrays whose first axis is that of the samples; ``pandas.DataFrame``; ``xarray.Dataset``.
    sample_dim : dimension of the samples, of an ``xarray.Dataset``. None: the first one of its first variable.

    Raises
    ------
    FormatError : an array has no axis of samples, holds Python objects, or the lengths differ.

    Examples
    --------
    >>> index = index_arrays({"x": np.zeros((10, 3)), "y": np.arange(10)})
    >>> len(index), index.fields["x"].shape
    (10, (3,))
    """
    if _is_of(data, "xarray", "Dataset"):
        columns, static = _variables(data, sample_dim)
    elif sample_dim is not None:
        raise FormatError("sample_dim= is for xarray's data sets", expected="no sample_dim=", found=repr(sample_dim))
    elif isinstance(data, Mapping):
        columns, static = {str(name): (value, {}) for name, value in data.items()}, {}
    else:
        columns, static = {str(name): (data[name], {}) for name in data.columns}, {}
    if not columns:
        raise FormatError("there are no arrays of samples", expected=EXAMPLE, found=_described(data))
    read = [_read(name, values, attributes) for name, (values, attributes) in columns.items()]
    lengths = {field.name: len(array) for field, array in read}
    if len(set(lengths.values())) > 1:
        raise FormatError(
            "the arrays have different numbers of samples",
            expected="equal lengths of the first axis",
            found=", ".join(f"{name!r}: {length}" for name, length in list(lengths.items())[:8]),
        )
    rows = next(iter(lengths.values()))
    layouts = {field.name: MemoryRows(array) for field, array in read}
    return Index({field.name: field for field, _ in read}, [FileIndex(NAME, rows, layouts)], static)


def select(index: Index, names: Sequence[str] | None, static: bool = False) -> Index:
    """Return the index with the named fields, and those of the patterns; None: all.

    Parameters
    ----------
    index : of arrays in memory.
    names : of fields, or patterns.
    static : names may be of arrays that belong to no sample, which stay what they are.

    Raises
    ------
    FieldNotFound : there is no such array.
    """
    if names is None:
        return index
    chosen = expand_names([name for name in names if not (static and name in index.static)], list(index.fields))
    for name in chosen:
        if name not in index.fields:
            known = near_matches(name, list(index.fields))
            raise FieldNotFound("there is no such array", field=name, expected=f"one of {known}")
    return index.select(chosen)


def digest(index: Index) -> str:
    """Return a text that is equal for equal arrays: the ranks compare it."""
    found = hashlib.blake2b(digest_size=16)
    for name, field in index.fields.items():
        layout = index.files[0].layouts[name]
        assert isinstance(layout, MemoryRows)
        found.update(f"{name} {field.description} {len(layout.values)};".encode())
        if layout.values.dtype.hasobject:
            for value in layout.values.ravel().tolist():
                data = value if isinstance(value, bytes) else np.ascontiguousarray(value).tobytes()
                found.update(len(data).to_bytes(8, "little") + data)
        else:
            for start in range(0, len(layout.values), DIGESTED):
                found.update(layout.values[start : start + DIGESTED].tobytes())
    return f"arrays with the digest {found.hexdigest()}"


def _is_of(data: Any, package: str, name: str) -> bool:
    """Return whether an object is of a class of a package, which need not be installed."""
    module = sys.modules.get(package)
    return module is not None and isinstance(data, getattr(module, name))


def _variables(data: Any, sample_dim: str | None) -> tuple[dict[str, tuple[Any, dict[str, Any]]], dict[str, Array]]:
    """Return the variables whose first dimension is that of the samples, with attributes, and all others."""
    first = next((variable.dims[0] for variable in data.data_vars.values() if variable.dims), None)
    dimension = first if sample_dim is None else sample_dim
    if dimension not in data.dims:
        expected = f"sample_dim= of {[str(name) for name in data.dims]}"
        raise FormatError("there is no such dimension", expected=expected, found=repr(dimension))
    columns: dict[str, tuple[Any, dict[str, Any]]] = {}
    static: dict[str, Array] = {}
    for name, variable in data.variables.items():
        if variable.dims[:1] == (dimension,):
            columns[str(name)] = variable.to_numpy(), dict(variable.attrs)
        elif dimension in variable.dims:
            raise FormatError(
                "the samples are not the first dimension of a variable",
                field=str(name),
                expected=f"dimensions ({dimension!r}, ...)",
                found=variable.dims,
                remedy=f"data.transpose({dimension!r}, ...)",
            )
        else:
            static[str(name)] = variable.to_numpy()
    return columns, static


def _read(name: str, values: Any, attributes: Mapping[str, Any]) -> tuple[Field, Array]:
    """Return the field of an array, and its rows as the field's dtype."""
    array = _array(name, values)
    if isinstance(array, np.ma.MaskedArray):
        return _masked(name, array, attributes)
    if array.ndim == 0:
        raise FormatError("an array has no axis of samples", field=name, expected="at least one axis", found="a scalar")
    if array.dtype.kind == "M":
        return _seconds(name, array, {**attributes, **EPOCH})
    if array.dtype.kind == "m":
        return _seconds(name, array, {**attributes, **SECONDS})
    if array.dtype.kind in "SU":
        texts = np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array
        return Field(name, array.shape[1:], np.dtype(object), attributes=attributes), texts.astype(object)
    if array.dtype.kind in "biufcV":
        dtype = array.dtype.newbyteorder("=")
        return Field(name, array.shape[1:], dtype, attributes=attributes), array.astype(dtype, copy=False)
    return _objects(name, array, attributes)


def _array(name: str, values: Any) -> Array:
    if hasattr(values, "dtype") and hasattr(values, "isna"):  # a column of pandas
        dtype = values.dtype
        if getattr(dtype, "tz", None) is not None:
            return np.asarray(values.dt.tz_convert("UTC").dt.tz_localize(None))
        if getattr(dtype, "kind", "O") in "iu" and not isinstance(dtype, np.dtype) and values.isna().any():
            return np.ma.array(values.fillna(0).to_numpy(f"{dtype.kind}8"), mask=np.asarray(values.isna()))
        if getattr(dtype, "kind", "O") in "bf" and not isinstance(dtype, np.dtype) and values.isna().any():
            return np.asarray(values.to_numpy(np.float64, na_value=np.nan))
        if getattr(dtype, "kind", "O") in "biuf" and not isinstance(dtype, np.dtype):
            return np.asarray(values.to_numpy(dtype.numpy_dtype if hasattr(dtype, "numpy_dtype") else None))
    try:
        return np.asanyarray(values) if isinstance(values, np.ma.MaskedArray) else np.asarray(values)
    except ValueError:  # of different lengths
        rows = np.empty(len(values), object)
        rows[:] = [np.asarray(value) for value in values]
        return rows


def _masked(name: str, array: Any, attributes: Mapping[str, Any]) -> tuple[Field, Array]:
    """Return the field of an array with a mask of missing values."""
    missing, values = np.ma.getmaskarray(array), np.ma.getdata(array)
    if not missing.any() or values.dtype.kind not in "biuf":
        return _read(name, values if not missing.any() else array.astype(object).filled(None), attributes)
    present = values[~missing]
    if values.dtype.kind in "bf" or not len(present) or max(abs(int(present.min())), abs(int(present.max()))) <= EXACT:
        return _read(name, np.where(missing, np.nan, values), attributes)
    limits = np.iinfo(values.dtype)
    unused = next(limit for limit in (limits.min, limits.max, limits.max - 1) if limit not in present)
    return _read(name, np.where(missing, unused, values), {**attributes, MISSING_INTEGER: int(unused)})


def _seconds(name: str, array: Array, attributes: Mapping[str, Any]) -> tuple[Field, Array]:
    unit, count = np.datetime_data(array.dtype)
    if unit in "YM":
        array, (unit, count) = array.astype(f"{array.dtype.kind}8[s]"), ("s", 1)
    tick = float(np.ones(1, f"m8[{count}{unit}]")[0] / np.timedelta64(1, "s"))
    whole = array.astype(np.int64)
    if tick < 1:
        quotient, rest = np.divmod(whole, round(1 / tick))
        seconds: Array = quotient + rest / round(1 / tick)  # a single division would round nanoseconds twice
    else:
        seconds = whole * float(tick)
    seconds[np.isnat(array)] = np.nan
    return Field(name, array.shape[1:], np.dtype(np.float64), attributes=attributes), seconds


def _objects(name: str, array: Array, attributes: Mapping[str, Any]) -> tuple[Field, Array]:
    """Return the field of an array of texts, or of arrays of different lengths."""
    values = array.ravel().tolist()
    if array.ndim == 1 and values and all(isinstance(value, np.ndarray | list | tuple) for value in values):
        rows = [np.asarray(value) for value in values]
        filled = {row.dtype for row in rows if row.size} or {np.dtype(np.float64)}
        dtype = np.result_type(*filled).newbyteorder("=")
        if all(row.ndim == 1 for row in rows) and dtype.kind in "biuf":
            ragged = np.empty(len(rows), object)
            ragged[:] = [row.astype(dtype, copy=False) for row in rows]
            return Field(name, (), dtype, ragged=True, attributes=attributes), ragged
    if values and all(isinstance(value, bool | int | float) or _is_missing(value) for value in values):
        if {type(value) for value in values if not _is_missing(value)} == {int}:
            whole = np.array([0 if _is_missing(value) else value for value in values])
            masked = np.ma.array(whole, mask=[_is_missing(value) for value in values])
            return _masked(name, masked.reshape(array.shape), attributes)
        numbers = np.array([np.nan if _is_missing(value) else value for value in values])
        return Field(name, array.shape[1:], numbers.dtype, attributes=attributes), numbers.reshape(array.shape)
    texts = np.empty(len(values), object)
    for i, value in enumerate(values):
        if isinstance(value, str | bytes):
            texts[i] = value.encode() if isinstance(value, str) else value
        elif _is_missing(value):
            texts[i] = b""
        else:
            raise FormatError(
                "an array holds Python objects",
                field=name,
                row=i,
                expected="numbers, texts, times, or lists of numbers",
                found=f"{type(value).__name__}: {value!r:.60}",
                remedy="convert it to an array of one dtype",
            )
    return Field(name, array.shape[1:], np.dtype(object), attributes=attributes), texts.reshape(array.shape)


def _is_missing(value: object) -> bool:
    """Return whether a value is None, NaN, or ``pandas.NA``, which equals nothing."""
    return value is None or type(value).__name__ == "NAType" or (isinstance(value, float) and value != value)


def _described(data: Any) -> str:
    return f"{type(data).__name__} of {len(data)} items"
