"""Decoding of stored numbers by the CF conventions: packed, unsigned and missing numbers, and times.

https://cfconventions.org/cf-conventions/cf-conventions.html, sections 2.5.1 (missing data), 4.4 (time) and 8.1 (packed
data). The dtypes are those of xarray. ``_Unsigned`` and the valid range are conventions of netCDF itself:
https://docs.unidata.ucar.edu/netcdf-c/current/attribute_conventions.html.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import cftime
import numpy as np

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.fields import EPOCH
from matex_data.readers.decoding import Decoding, Narrowed

PACKING_ATTRIBUTES = ("scale_factor", "add_offset", "_FillValue", "missing_value", "_Unsigned")
"""Attributes that describe the storage of the numbers, and do not apply to the decoded ones."""

ORIGIN = "1970-01-01T00:00:00"
GREGORIAN = -12219292800
"""15 October 1582 in seconds since ``ORIGIN``: before it, dates of the standard calendar are Julian."""
UNIT_SECONDS = {
    "nanosecond": 1e-9, "nanosec": 1e-9, "nsec": 1e-9, "ns": 1e-9,
    "microsecond": 1e-6, "microsec": 1e-6, "us": 1e-6,
    "millisecond": 1e-3, "millisec": 1e-3, "msec": 1e-3, "ms": 1e-3,
    "second": 1.0, "sec": 1.0, "s": 1.0,
    "minute": 60.0, "min": 60.0,
    "hour": 3600.0, "hr": 3600.0, "h": 3600.0,
    "day": 86400.0, "d": 86400.0,
    "week": 604800.0,
}  # fmt: skip
"""Length of each unit of time; a plural s may follow. Months and years have no fixed length."""
NAT = np.iinfo(np.int64).min
"""Missing time or duration of NumPy, which xarray writes as it is, without an attribute."""
MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
CALENDAR_DAYS = {"360_day": {"month": 30, "year": 360}, "365_day": {"year": 365}, "366_day": {"year": 366}}
"""Length in days of the units that some calendars fix."""


@dataclass(frozen=True)
class CfDecoding:
    """Decoding of one variable.

    Parameters
    ----------
    dtype : of the decoded values.
    convert : conversion of the stored numbers; None: the decoded values are the stored ones.
    attributes : of the decoded values.
    letters : the stored values are letters, and ``dtype`` is that of the texts along their last axis.
    """

    dtype: np.dtype[Any]
    convert: Decoding | Narrowed | None
    attributes: Mapping[str, Any]
    letters: bool = False

    def narrowed(self) -> CfDecoding:
        """Return the decoding to floats of 32 bits; of anything but floats of 64 bits, and of times, unchanged."""
        if self.dtype != np.float64 or self.attributes.get("origin") == ORIGIN or isinstance(self.convert, Narrowed):
            return self
        wide = self.convert or Decoding(self.dtype)
        return replace(self, dtype=np.dtype(np.float32), convert=Narrowed(wide))

    def decode(self, stored: Array) -> Array:
        """Return the decoded values."""
        if self.convert is not None:
            return self.convert.decode(stored)
        if self.letters:
            return np.ascontiguousarray(stored).view(self.dtype)[..., 0]
        return stored.astype(self.dtype, copy=False)


def cf_decoding(
    dtype: np.dtype[Any],
    attributes: Mapping[str, Any],
    path: str,
    name: str,
    valid_range: bool | None = None,
    decode_times: bool = True,
    mask_and_scale: bool = True,
) -> CfDecoding:
    """Return the decoding of a variable.

    Parameters
    ----------
    dtype : of the stored values.
    attributes : of the variable.
    valid_range : whether values outside of the valid range are missing. None: only of variables that become floats and
        have no attribute for missing values.
    decode_times : convert times to seconds since ``ORIGIN``.
    mask_and_scale : apply the attributes `PACKING_ATTRIBUTES` and the valid range.

    Raises
    ------
    FormatError : ``scale_factor`` or ``add_offset`` is no number.
    """
    native = np.dtype(dtype.newbyteorder("=").str)  # without the metadata that h5py adds to a dtype
    if dtype.kind not in "iuf":
        return CfDecoding(native, None, attributes)
    packing, dropped = (attributes, PACKING_ATTRIBUTES) if mask_and_scale else ({}, ())
    kind = _stored_kind(dtype, packing)
    numbers = np.dtype(f"{kind or dtype.kind}{dtype.itemsize}")
    scale, offset = (_number(packing, key, path, name) for key in ("scale_factor", "add_offset"))
    missing_values, has_attribute = _missing_values(numbers, packing, bool(kind))
    result = _decoded_dtype(numbers, scale, offset, has_attribute, bool(missing_values))
    ranged = valid_range is True or (valid_range is None and result.kind == "f" and not has_attribute)
    low, high = _bounds(numbers, packing, bool(kind)) if ranged else (None, None)
    if (low, high) != (None, None) and result.kind != "f":
        result = _promoted(numbers)
    missing = tuple(dict.fromkeys(_cast(value, result) for value in missing_values if _is_castable(value, result)))
    convert = Decoding(result, kind, missing, low, high, scale, offset)
    origin = time_origin(attributes.get("units"), attributes.get("calendar")) if decode_times else None
    if origin is not None:
        if numbers == np.int64:
            convert = replace(convert, missing=tuple(dict.fromkeys((*convert.missing, NAT))))
        return CfDecoding(np.dtype(np.float64), _to_seconds(convert, origin), origin.attributes(attributes, dropped))
    if attributes.get("dtype") == "bool" and result == numbers:
        return CfDecoding(np.dtype(bool), replace(convert, dtype=np.dtype(bool)), attributes)
    kept = {key: value for key, value in attributes.items() if key not in dropped}
    return CfDecoding(result, None if convert == Decoding(native) else convert, kept)


def _stored_kind(dtype: np.dtype[Any], attributes: Mapping[str, Any]) -> str:
    unsigned = str(attributes.get("_Unsigned", "")).lower()
    if dtype.kind == "i" and unsigned == "true":
        return "u"
    return "i" if dtype.kind == "u" and unsigned == "false" else ""


def _number(attributes: Mapping[str, Any], key: str, path: str, name: str) -> Any:
    """Return the attribute as a NumPy number, also if it is a text with a number; None if it is not there."""
    value = attributes.get(key)
    if value is None:
        return None
    try:
        number = np.asarray(float(value) if isinstance(value, str | bytes) else value)
        if number.size == 1 and number.dtype.kind in "iuf":
            return number.reshape(-1)[0]
    except ValueError:
        pass  # a text that is no number: the error follows
    raise FormatError(
        f"the attribute {key!r} is no number",
        file=path,
        field=name,
        expected="one number",
        found=repr(value),
        remedy="correct the attribute, or read the stored numbers with mask_and_scale=False",
    )


def _missing_values(dtype: np.dtype[Any], attributes: Mapping[str, Any], other_sign: bool) -> tuple[list[Any], bool]:
    """Return the values that stand for missing numbers, and whether the variable has an attribute for them.

    NaN needs no entry among floats, and cannot occur among integers. ``other_sign``: as of `_with_sign_of`.
    """
    is_duration = str(attributes.get("dtype", "")).startswith("timedelta64")  # an attribute of xarray
    found: list[Any] = [NAT] if is_duration and dtype == np.int64 else []
    has_attribute = bool(found)
    for key in ("missing_value", "_FillValue"):
        if key not in attributes:
            continue
        values = [value for value in _with_sign_of(np.ravel(attributes[key]), dtype, other_sign) if value == value]
        has_attribute = has_attribute or bool(values) or dtype.kind == "f"
        found += values
    return found, has_attribute


def _with_sign_of(values: Array, dtype: np.dtype[Any], other_sign: bool) -> list[Any]:
    """Return the numbers of an attribute, integers of the other signedness as those of ``dtype`` with the same bits.

    Parameters
    ----------
    values : of the attribute.
    dtype : of the numbers.
    other_sign : ``_Unsigned`` has changed the signedness. Otherwise only integers of the size of ``dtype`` have its
        bits: 255 of 32 bits is no number of 8 bits with a sign.
    """
    numbers: list[Any] = values.tolist()
    if not {dtype.kind, values.dtype.kind} <= set("iu") or not (other_sign or values.dtype.itemsize == dtype.itemsize):
        return numbers
    limits, span = np.iinfo(dtype), 1 << 8 * dtype.itemsize
    inside = range(limits.min, limits.max + 1)
    return [n if n in inside or not -span // 2 <= n < span else n + span if n < 0 else n - span for n in numbers]


def _is_castable(value: Any, dtype: np.dtype[Any]) -> bool:
    """Return whether the value is a number that does not become infinite in that dtype."""
    number = isinstance(value, int | float)
    return number and (dtype.kind != "f" or bool(np.isinf(_cast(value, dtype))) == bool(np.isinf(value)))


def _cast(value: Any, dtype: np.dtype[Any]) -> Any:
    with np.errstate(over="ignore"):
        return dtype.type(value)


def _decoded_dtype(
    dtype: np.dtype[Any], scale: Any, offset: Any, has_attribute: bool, has_values: bool
) -> np.dtype[Any]:
    """Return the dtype of the decoded numbers, as xarray chooses it.

    Parameters
    ----------
    dtype : of the stored numbers.
    scale, offset : numbers or None.
    has_attribute, has_values : whether there is an attribute for missing values, and whether one of them is not NaN.
    """
    if scale is None and offset is None:
        return _promoted(dtype) if has_values else dtype
    if has_attribute and not has_values and dtype.kind == "f":
        return dtype
    if offset is not None:
        same_float = scale is not None and scale.dtype == offset.dtype and scale.dtype.kind == "f"
        wide = dtype.itemsize == 4 and dtype.kind in "iu"
        return np.dtype(str(scale.dtype) if same_float and not wide else "float64")
    if scale.dtype.kind == "f":
        return np.dtype(str(scale.dtype))
    return _scaled_integer_dtype(dtype, scale, has_values)


def _scaled_integer_dtype(dtype: np.dtype[Any], scale: Any, has_values: bool) -> np.dtype[Any]:
    """Return the dtype of an integer scale, as xarray does, or float64 if the products exceed its range."""
    if has_values or dtype.kind == "f":
        return np.dtype(np.float64)
    limits, available = np.iinfo(dtype), np.iinfo(scale.dtype)
    products = [int(limits.min) * int(scale), int(limits.max) * int(scale)]
    fits = available.min <= min(products) and max(products) <= available.max
    return np.dtype(scale.dtype) if fits else np.dtype(np.float64)


def _promoted(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the float dtype for numbers of which some are missing."""
    if dtype.kind == "f":
        return dtype
    return np.dtype(np.float32 if dtype.itemsize <= 2 else np.float64)


