"""Decoding by the CF conventions against xarray, attribute by attribute."""

from __future__ import annotations

import warnings
from typing import Any

import cftime
import numpy as np
import pytest
import xarray
from hypothesis import given
from hypothesis import strategies as st

from matex_data.errors import DecodeError, FormatError
from matex_data.readers.decoding import Decoding
from matex_data.readers.dimensions.cf import cf_decoding, time_origin

NUMBERS = {
    "i1": [-128, -127, -1, 0, 5, 127],
    "u1": [0, 1, 5, 254, 255],
    "i2": [-32768, -32767, -999, 0, 5, 32767],
    "u2": [0, 5, 65535],
    "i4": [-(2**31), -999, 0, 5, 2**31 - 128],
    "i8": [-(2**40), -999, 0, 5, 2**40],
    "f4": [-999.0, 0.0, 5.0, 1e20, np.nan, -0.0],
    "f8": [-999.0, 0.0, 5.0, 2.0**66, np.nan, 1e300],
}
"""Values for missing numbers among them are exact in float32: others xarray does not find in packed float64."""


def _ours(stored: np.ndarray[Any, Any], attributes: dict[str, Any]) -> np.ndarray[Any, Any]:
    return cf_decoding(stored.dtype, attributes, "a.nc", "x").decode(stored)


def _xarray(stored: np.ndarray[Any, Any], attributes: dict[str, Any]) -> np.ndarray[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        variable = xarray.Variable(("x",), stored, dict(attributes))
        return np.asarray(xarray.conventions.decode_cf_variable("x", variable, decode_times=False).values)


def _attribute(draw: Any, dtype: str, stored: list[Any]) -> dict[str, Any]:
    """Draw packing attributes: fill values of the stored type, scale and offset of one float type or alone."""
    attributes: dict[str, Any] = {}
    for key in ("_FillValue", "missing_value"):
        if draw(st.booleans()):
            attributes[key] = np.dtype(dtype).type(draw(st.sampled_from(stored)))
    kind = draw(st.sampled_from([np.float32, np.float64]))
    if draw(st.booleans()):
        attributes["scale_factor"] = kind(draw(st.sampled_from([0.01, 0.5, 3.0])))
    if draw(st.booleans()):
        attributes["add_offset"] = kind(draw(st.sampled_from([0.0, 273.15, -5.0])))
    return attributes


@given(data=st.data(), dtype=st.sampled_from(sorted(NUMBERS)), order=st.sampled_from("<>"))
def test_packed_numbers_against_xarray(data: st.DataObject, dtype: str, order: str) -> None:
    stored = np.array(NUMBERS[dtype], dtype).astype(np.dtype(dtype).newbyteorder(order))
    attributes = _attribute(data.draw, dtype, NUMBERS[dtype])
    expected = _xarray(stored, attributes)
    found = _ours(stored, attributes)
    assert found.dtype == expected.dtype.newbyteorder("=")
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("fill", [None, -1])
@pytest.mark.parametrize("dtype, unsigned", [("i1", "true"), ("i2", "true"), ("u1", "false"), ("i2", "false")])
def test_unsigned(dtype: str, unsigned: str, fill: int | None) -> None:
    stored = np.array(NUMBERS[dtype], dtype)
    missing = stored[-1] if fill is None else np.array(fill).astype(dtype)[()]
    for attributes in ({"_Unsigned": unsigned}, {"_Unsigned": unsigned, "_FillValue": missing}):
        expected = _xarray(stored, attributes)
        found = _ours(stored.astype(stored.dtype.newbyteorder(">")), attributes)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)


def test_missing_values_of_another_type() -> None:
    assert np.isnan(_ours(np.array([1, -9999], "i2"), {"_FillValue": np.float64(-9999)})[1])
    assert np.isnan(_ours(np.array([1, 1e20], "f4"), {"missing_value": np.float64(1e20)})[1])
    assert np.isnan(_ours(np.array([1, 255], "u1"), {"_FillValue": np.int8(-1)})[1])
    assert np.isnan(_ours(np.array([1, -1], "i1"), {"_Unsigned": "true", "_FillValue": np.int32(-1)})[1])
    for wider in ({"missing_value": np.int32(255)}, {"valid_max": np.int32(255), "_FillValue": np.int8(-9)}):
        assert _ours(np.array([-1, 0], "i1"), wider).tolist() == _xarray(np.array([-1, 0], "i1"), wider).tolist()
    assert _ours(np.array([1, 2], "i4"), {"missing_value": "-1.e+34f"}).tolist() == [1, 2]
    assert np.isnan(_ours(np.array([1, 2, 3]), {"missing_value": np.array([2, 3])})).tolist() == [False, True, True]
    assert _ours(np.array([1, 2], "i4"), {"_FillValue": np.float32(np.nan)}).dtype == np.int32


