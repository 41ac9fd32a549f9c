"""Offsets of samples of variable length, from what files hold: offsets, first or last elements, or counts.

A reading of these numbers counts only if it is exact: it has to account for every element of the content.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from matex_data._types import Array, Integers

KINDS = {
    "offsets": "n + 1 offsets, from 0 to the length of the content",
    "starts": "the first element of each of n samples",
    "ends": "the end of each of n samples: the first element of the next one",
    "counts": "the number of elements of each of n samples",
}
"""Readings of the numbers that divide a content into samples."""


def as_integers(values: Array) -> Integers | None:
    """Return numbers as int64[n]; None if they are not one-dimensional, whole, and 0 or more.

    LHEH5 stores integers as floats.
    """
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        return None
    with np.errstate(invalid="ignore"):
        whole = bool((values >= 0).all()) and bool((values < 2**62).all())
        return values.astype(np.int64) if whole and bool((np.trunc(values) == values).all()) else None


def offsets_of(values: Integers, kind: str, length: int) -> Integers | None:
    """Return the n + 1 offsets that the numbers stand for; None if they do not divide exactly ``length`` elements.

    Parameters
    ----------
    values : int64[k], 0 or more.
    kind : one of `KINDS`.
    length : number of elements of the content.

    Examples
    --------
    >>> offsets_of(np.array([2, 0, 3]), "counts", 5).tolist(), offsets_of(np.array([0, 2, 2]), "starts", 5).tolist()
    ([0, 2, 2, 5], [0, 2, 2, 5])
    >>> offsets_of(np.array([2, 0, 3]), "offsets", 5) is None
    True
    """
    if (values > length).any():
        return None
    if kind == "counts":
        if values.sum(dtype=np.float64) > 2.0**62:
            return None
        offsets = np.append(0, np.cumsum(values))
    elif kind == "starts":
        offsets = np.append(values, length)
    else:
        offsets = values if kind == "offsets" else np.append(0, values)
    exact = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == length and bool((np.diff(offsets) >= 0).all())
    return offsets.astype(np.int64) if exact else None


def readings(values: Integers, length: int, rows: int | None = None) -> dict[str, Integers]:
    """Return the offsets for each of the kinds "offsets", "ends" and "counts" that fits and differs from those before.

    First elements alone never prove to be such: they do not tell where the last sample ends. Numbers from 0 to the
    length of the content are n + 1 offsets, unless the number of samples is another one.

    Parameters
    ----------
    values, length : as of `offsets_of`.
    rows : number of samples; None: unknown.

    Examples
    --------
    >>> list(readings(np.array([0, 2, 2, 5]), 5)), list(readings(np.array([2, 0, 3]), 5))
    (['offsets'], ['counts'])
    >>> list(readings(np.array([0, 0, 5]), 5)), list(readings(np.array([0, 0, 5]), 5, rows=2))
    (['offsets', 'counts'], ['offsets'])
    """
    found: dict[str, Integers] = {}
    for kind in ("offsets", "ends", "counts"):
        offsets = offsets_of(values, kind, length)
        if offsets is None or (rows is not None and len(offsets) != rows + 1):
            continue
        if kind == "ends" and "offsets" in found:
            continue
        if not any(np.array_equal(offsets, other) for other in found.values()):
            found[kind] = offsets
    return found


def offsets_of_ranges(begin: Integers, count: Integers, length: int) -> Integers | int:
    """Return the offsets of samples of which first element and number of elements are given.

    The content may hold more elements before the first sample and after the last one.

    Parameters
    ----------
    begin, count : int64[n], 0 or more. The begin of a sample without elements has no meaning.
    length : number of elements of the content.

    Returns
    -------
    int64[n + 1], or the number of the first sample that does not follow the one before, or ends behind the content.

    Examples
    --------
    >>> offsets_of_ranges(np.array([2, 0, 4]), np.array([2, 0, 1]), 9).tolist()
    [2, 4, 4, 5]
    >>> offsets_of_ranges(np.array([0, 3]), np.array([2, 1]), 9)
    1
    """
    filled = np.flatnonzero(count > 0)
    first = int(begin[filled[0]]) if len(filled) else 0
    outside = np.flatnonzero((count > length) | (begin > length - np.minimum(count, length)) & (count > 0))
    expected = first + np.cumsum(np.where(count <= length, count, 0)) - count
    apart = filled[begin[filled] != expected[filled]]
    wrong: Any = np.concatenate([outside, apart])
    if len(wrong):
        return int(wrong.min())
    return np.append(first, first + np.cumsum(count)).astype(np.int64)