def _bounds(dtype: np.dtype[Any], attributes: Mapping[str, Any], other_sign: bool) -> tuple[Any, Any]:
    """Return the smallest and the largest valid stored value, or None.

    An attribute of another kind than the variable is ignored: it may apply to the stored or to the decoded numbers.
    ``other_sign``: as of `_with_sign_of`.
    """
    both = np.ravel(attributes.get("valid_range", []))
    low, high = both if len(both) == 2 else (attributes.get("valid_min"), attributes.get("valid_max"))
    return _bound(low, dtype, other_sign), _bound(high, dtype, other_sign)


def _bound(value: Any, dtype: np.dtype[Any], other_sign: bool) -> Any:
    found = np.ravel(value) if value is not None else np.empty(0)
    if len(found) != 1 or found.dtype.kind not in ("iu" if dtype.kind in "iu" else "iuf"):
        return None
    (bound,) = _with_sign_of(found, dtype, other_sign)
    return _cast(bound, dtype) if dtype.kind == "f" else bound  # 0.7 of 64 bits is more than the float32 0.7


@dataclass(frozen=True)
class TimeOrigin:
    """Conversion of stored times to seconds since ``ORIGIN``: ``stored * unit + start``.

    Files that count from different days become comparable.

    Parameters
    ----------
    unit : length of the stored unit, in seconds.
    start : zero of the stored times, in seconds since the origin, in the variable's own calendar.
    calendar : name in cftime.
    stored_units : units attribute of the file.
    """

    unit: np.float64
    start: np.float64
    calendar: str
    stored_units: str

    def seconds(self, stored: Array) -> Array:
        """Return times in seconds since ``ORIGIN``, float64."""
        return stored * self.unit + self.start

    def is_gregorian(self, seconds: Array) -> bool:
        """Return whether the calendar is the Gregorian one for all these times, in seconds since ``ORIGIN``."""
        first = {"standard": GREGORIAN, "proleptic_gregorian": -np.inf}.get(self.calendar, np.nan)
        return float(np.min(seconds, initial=np.inf)) >= first

    def attributes(self, stored: Mapping[str, Any], dropped: Collection[str]) -> dict[str, Any]:
        """Return the attributes of the decoded times: the stored ones without ``dropped``, in the new units."""
        kept = {key: value for key, value in stored.items() if key not in dropped}
        return kept | {
            "units": f"seconds since {ORIGIN.replace('T', ' ')}",
            "calendar": self.calendar,
            "origin": ORIGIN,
            "stored_units": self.stored_units,
        }