@pytest.mark.parametrize("dtype", [">i8", "<u8"])
def test_integers_that_float64_rounds_are_an_error(dtype: str) -> None:
    missing = np.iinfo(dtype).max
    stored = np.array([2**53 - 1, missing], dtype)
    np.testing.assert_array_equal(_ours(stored, {"_FillValue": missing}), [2**53 - 1, np.nan])
    with pytest.raises(DecodeError, match=r"not exact as float64(.|\n)*9007199254740993"):
        _ours(np.array([2**53 + 1, missing], dtype), {"_FillValue": missing})


def test_scale_as_text_or_integer() -> None:
    assert _ours(np.array([4], "i2"), {"scale_factor": "0.5"})[0] == 2
    assert _ours(np.array([30000], "i2"), {"scale_factor": np.int16(10)})[0] == 300000
    with pytest.raises(FormatError, match="the attribute 'scale_factor' is no number"):
        _ours(np.array([4], "i2"), {"scale_factor": "half"})
    with pytest.raises(FormatError, match="mask_and_scale=False"):
        _ours(np.array([4], "i2"), {"add_offset": np.array([1.0, 2.0])})


def test_valid_range_without_missing_values() -> None:
    stored = np.array([-5, 0, 50, 101], "f4")
    missing = [True, False, False, True]
    limits = {"valid_range": np.array([0, 100], "f4")}
    assert np.isnan(_ours(stored, limits)).tolist() == missing
    assert np.isnan(_ours(stored, {"valid_min": np.float32(0), "valid_max": np.float32(100)})).tolist() == missing
    packed = {"scale_factor": np.float32(2), "valid_range": np.array([0, 100], "i2")}
    assert np.isnan(_ours(stored.astype("i2"), packed)).tolist() == missing
    assert not np.isnan(_ours(stored, {**limits, "_FillValue": np.float32(-1)})).any()
    single = np.array([0.7, 0.9, 1.1], "f4")  # neither bound is a float32
    assert not np.isnan(_ours(single, {"valid_min": 0.7, "valid_max": 1.1})).any()
    assert not np.isnan(_ours(np.array([-1, 5], "i1"), {"valid_max": np.int32(255), "scale_factor": 0.5})).any()
    assert not np.isnan(_ours(stored.astype("i2"), {"valid_max": "100"})).any()


@pytest.mark.parametrize(
    "valid_range, missing", [(True, [True, False]), (False, [False, False]), (None, [False, False])]
)
def test_valid_range_option(valid_range: bool | None, missing: list[bool]) -> None:
    attributes = {"_FillValue": np.int16(-1), "valid_max": np.int16(9)}
    found = cf_decoding(np.dtype("i2"), attributes, "a.nc", "x", valid_range).decode(np.array([10, 9], "i2"))
    assert np.isnan(found).tolist() == missing
    integers = cf_decoding(np.dtype("i2"), {"valid_max": np.int16(9)}, "a.nc", "x", valid_range)
    assert integers.dtype == (np.float32 if valid_range else np.int16)


CALENDARS = ["standard", "gregorian", "proleptic_gregorian", "julian", "noleap", "365_day", "366_day", "360_day"]


@pytest.mark.parametrize("calendar", CALENDARS)
@pytest.mark.parametrize("units", ["days since 1500-1-1", "Hours since 2000-02-28 12:30", "ms since 1900-01-01T00:00Z"])
def test_times_against_cftime(units: str, calendar: str) -> None:
    stored = np.array([0, 1, 59, 1000, -7], ">i4")
    decoding = cf_decoding(
        stored.dtype, {"units": units, "calendar": calendar, "_FillValue": np.int32(-7)}, "a.nc", "t"
    )
    dates = cftime.num2date(stored[:-1].astype(int), units, calendar, only_use_cftime_datetimes=True)
    found = decoding.decode(stored)
    again = cftime.num2date(found[:-1], decoding.attributes["units"], decoding.attributes["calendar"])
    assert [abs((a - b).total_seconds()) < 1e-5 for a, b in zip(dates, again, strict=True)] == [True] * 4
    assert np.isnan(found[-1]) and found.dtype == np.float64
    assert decoding.attributes["origin"] == "1970-01-01T00:00:00" and decoding.attributes["stored_units"] == units


