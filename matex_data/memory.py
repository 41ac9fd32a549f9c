"""Arrays in memory as a data set: dicts of arrays, pandas' data frames, xarray's data sets."""

from __future__ import annotations

import hashlib
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, date
from itertools import chain
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np

from matex_data._types import Array
from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches
from matex_data.fields import EPOCH, EXACT, MISSING_INTEGER, Field, expand_names, matching
from matex_data.index.combined import exact, in_row
from matex_data.index.library import MemoryRows
from matex_data.index.model import FileIndex, Index
from matex_data.warning import warn

NAME = "memory"  # in place of the path of a file
SECONDS = {"units": "seconds"}
BESIDE_FRACTIONS = "integers up to 2**53 beside fractions"
DIGESTED = 1024  # rows at a time
BLANKS: dict[str, Any] = {
    "S": b"",
    "U": "",
    "M": np.datetime64("NaT"),
    "m": np.timedelta64("NaT"),
    "O": None,
}  # by kind of dtype
EXAMPLE = '{"image": images, "label": labels}'


def is_in_memory(data: Any) -> bool:
    """Return whether an argument of ``open_dataset`` is arrays, and no paths."""
    return isinstance(data, Mapping) or _is_of(data, "pandas", "DataFrame") or _is_of(data, "xarray", "Dataset")


class HeldArrays(NamedTuple):
    """Arrays in memory.

    Parameters
    ----------
    arrays : index of those that are fields.
    refused : the reasons why others are none, by name.
    """

    arrays: Index
    refused: Mapping[str, DataError]


def index_arrays(data: Any, sample_dim: str | None = None, wanted: Sequence[str] = ()) -> HeldArrays:
    """Return the index of arrays in memory, which it does not copy.

    Numbers keep their dtype; nullable and masked ones become float64, in which missing values are NaN. Integers that
    float64 cannot hold stay integers, of which one (`MISSING_INTEGER`) stands for missing values. Texts are UTF-8
    bytes, empty if they are missing. Times are float64 seconds since 1970-01-01, durations float64 seconds, NaN if they
    are missing. A sequence of arrays of different lengths is a ragged field.

    Parameters
    ----------
    data : dict of arrays whose first axis is that of the samples; ``pandas.DataFrame``, with the levels of its index
        that have names; ``xarray.Dataset``, of which the dimension of the samples may be any axis.
    sample_dim : dimension of the samples, of an ``xarray.Dataset``. None: the one whose coordinate is a time, else the
        first one of its first variable.
    wanted : names or patterns of the variables that decide it; none: all.

    Raises
    ------
    FormatError : there are no arrays; the lengths differ; two arrays have one name.

    Examples
    --------
    >>> index, _ = index_arrays({"x": np.zeros((10, 3)), "y": np.arange(10)})
    >>> len(index), index.fields["x"].shape
    (10, (3,))
    """
    is_xarray = _is_of(data, "xarray", "Dataset")
    names = [str(name) for name in (data.variables if is_xarray else data)]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise FormatError(
            "two arrays have one name", field=twice[0], expected="different names, also as text", remedy="rename one"
        )
    if is_xarray:
        columns, static = _variables(data, _sample_dimension(data, wanted) if sample_dim is None else sample_dim)
    elif sample_dim is not None:
        raise FormatError("sample_dim= is for xarray's data sets", expected="no sample_dim=", found=repr(sample_dim))
    else:
        columns, static = {str(name): (value, {}) for name, value in data.items()}, {}
        if _is_of(data, "pandas", "DataFrame"):
            columns = _levels(data, columns) | columns
    if not columns:
        raise FormatError(
            "there are no arrays of samples", expected=EXAMPLE, found=f"{type(data).__name__} of {len(data)} items"
        )
    read, refused = list[tuple[Field, Array]](), dict[str, DataError]()
    for name, (values, attributes) in columns.items():
        try:
            read.append(_read(name, values, attributes))
        except DataError as error:
            refused[name] = error
    if not read:
        raise next(iter(refused.values()))
    lengths = {field.name: len(array) for field, array in read}
    if len(set(lengths.values())) > 1:
        raise FormatError(
            "the arrays have different numbers of samples",
            expected="equal lengths of the first axis",
            found=", ".join(f"{name!r}: {length}" for name, length in list(lengths.items())[:8]),
            remedy="give one value of each array for each sample; others stay outside of the data set",
        )
    rows = next(iter(lengths.values()))
    layouts = {field.name: MemoryRows(array) for field, array in read}
    return HeldArrays(
        Index({field.name: field for field, _ in read}, [FileIndex(NAME, rows, layouts)], static), refused
    )


