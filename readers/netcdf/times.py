"""Times by units and calendar, as seconds since one origin: files that count from different days fit together."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import cftime
import numpy as np

ORIGIN = "1970-01-01T00:00:00"
UNITS = {
    "microsecond": 1e-6, "microsec": 1e-6, "us": 1e-6,
    "millisecond": 1e-3, "millisec": 1e-3, "msec": 1e-3, "ms": 1e-3,
    "second": 1.0, "sec": 1.0, "s": 1.0,
    "minute": 60.0, "min": 60.0,
    "hour": 3600.0, "hr": 3600.0, "h": 3600.0,
    "day": 86400.0, "d": 86400.0,
    "week": 604800.0,
}  # fmt: skip
"""Seconds of each unit; a plural s may follow. Months and years have no fixed length."""
DAYS_OF = {"360_day": {"month": 30, "year": 360}, "365_day": {"year": 365}, "366_day": {"year": 366}}
"""Units that have a fixed length in some calendars, in days."""


@dataclass(frozen=True)
class TimeOrigin:
    """How stored times become seconds since ``ORIGIN``: ``stored * unit + start``.

    Parameters
    ----------
    unit : seconds of one.
    start : of the stored count, in seconds since the origin, in the variable's own calendar.
    calendar : by its name in cftime.
    stored_units : as the file has them.
    """

    unit: np.float64
    start: np.float64
    calendar: str
    stored_units: str

    def attributes(self, stored: Mapping[str, Any], used_up: Collection[str]) -> dict[str, Any]:
        """The attributes of the decoded times."""
        left = {key: value for key, value in stored.items() if key not in used_up}
        units = f"seconds since {ORIGIN.replace('T', ' ')}"
        return left | {
            "units": units,
            "calendar": self.calendar,
            "origin": ORIGIN,
            "stored_units": self.stored_units,
        }


def epoch_of(units: object, calendar: object) -> TimeOrigin | None:
    """What times of these units and this calendar count; None if they are no times, or none that can be counted.

    https://unidata.github.io/cftime/ knows the calendars.
    """
    found = re.fullmatch(r"\s*([A-Za-z]+)\s+since\s+(.+?)\s*", units) if isinstance(units, str) else None
    if found is None:
        return None
    name = calendar.lower() if isinstance(calendar, str) and calendar else "standard"
    try:
        start = cftime.num2date(0, f"seconds since {_whole_date(found[2])}", name, only_use_cftime_datetimes=True)
        origin = cftime.datetime(1970, 1, 1, calendar=start.calendar, has_year_zero=start.has_year_zero)
        since = start - origin
    except (ValueError, OverflowError, TypeError):  # the last from cftime, for "12:00" as the date
        return None
    unit = _seconds(found[1].lower(), start.calendar)
    if unit is None:
        return None
    seconds = since.days * 86400 + since.seconds + since.microseconds * 1e-6
    return TimeOrigin(np.float64(unit), np.float64(seconds), start.calendar, str(units))


def _whole_date(text: str) -> str:
    """The date with its month and day, which are the first ones if they are left out: "2000", "2000-06"."""
    missing = 2 - text.count("-") if re.fullmatch(r"[0-9]{4,}(-[0-9]{1,2})?", text) else 0
    return text + "-1" * missing


def _seconds(unit: str, calendar: str) -> float | None:
    for name in (unit, unit.removesuffix("s")):
        if name in UNITS:
            return UNITS[name]
        days = DAYS_OF.get({"noleap": "365_day", "all_leap": "366_day"}.get(calendar, calendar), {}).get(name)
        if days is not None:
            return days * 86400.0
    return None