def calendar_of(attributes: Mapping[str, Any]) -> str:
    """Return the calendar of a field of times: without one that of NumPy, where a reader has made them, else CF's.

    >>> calendar_of({"units": "seconds since 1970-01-01 00:00:00 UTC"}), calendar_of({"units": "days since 1500-01-01"})
    ('proleptic_gregorian', 'standard')
    """
    own = "proleptic_gregorian" if attributes.get("units") == EPOCH else "standard"
    return str(attributes.get("calendar") or own)


def time_origin(units: object, calendar: object) -> TimeOrigin | None:
    """Return the conversion of times with these attributes; None if they are no times, or have no fixed unit.

    Calendars: https://unidata.github.io/cftime/.
    """
    match = re.fullmatch(r"\s*([A-Za-z]+)\s+since\s+(.+?)\s*", units) if isinstance(units, str) else None
    if match is None:
        return None
    name = calendar.lower() if isinstance(calendar, str) and calendar else "standard"
    try:
        start = cftime.num2date(0, f"seconds since {_complete_date(match[2])}", name, only_use_cftime_datetimes=True)
        origin = cftime.datetime(1970, 1, 1, calendar=start.calendar, has_year_zero=start.has_year_zero)
        since = start - origin
    except (ValueError, OverflowError, TypeError):  # the last from cftime, for "12:00" as the date
        return None
    unit = _unit_seconds(match[1].lower(), start.calendar)
    if unit is None:
        return None
    seconds = since.days * 86400 + since.seconds + since.microseconds * 1e-6
    return TimeOrigin(np.float64(unit), np.float64(seconds), start.calendar, str(units))