def select(held: HeldArrays, names: Sequence[str] | None, static: bool = False) -> Index:
    """Return the index with the named fields, and those of the patterns; None: all.

    Parameters
    ----------
    held : arrays in memory.
    names : of fields, or patterns.
    static : names may be of arrays that belong to no sample, which stay what they are.

    Raises
    ------
    FieldNotFound : there is no such array.
    FormatError : an array has no axis of samples, holds Python objects, or integers of more than 64 bits.
    DecodeError : float64 cannot hold an integer that is beside fractions.
    """
    index, known = held.arrays, [*held.arrays.fields, *held.refused]
    wanted = known if names is None else [name for name in names if not (static and name in index.static)]
    chosen = expand_names(wanted, known)
    for name in chosen:
        if name in held.refused:
            raise held.refused[name]
        if name not in index.fields:
            raise FieldNotFound(
                "there is no such array",
                field=name,
                expected=f"one of {near_matches(name, known)}",
                remedy="correct the name, or give the array beside the others",
            )
    return index if names is None else index.select(chosen)


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
    kind = getattr(sys.modules.get(package), name, None)  # None as well while another thread imports the package
    return kind is not None and isinstance(data, kind)


def _levels(frame: Any, columns: Collection[str]) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the levels of a frame's index that have names of their own, which its Parquet file has as columns."""
    levels: dict[str, tuple[Any, dict[str, Any]]] = {}
    for number, name in enumerate(frame.index.names):
        if name is not None and str(name) not in {*columns, *levels}:
            values = frame.index.get_level_values(number)
            try:
                _read(str(name), values, {})
            except DataError as error:
                warn(f"the index {name!r} is left out: {error}")
            else:
                levels[str(name)] = values, {}
    return levels


def _variables(data: Any, dimension: str) -> tuple[dict[str, tuple[Any, dict[str, Any]]], dict[str, Array]]:
    """Return the variables that have the dimension of the samples, as first axis, with attributes, and all others."""
    if dimension not in data.dims:
        expected = f"sample_dim= of {[str(name) for name in data.dims]}"
        raise FormatError(
            "there is no such dimension",
            expected=expected,
            found=repr(dimension),
            remedy="name the dimension along which the samples lie",
        )
    columns: dict[str, tuple[Any, dict[str, Any]]] = {}
    static: dict[str, Array] = {}
    for name, variable in data.variables.items():
        if dimension in variable.dims:
            columns[str(name)] = variable.transpose(dimension, ...).to_numpy(), dict(variable.attrs)
        else:
            static[str(name)] = variable.to_numpy()
    return columns, static


def _sample_dimension(data: Any, wanted: Sequence[str]) -> Any:
    """Return the one dimension whose coordinate is a time, as in files; else the first one of the first variable."""
    names = {str(name): name for name in data.data_vars}
    chosen = [names[name] for pattern in wanted for name in matching(pattern, names)]
    dims = [data[name].dims for name in chosen or data.data_vars if data[name].dims]
    times = [name for name in dict.fromkeys(chain(*dims)) if _is_time(data.indexes.get(name))]
    return times[0] if len(times) == 1 else next((names[0] for names in dims), None)


def _is_time(index: Any) -> bool:
    """Return whether an index of pandas has times, in any calendar."""
    return type(index).__name__ in ("DatetimeIndex", "CFTimeIndex")


