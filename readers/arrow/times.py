"""Times of Arrow as seconds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from matex_data._types import Array

DAY = 86_400  # seconds
TICKS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # of a unit in a second


def seconds(array: Any) -> Array:
    """Return times, dates or durations in seconds, float64; those that are missing are NaN.

    Parameters
    ----------
    array : ``pyarrow.Array`` of a temporal type; timestamps and dates count from 1970-01-01 00:00:00 UTC.

    Examples
    --------
    >>> seconds(pa.array([1500, None], pa.timestamp("ms"))).tolist()
    [1.5, nan]
    """
    kind = array.type
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        array = array.cast(pa.int32())
    whole: Array = array.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False)
    if pa.types.is_date32(kind):
        converted = whole * float(DAY)
    else:
        ticks = TICKS["ms" if pa.types.is_date64(kind) else kind.unit]
        quotient, remainder = np.divmod(whole, ticks)
        converted = quotient + remainder / ticks  # a single division would round nanoseconds twice
    converted[array.is_null().to_numpy(zero_copy_only=False)] = np.nan
    return converted