def _complete_date(text: str) -> str:
    """Return the date of units in the form that cftime reads as a whole: of other forms it ignores the rest.

    Month and day are 1 if they are missing ("2000", "2000-06"). "1-jan-2000", "2000/1/1" and "20000101" become
    "2000-1-1", the hour alone ("2000-01-01 12") gets minutes, and that of a time zone ("-6:00") two digits.
    """
    if named := re.match(r"([0-9]{1,2})-([A-Za-z]{3})-([0-9]{4})\b", text):
        month = MONTHS.index(named[2].lower()) + 1
        text = f"{named[3]}-{month}-{named[1]}{text[named.end() :]}"
    elif re.match(r"[0-9]{1,2}-[0-9]{1,2}-[0-9]{3}", text):
        raise ValueError(f"{text} may begin with the day or the month")
    text = re.sub(r"^([0-9]{4})/([0-9]{1,2})/([0-9]{1,2})\b|^([0-9]{4})([0-9]{2})([0-9]{2})\b", r"\1\4-\2\5-\3\6", text)
    text = re.sub(r"^(\S+?)[T ]+([0-9]{1,2})(?=$|[Z +-])", lambda found: f"{found[1]} {found[2]:0>2}:00", text)
    if re.match(r"\S+?[T ]+(?!0+\.?0*$)[0-9]+(?![0-9:])", text):
        raise ValueError(f"{text} has a time without hours and minutes")
    text = re.sub(r"(:[0-9.]+ ?[+-])([0-9])(?=$|:)", r"\g<1>0\2", text)
    missing = 2 - text.count("-") if re.fullmatch(r"[0-9]{4}(-[0-9]{1,2})?", text) else 0
    return text + "-1" * missing


def _unit_seconds(unit: str, calendar: str) -> float | None:
    for name in (unit, unit.removesuffix("s")):
        if name in UNIT_SECONDS:
            return UNIT_SECONDS[name]
        days = CALENDAR_DAYS.get({"noleap": "365_day", "all_leap": "366_day"}.get(calendar, calendar), {}).get(name)
        if days is not None:
            return days * 86400.0
    return None


def _to_seconds(convert: Decoding, origin: TimeOrigin) -> Decoding:
    """Return the conversion to float64 seconds since ``ORIGIN``."""
    scale = np.float64(1 if convert.scale is None else convert.scale)
    offset = np.float64(0 if convert.offset is None else convert.offset)
    return replace(
        convert,
        dtype=np.dtype(np.float64),
        missing=tuple(np.float64(value) for value in convert.missing),
        scale=scale * origin.unit,
        offset=offset * origin.unit + origin.start,
    )