def _read(name: str, values: Any, attributes: Mapping[str, Any]) -> tuple[Field, Array]:
    """Return the field of an array, and its rows as the field's dtype."""
    array = _array(values)
    if isinstance(array, np.ma.MaskedArray):
        return _masked(name, array, attributes)
    if array.ndim == 0:
        raise FormatError(
            "an array has no axis of samples",
            field=name,
            expected="at least one axis",
            found="a scalar",
            remedy="give a value for each sample, such as np.full(samples, value)",
        )
    if array.dtype.kind == "M":
        return _seconds(name, array, {**attributes, "units": EPOCH})
    if array.dtype.kind == "m":
        return _seconds(name, array, {**attributes, **SECONDS})
    if array.dtype.kind in "SU":
        texts = np.char.encode(array, "utf-8", "surrogateescape") if array.dtype.kind == "U" else array
        return Field(name, array.shape[1:], np.dtype(object), attributes=attributes), texts.astype(object)
    if array.dtype.kind in "biufcV":
        dtype = array.dtype.newbyteorder("=")
        return Field(name, array.shape[1:], dtype, attributes=attributes), array.astype(dtype, copy=False)
    return _objects(name, array, attributes)


def _array(values: Any) -> Array:
    """Return an array, masked where integers are missing; of Python objects where a dtype would round integers."""
    dtype: Any = getattr(values, "dtype", None)
    if hasattr(values, "isna") and not isinstance(dtype, np.dtype):  # a column of pandas, of one of its own types
        kind, missing = dtype.kind, np.asarray(values.isna())
        if getattr(dtype, "tz", None) is not None:
            return np.asarray(values.to_numpy(f"M8[{dtype.unit}]"))
        if kind in "iu" and missing.any():
            return np.ma.array(values.fillna(0).to_numpy(f"{kind}8"), mask=missing)
        if kind in "bf" and missing.any():
            return np.asarray(values.to_numpy(np.float64, na_value=np.nan))
        if kind in "biuf":
            return np.asarray(values.to_numpy(getattr(dtype, "numpy_dtype", None)))
        if hasattr(dtype, "pyarrow_dtype"):
            return np.asarray(getattr(values, "array", values).__arrow_array__())
        return np.asarray(values.astype(object))  # categories: an array of their dtype would round integers
    if isinstance(values, np.ma.MaskedArray):
        return values
    try:
        array = np.asarray(values)
    except ValueError:  # of different lengths
        return np.fromiter(values, object, len(values))
    if not isinstance(values, list | tuple):
        return array
    objects = np.array(values, object)
    is_rounded = array.dtype.kind == "f" and bool((np.abs(array) >= EXACT).any())
    lacks_texts = array.dtype.kind in "SU" and any(map(_is_missing, objects.ravel().tolist()))  # NaN is no text "nan"
    return objects if is_rounded or lacks_texts else array


def _masked(name: str, array: Any, attributes: Mapping[str, Any]) -> tuple[Field, Array]:
    """Return the field of an array with a mask of missing values."""
    mask, values = np.ma.getmaskarray(array), np.ma.getdata(array)
    missing = mask != np.zeros((), mask.dtype)  # which has fields if the values have
    if not missing.any():
        return _read(name, values, attributes)
    if values.dtype.names:
        values = values.astype(object)  # which is refused: records cannot be missing
    if values.dtype.kind in BLANKS:
        return _read(name, np.where(missing, BLANKS[values.dtype.kind], values), attributes)
    present = values[~missing]
    if values.dtype.kind in "bfc" or (present.min(initial=0) >= -EXACT and present.max(initial=0) <= EXACT):
        return _read(name, np.where(missing, np.nan, values), attributes)
    limits = np.iinfo(values.dtype)
    unused = next(number for number in chain([limits.min], range(limits.max, 0, -1)) if number not in present)
    return _read(name, np.where(missing, values.dtype.type(unused), values), {**attributes, MISSING_INTEGER: unused})


def _seconds(name: str, array: Array, attributes: Mapping[str, Any]) -> tuple[Field, Array]:
    unit, _ = np.datetime_data(array.dtype)
    unit = "s" if unit in ("Y", "M", "generic") else unit
    whole = array.astype(f"{array.dtype.kind}8[{unit}]").astype(np.int64)  # of single units, not of three each
    tick = np.ones(1, f"m8[{unit}]")[0]
    of_second = np.timedelta64(1, "s") / tick
    if of_second > 1:
        quotient, rest = np.divmod(whole, round(of_second))
        seconds: Array = quotient + rest / round(of_second)  # a single division would round nanoseconds twice
    else:
        seconds = whole * float(tick / np.timedelta64(1, "s"))
    seconds[np.isnat(array)] = np.nan
    return Field(name, array.shape[1:], np.dtype(np.float64), attributes=attributes), seconds


