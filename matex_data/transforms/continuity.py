"""Files that continue one another along a coordinate, such as months of one series of times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from matex_data._types import Array, Integers
from matex_data.fields import SAMPLE_COORDINATE, Schema, is_time
from matex_data.index.model import Index
from matex_data.index.runs import compress
from matex_data.reading.plan import Arrays
from matex_data.reading.source import Source
from matex_data.transforms.names import field_of_values
from matex_data.warning import warn

TOLERANCE = 0.1  # of a step: months have 28 to 31 days, and a missing row makes a step of twice the length


def sample_coordinate(fields: Schema) -> str | None:
    """Return the name of the coordinate of the samples that a reader has marked, if there is one."""
    return next((name for name, field in fields.items() if field.attributes.get(SAMPLE_COORDINATE)), None)


def continuing(opened: Callable[[Index], Source], index: Index, along: str | None) -> Array | None:
    """Return which files continue the one before, for windows that span files; rank 0 warns of others. *Collective*.

    A file continues the one before if the coordinate goes on with the steps that it has at the ends of both files, or,
    of files with a single row, with the usual step between files; empty files are passed over.

    Parameters
    ----------
    opened : function that opens the files of an index. *Collective*.
    index : of the files. Four values of the coordinate are read of each.
    along : name of the field; None: the coordinate that a reader has marked.

    Returns
    -------
    bool[files]; None: no file does, since there is no such field, or one file alone.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : the field is no number for each sample.
    DataError : the first error of any rank, on every rank.
    """
    name = along or sample_coordinate(index.fields)
    if name is None or len(index.files) < 2:
        return None
    problem = "along= names the field by which files continue one another"
    field_of_values(index.fields, name, problem, "one number for each sample", "iuf")
    filled = np.flatnonzero(index.files.rows)
    first, stop = index.first_row[filled], index.first_row[filled + 1]
    edges = np.stack([first, np.minimum(first + 1, stop - 1), np.maximum(stop - 2, first), stop - 1], axis=1)
    source = opened(index.select([name]))
    values = _read(source, name, edges)
    even, gap, step = _is_even(values, stop - first > 1)
    continues = np.zeros(len(index.files), bool)
    continues[filled[1:]] = even
    continues = _with_empty(continues, filled)
    if not even.all():
        broken = index.files.paths, filled[1:][~even], len(even), name, gap[~even][0], step
        source.comm.on_root(lambda: _warn(*broken))
    return continues


def warn_of_order(source: Source, name: str) -> None:
    """Warn on rank 0 if files overlap in time, or are not in its order. *Collective*. Two values of each are read.

    Parameters
    ----------
    source : the files.
    name : of the coordinate of the samples; of another one than times nothing is said.
    """
    index, field = source.index, source.index.fields[name]
    if field.ragged or field.shape or field.dtype.kind not in "iuf" or not is_time(field):
        return
    filled = np.flatnonzero(index.files.rows)
    edges = np.stack([index.first_row[filled], index.first_row[filled + 1] - 1], axis=1)
    first, last = np.sort(_read(source, name, edges), axis=1).T
    later = np.argsort(first, kind="stable")
    latest = np.maximum.accumulate(last[later])
    overlapping = np.flatnonzero(first[later][1:] <= latest[:-1])
    if len(overlapping):
        at = overlapping[0]
        pair = later[: at + 1][np.argmax(last[later[: at + 1]])], later[at + 1]
        text = "overlap", "so that the sets of a split may have the same times"
    elif (first[1:] <= last[:-1]).any():
        at = np.flatnonzero(first[1:] <= last[:-1])[0]
        pair, text = (at, at + 1), ("are not in order", "so that the sets of a split do not follow one another")
    else:
        return
    one, other = (index.files.paths[int(filled[number])] for number in pair)
    message = f"files {text[0]} in {name!r}, such as {one!r} and {other!r}, {text[1]}: split(at=[...]) divides by times"
    source.comm.on_root(lambda: warn(message))


def _read(source: Source, name: str, rows: Integers) -> Array:
    """Return the values of a coordinate, float64 of the shape of ``rows``. *Collective*."""
    numbers = np.unique(rows)
    runs = compress(numbers)
    own = np.full(source.block(runs).total, np.nan)

    def keep(positions: Integers, arrays: Arrays) -> None:
        own[positions] = arrays[name]

    source.use_block(runs, [name], keep)
    values = np.concatenate(source.comm.allgather(own))
    return values[np.searchsorted(numbers, rows)]


def _is_even(values: Array, long: Array) -> tuple[Array, Array, float]:
    """Return whether each file but the first continues the one before, the steps between them, and the usual step.

    Parameters
    ----------
    values : float64[files, 4], of the first two and the last two rows.
    long : bool[files], whether the file has more than one row.
    """
    gap = values[1:, 0] - values[:-1, 3]
    before, behind = values[:, 3] - values[:, 2], values[:, 1] - values[:, 0]
    within = np.concatenate([before[long], behind[long]])
    usual = float(np.nanmedian(within if long.any() else gap)) if len(gap) else 0.0
    before, behind = np.where(long, before, usual)[:-1], np.where(long, behind, usual)[1:]
    near = [(gap != 0) & (abs(gap - step) <= TOLERANCE * np.maximum(abs(gap), abs(step))) for step in (before, behind)]
    return np.logical_and(*near), gap, usual


def _with_empty(continues: Array, filled: Integers) -> Array:
    """Return ``continues`` with True for empty files between two of which one continues the other."""
    if not len(filled):
        return continues
    behind = np.searchsorted(filled, np.arange(len(continues)))  # the next file that has rows, itself or another one
    return continues[filled[np.minimum(behind, len(filled) - 1)]] & (behind < len(filled))


def _warn(paths: Sequence[str], broken: Integers, borders: int, name: str, gap: float, step: float) -> None:
    warn(
        f"windows do not reach over {len(broken)} of {borders} borders between files, where {name!r} does not continue "
        f"evenly: at the first of them, in front of {paths[int(broken[0])]!r}, its step is {gap:g}, and usually "
        f"{step:g}"
    )
