"""What stored numbers mean by the CF conventions: packed, unsigned, missing, times.

https://cfconventions.org/cf-conventions/cf-conventions.html, sections 2.5.1 (missing data), 4.4 (time) and 8.1 (packed
data). The dtypes are those that xarray gives. ``_Unsigned`` and the valid range are conventions of netCDF itself:
https://docs.unidata.ucar.edu/netcdf-c/current/attribute_conventions.html.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.index.scatter import CONVERT_ITEMS
from matex_data.readers.netcdf.times import TimeOrigin, epoch_of

USED_UP = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")
"""Attributes that say how the numbers are stored, and nothing about the decoded ones."""


@dataclass(frozen=True)
class Decoding:
    """Makes decoded numbers of stored ones: ``stored * scale + offset``, or not-a-number where they are missing.

    Parameters
    ----------
    dtype : of the decoded numbers.
    stored_kind : "i" or "u": the stored integers are signed or unsigned, whatever their dtype says; "": as it says.
    missing : stored values that mark missing numbers, as ``dtype``.
    low, high : stored values below and above are missing.
    scale, offset : numbers, or None.
    """

    dtype: np.dtype[Any]
    stored_kind: str = ""
    missing: tuple[Any, ...] = ()
    low: Any = None
    high: Any = None
    scale: Any = None
    offset: Any = None

    def __call__(self, rows: Array, out: Array) -> None:
        with np.errstate(over="ignore"):  # numbers that the chosen dtype does not have become infinite, as in xarray
            for stored, decoded in _pieces(rows, out):
                self._decode(stored, decoded)

    def _decode(self, stored: Array, out: Array) -> None:
        if self.stored_kind:
            stored = stored.view(f"{stored.dtype.byteorder}{self.stored_kind}{stored.itemsize}")
        np.copyto(out, stored, casting="unsafe")
        lost = self._lost(out)
        if self.scale is not None:
            np.multiply(out, self.scale, out=out, casting="same_kind")
        if self.offset is not None:
            np.add(out, self.offset, out=out, casting="same_kind")
        if lost is not None and lost.any():
            np.copyto(out, np.nan, where=lost)

    def _lost(self, numbers: Array) -> Array | None:
        lost: Array | None = None
        for value in self.missing:
            lost = _either(lost, numbers == value)
        if self.low is not None:
            lost = _either(lost, numbers < self.low)
        if self.high is not None:
            lost = _either(lost, numbers > self.high)
        return lost

    def decoded(self, stored: Array) -> Array:
        """All of an array at once."""
        out = np.empty(stored.shape, self.dtype)
        self(stored.reshape(-1), out.reshape(-1))
        return out


def _either(a: Array | None, b: Array) -> Array:
    return b if a is None else np.logical_or(a, b, out=a)


def _pieces(rows: Array, out: Array) -> Iterator[tuple[Array, Array]]:
    """Parts of both arrays that fit into the processor's cache."""
    if rows.size <= CONVERT_ITEMS:
        yield rows, out
    elif rows.flags.c_contiguous and out.flags.c_contiguous:
        stored, decoded = rows.reshape(-1), out.reshape(-1)
        for i in range(0, len(stored), CONVERT_ITEMS):
            yield stored[i : i + CONVERT_ITEMS], decoded[i : i + CONVERT_ITEMS]
    elif len(rows) == 1:
        yield from _pieces(rows[0], out[0])
    else:
        step = max(1, CONVERT_ITEMS * len(rows) // rows.size)
        for i in range(0, len(rows), step):
            yield from _pieces(rows[i : i + step], out[i : i + step])


@dataclass(frozen=True)
class Meaning:
    """What a variable holds once decoded; ``decoding`` is None where that is what is stored."""

    dtype: np.dtype[Any]
    decoding: Decoding | None
    attributes: Mapping[str, Any]

    def of(self, stored: Array) -> Array:
        """Stored numbers decoded; letters along the last axis made texts."""
        if self.decoding is not None:
            return self.decoding.decoded(stored)
        if stored.dtype.kind == "S" and self.dtype.itemsize > stored.dtype.itemsize:
            return np.ascontiguousarray(stored).view(self.dtype)[..., 0]
        return stored.astype(self.dtype, copy=False)


def meaning(
    dtype: np.dtype[Any],
    attributes: Mapping[str, Any],
    path: str,
    name: str,
    valid_range: bool | None = None,
    decode_times: bool = True,
    mask_and_scale: bool = True,
) -> Meaning:
    """How to decode a variable.

    Parameters
    ----------
    dtype : as stored.
    attributes : of the variable.
    path, name : for errors.
    valid_range : whether values out of the valid range are missing. None: if they become floats anyway, and if the
        variable names no value for missing ones.
    decode_times : make seconds of times.
    mask_and_scale : heed the attributes ``USED_UP`` and the valid range.

    Raises
    ------
    FormatError : ``scale_factor`` or ``add_offset`` is no number.
    """
    native = np.dtype(dtype.newbyteorder("=").str)  # without what h5py notes on a dtype
    if dtype.kind not in "iuf":
        return Meaning(native, None, attributes)
    packing, used_up = (attributes, USED_UP) if mask_and_scale else ({}, ())
    kind = _stored_kind(dtype, packing)
    numbers = np.dtype(f"{kind or dtype.kind}{dtype.itemsize}")
    scale, offset = (_number(packing, key, path, name) for key in ("scale_factor", "add_offset"))
    marks, marked = _marks(numbers, packing)
    result = _result(numbers, scale, offset, marked, bool(marks))
    ranged = valid_range is True or (valid_range is None and result.kind == "f" and not marked)
    low, high = _bounds(numbers, packing) if ranged else (None, None)
    if (low, high) != (None, None) and result.kind != "f":
        result = _promoted(numbers)
    missing = tuple(dict.fromkeys(_cast(value, result) for value in marks if _fits(value, result)))
    decoding = Decoding(result, kind, missing, low, high, scale, offset)
    epoch = epoch_of(attributes.get("units"), attributes.get("calendar")) if decode_times else None
    if epoch is not None:
        return Meaning(np.dtype(np.float64), _in_seconds(decoding, epoch), epoch.attributes(attributes, used_up))
    if attributes.get("dtype") == "bool" and result == numbers:
        return Meaning(np.dtype(bool), replace(decoding, dtype=np.dtype(bool)), attributes)
    left = {key: value for key, value in attributes.items() if key not in used_up}
    return Meaning(result, None if decoding == Decoding(native) else decoding, left)


def _stored_kind(dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> str:
    said = str(attributes.get("_Unsigned", "")).lower()
    if dtype.kind == "i" and said == "true":
        return "u"
    return "i" if dtype.kind == "u" and said == "false" else ""


def _number(attributes: Mapping[str, Any], key: str, path: str, name: str) -> Any:
    """The attribute as a NumPy number, None if there is none; a number that was written as text is one, too."""
    value = attributes.get(key)
    if value is None:
        return None
    try:
        found = np.asarray(float(value) if isinstance(value, str | bytes) else value)
        if found.size == 1 and found.dtype.kind in "iuf":
            return found.reshape(-1)[0]
    except ValueError:
        pass  # a text that is no number: told below
    raise FormatError(
        f"the attribute {key!r} is no number",
        file=path,
        field=name,
        expected="one number",
        found=repr(value),
        remedy="correct the attribute, or read the stored numbers with mask_and_scale=False",
    )


def _marks(dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """Values that mark missing numbers, and whether the variable has an attribute that names some.

    Not-a-number marks itself. It says nothing about integers.
    """
    marks: list[Any] = []
    marked = False
    for key in ("missing_value", "_FillValue"):
        if key not in attributes:
            continue
        values = [value for value in np.ravel(attributes[key]).tolist() if value == value]
        marked = marked or bool(values) or dtype.kind == "f"
        marks += [_as_unsigned(value, dtype) for value in values]
    return marks, marked


def _as_unsigned(value: Any, dtype: np.dtype[Any]) -> Any:
    """A mark that was written with the other sign than the numbers have."""
    if dtype.kind not in "iu" or not isinstance(value, int | np.integer):
        return value
    limits, number = np.iinfo(dtype), int(value)
    span = 1 << 8 * dtype.itemsize
    if dtype.kind == "u" and -(span // 2) <= number < 0:
        return number + span
    return number - span if dtype.kind == "i" and limits.max < number < span else number


def _fits(value: Any, dtype: np.dtype[Any]) -> bool:
    """Whether it is a number, and not one that would become infinite in that dtype."""
    number = isinstance(value, int | float)
    return number and (dtype.kind != "f" or bool(np.isinf(_cast(value, dtype))) == bool(np.isinf(value)))


def _cast(value: Any, dtype: np.dtype[Any]) -> Any:
    with np.errstate(over="ignore"):
        return dtype.type(value)


def _result(dtype: np.dtype[Any], scale: Any, offset: Any, marked: bool, some: bool) -> np.dtype[Any]:
    """The dtype of the decoded numbers, as xarray chooses it.

    Parameters
    ----------
    dtype : of the stored numbers.
    scale, offset : numbers or None.
    marked, some : whether attributes mark missing numbers, and whether they name any but not-a-number.
    """
    if scale is None and offset is None:
        return _promoted(dtype) if some else dtype
    if marked and not some and dtype.kind == "f":
        return dtype
    if offset is not None:
        alike = scale is not None and scale.dtype == offset.dtype and scale.dtype.kind == "f"
        wide = dtype.itemsize == 4 and dtype.kind in "iu"
        return np.dtype(str(scale.dtype) if alike and not wide else "float64")
    if scale.dtype.kind == "f":
        return np.dtype(str(scale.dtype))
    return _scaled_integer(dtype, scale, some)


def _scaled_integer(dtype: np.dtype[Any], scale: Any, some: bool) -> np.dtype[Any]:
    """xarray computes in the dtype of an integer scale, which may be too narrow: then floats."""
    if some or dtype.kind == "f":
        return np.dtype(np.float64)
    limits, room = np.iinfo(dtype), np.iinfo(scale.dtype)
    ends = [int(limits.min) * int(scale), int(limits.max) * int(scale)]
    return np.dtype(scale.dtype) if room.min <= min(ends) and max(ends) <= room.max else np.dtype(np.float64)


def _promoted(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The float that can say that a number is missing."""
    if dtype.kind == "f":
        return dtype
    return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)


def _bounds(dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> tuple[Any, Any]:
    """Lowest and highest valid stored value, or None.

    An attribute that is no number, or not of the variable's own kind, does not count: whether it would be about the
    stored or the decoded numbers is not said.
    """
    both = np.ravel(attributes.get("valid_range", []))
    low, high = both if len(both) == 2 else (attributes.get("valid_min"), attributes.get("valid_max"))
    return _bound(low, dtype), _bound(high, dtype)


def _bound(value: Any, dtype: np.dtype[Any]) -> Any:
    found = np.ravel(value) if value is not None else np.empty(0)
    integers = dtype.kind in "iu"
    if len(found) != 1 or found.dtype.kind not in ("iu" if integers else "iuf"):
        return None
    return _as_unsigned(found[0], dtype)


def _in_seconds(decoding: Decoding, epoch: TimeOrigin) -> Decoding:
    """The same numbers as float64 seconds since the epoch."""
    scale = np.float64(1 if decoding.scale is None else decoding.scale)
    offset = np.float64(0 if decoding.offset is None else decoding.offset)
    return replace(
        decoding,
        dtype=np.dtype(np.float64),
        missing=tuple(np.float64(value) for value in decoding.missing),
        scale=scale * epoch.unit,
        offset=offset * epoch.unit + epoch.start,
    )