def _objects(name: str, array: Array, attributes: Mapping[str, Any]) -> tuple[Field, Array]:
    """Return the field of an array of texts, numbers, times, or arrays of different lengths."""
    values = array.ravel().tolist()
    if array.ndim == 1 and values and all(isinstance(value, np.ndarray | list | tuple) for value in values):
        rows = [_array(value) for value in values]
        filled = {row.dtype for row in rows if row.size} or {np.dtype(np.float64)}
        dtype = np.result_type(*filled).newbyteorder("=")
        if all(row.ndim == 1 for row in rows) and dtype.kind in "biuf":
            field = Field(name, (), dtype, ragged=True, attributes=attributes)
            ragged = (exact(row, field, BESIDE_FRACTIONS, in_row(i)) for i, row in enumerate(rows))
            return field, np.fromiter(ragged, object, len(rows))
    present = [value for value in values if not _is_missing(value)]
    if all(isinstance(value, Integral | float | np.floating | np.bool_) for value in present) and values:
        return _numbers(name, values, array.shape, attributes)
    if present and all(isinstance(value, date) for value in present):
        return _seconds(name, _times(values).reshape(array.shape), {**attributes, "units": EPOCH})
    texts = np.empty(len(values), object)
    for i, value in enumerate(values):
        if isinstance(value, str | bytes):
            texts[i] = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
        elif _is_missing(value):
            texts[i] = b""
        else:
            raise FormatError(
                "an array holds Python objects",
                field=name,
                row=i * len(array) // len(values),
                expected="numbers, texts, times, or lists of numbers",
                found=f"{type(value).__name__}: {value!r:.60}",
                remedy="convert it to an array of one dtype",
            )
    return Field(name, array.shape[1:], np.dtype(object), attributes=attributes), texts.reshape(array.shape)


def _numbers(
    name: str, values: Sequence[Any], shape: tuple[int, ...], attributes: Mapping[str, Any]
) -> tuple[Field, Array]:
    """Return the field of numbers that are Python objects, of which some may be missing."""
    integers = [int(value) if isinstance(value, Integral) else 0 for value in values]
    try:
        whole = np.array(integers, np.int64 if max(integers) < 1 << 63 else np.uint64)
    except OverflowError as error:
        at = max(range(len(values)), key=lambda at: abs(integers[at]))
        raise FormatError(
            "no dtype holds all integers of an array",
            field=name,
            row=at * shape[0] // len(values),
            expected="integers of int64, or of uint64",
            found=integers[at],
            remedy="leave it out, or write the numbers as text",
        ) from error
    missing = np.array([_is_missing(value) for value in values])
    is_whole = np.array([isinstance(value, Integral) and not isinstance(value, bool) for value in values])
    if (is_whole | missing).all() and is_whole.any():
        return _masked(name, np.ma.array(whole.reshape(shape), mask=missing.reshape(shape)), attributes)
    numbers = np.array([np.nan if lacks else value for value, lacks in zip(values, missing.tolist(), strict=True)])
    field = Field(name, shape[1:], numbers.dtype, attributes=attributes)
    exact(whole.reshape(shape), field, BESIDE_FRACTIONS, int)
    return field, numbers.reshape(shape)


def _times(values: Sequence[Any]) -> Array:
    """Return times and dates of Python and pandas, of which some may be missing, as datetime64, in UTC."""
    times = [np.datetime64("NaT") if _is_missing(value) else _as_utc(value) for value in values]
    fine, coarse = np.array(times), np.array(times, "M8[us]")
    overflows = (fine.astype(coarse.dtype) != coarse) & ~np.isnat(coarse)  # beyond the 292 years of nanoseconds
    return coarse if overflows.any() else fine


def _as_utc(time: Any) -> np.datetime64:
    if hasattr(time, "to_datetime64"):  # of pandas, with nanoseconds
        return time.to_datetime64()  # type: ignore[no-any-return]
    return np.datetime64(time if getattr(time, "tzinfo", None) is None else time.astimezone(UTC).replace(tzinfo=None))


def _is_missing(value: object) -> bool:
    """Return whether a value is None, NaN, or ``pandas.NA`` or ``NaT``."""
    is_nan = isinstance(value, float | np.floating) and value != value
    return value is None or is_nan or type(value).__name__ in ("NAType", "NaTType")