NO_DATES = [
    "yesterday",
    "12:00",
    "1-2-1970",
    "200001",
    "1-xyz-1970",
    "2000-6-15 1200",
    "20000615 120000",
    "2000-6-15 6h",
]


@pytest.mark.parametrize(
    "units", ["K", "days", "months since 2000-01-01", 5, None, *(f"s since {date}" for date in NO_DATES)]
)
def test_units_that_are_no_times(units: Any) -> None:
    assert time_origin(units, "standard") is None


@given(st.integers(1, 5), st.integers(1, 40000), st.booleans())
def test_any_shape_in_cache_blocks(rows: int, columns: int, transposed: bool) -> None:
    stored = np.arange(rows * columns, dtype=">i4").reshape(rows, columns)
    stored = stored.reshape(columns, rows).T if transposed else stored
    out = np.empty(stored.shape)
    Decoding(np.dtype(float), missing=(3.0,), scale=np.float64(2))(stored, out)
    np.testing.assert_array_equal(out, np.where(stored == 3, np.nan, stored * 2.0))


def test_a_missing_value_that_is_inexact_in_float32() -> None:
    """xarray compares after rounding, and returns such a value as a number."""
    stored = np.array([5, 2**31 - 1], "i4")
    found = _ours(stored, {"_FillValue": np.int32(2**31 - 1), "scale_factor": np.float32(0.01)})
    np.testing.assert_allclose(found, [0.05, np.nan], rtol=1e-6)


ZONES = [
    "2000-6-15 03:00 -6:00",
    "2000-06-15 03:00:00 +6",
    "2000-06-15T03:00:00-6:30",
    "2000-06-15 03:00 +05:30",
]
DATES = [
    "15-jun-2000",
    "1-JUN-2000 04:03:36",
    "2000/6/15 12:30",
    "20000615",
    "20000615 12:30",
    "2000-06-15 12",
]


@pytest.mark.parametrize(
    "date", ["2000", "2000-06", "2000-6-15", "2000-06-15T12Z", "2000-06-15 12 UTC", *DATES, *ZONES]
)
def test_forms_of_dates(date: str) -> None:
    stored = np.array([0, 1, 59], "i4")
    variable = xarray.Variable(("t",), stored, {"units": f"days since {date}", "calendar": "standard"})
    expected = xarray.conventions.decode_cf_variable("t", variable).to_numpy().astype("M8[s]").astype("f8")
    assert _ours(stored, variable.attrs).tolist() == expected.tolist()


@pytest.mark.parametrize("mask_and_scale", [True, False])
@pytest.mark.parametrize("decode_times", [True, False])
@pytest.mark.parametrize(
    "attributes",
    [
        {"units": "days since 2000-01-01", "_FillValue": np.int16(-9), "scale_factor": np.float32(0.5)},
        {"units": "days since 2000-01-01"},
        {"units": "K", "add_offset": 3.0, "valid_min": np.int16(0)},
        {"_Unsigned": "true"},
        {"dtype": "bool"},
    ],
)
def test_each_option_against_xarray(attributes: dict[str, Any], decode_times: bool, mask_and_scale: bool) -> None:
    stored = np.array([1, 0, 2, -9], "i2")
    decoding = cf_decoding(stored.dtype, attributes, "a.nc", "x", False, decode_times, mask_and_scale)
    variable = xarray.Variable(("x",), stored, dict(attributes))
    options = {"decode_times": decode_times, "decode_timedelta": False, "mask_and_scale": mask_and_scale}
    expected = xarray.conventions.decode_cf_variable("x", variable, **options)
    values = expected.to_numpy()
    if values.dtype.kind == "M":
        values = np.where(np.isnat(values), np.nan, values.astype("M8[s]").astype("f8"))
    assert decoding.decode(stored).dtype == values.dtype
    np.testing.assert_array_equal(decoding.decode(stored), values)
    packing = {"scale_factor", "add_offset", "_FillValue", "_Unsigned"}
    assert packing & set(decoding.attributes) == packing & set(expected.attrs)


@pytest.mark.parametrize(("date", "hour"), [("2000-6-15  6", 6), ("2000-6-15T6", 6), ("2000-6-15 6 -6:00", 12)])
def test_hours_that_others_ignore(date: str, hour: int) -> None:
    found, expected = (time_origin(f"s since {text}", None) for text in (date, f"2000-06-15 {hour}:00"))
    assert found is not None and expected is not None and found.start == expected.start
