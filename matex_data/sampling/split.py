"""Split a data set: training, validation, test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from matex_data._types import Integers
from matex_data.errors import PartitionError
from matex_data.index.chosen import Chosen, Samples
from matex_data.index.runs import Runs, merge
from matex_data.sampling.permutation import check_seed, generator


@dataclass(frozen=True, eq=False)
class Ties:
    """Samples that belong together, so that a split does not divide them.

    Parameters
    ----------
    overlap : number of samples behind a sample that are made of rows of its own, as neighbouring windows are.
    sections : int64[n], first sample of each series of samples, ascending; those of two series share no rows. None: one
        series.
    """

    overlap: int = 0
    sections: Integers | None = None


UNITS = 4096  # sections of neighbours that a random split draws from
SECTION_GAPS = 10  # least length of these, in gaps: at most a tenth of the samples is left out


def split(
    runs: Samples, fractions: Sequence[float], seed: int | None, gap: int = 0, files: Integers | None = None
) -> tuple[Samples, ...]:
    """Split samples into disjoint sets that cover all of them but for the gaps.

    Parameters
    ----------
    runs : samples to split, ascending.
    fractions : of the samples for each set; they sum to 1.
    seed : None: the sets are contiguous, in order. Otherwise they are drawn at random: up to 4,096 samples one by one,
        more in sections of neighbours, so that large files are still read in large ranges. Sections are ten gaps long
        or longer.
    gap : number of samples to leave out where a set borders on another one; those in front of the border.
    files : int64[files], first sample of each file, ascending; no gap reaches over the border of a file. None: gaps
        reach over all borders.

    Returns
    -------
    The samples of each set, ascending; without gaps, their numbers are the fractions of the total, rounded.

    Raises
    ------
    PartitionError : the fractions are negative or do not sum to 1; the seed is no integer of 0 or more, or the gap;
        the gaps leave nothing of a set.

    Examples
    --------
    >>> [subset.total for subset in split(Runs(np.array([0]), np.array([10])), (0.8, 0.2), seed=1)]
    [8, 2]
    >>> [subset.total for subset in split(Runs(np.array([0]), np.array([10])), (0.8, 0.2), seed=None, gap=3)]
    [5, 2]
    """
    if not fractions or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise PartitionError(
            "the fractions of a split must sum to 1, and none may be negative",
            expected="for example split(0.9, 0.1)",
            found=fractions,
        )
    gap = check_gap(gap)
    if isinstance(runs, Chosen):
        chosen, everything = runs, Runs(np.array([0]), np.array([runs.total]))
        if not gap:
            of_positions = split(everything, fractions, seed)
            return tuple(chosen.at(positions) for positions in of_positions if isinstance(positions, Runs))
        runs = chosen.slice(everything.start, everything.count)
    total = runs.total
    ends = [0, *(round(total * sum(fractions[: i + 1])) for i in range(len(fractions) - 1)), total]
    sequence = runs if seed is None else _shuffle_sections(runs, check_seed(seed), gap)
    sets: list[Runs] = []
    for low, high in pairwise(ends):
        subset = sequence.slice(np.array([low]), np.array([high - low]))
        order = np.argsort(subset.start)
        sets.append(merge(Runs(subset.start[order], subset.count[order])))
    return tuple(_leave_gaps(sets, gap, files) if gap else sets)


def check_gap(gap: int) -> int:
    """Return a gap as Python's integer.

    Raises
    ------
    PartitionError : it is no integer of 0 or more.
    """
    if isinstance(gap, bool) or not isinstance(gap, int | np.integer) or gap < 0:
        raise PartitionError("a gap is a number of samples", expected="gap= an integer of 0 or more", found=repr(gap))
    return int(gap)


def _shuffle_sections(runs: Runs, seed: int, gap: int) -> Runs:
    length = max(1, runs.total // UNITS, SECTION_GAPS * gap)
    starts = np.arange(0, runs.total, length, dtype=np.int64)
    counts = np.minimum(length, runs.total - starts)
    order = generator(seed).permutation(len(starts))
    return runs.slice(starts[order], counts[order])


def _leave_gaps(sets: Sequence[Runs], gap: int, files: Integers | None) -> list[Runs]:
    """Return the sets without the last ``gap`` samples before each run of another set."""
    start, count = (np.concatenate([getattr(subset, name) for subset in sets]) for name in ("start", "count"))
    number = np.repeat(np.arange(len(sets)), [len(subset.start) for subset in sets])
    order = np.flatnonzero(count)[np.argsort(start[np.flatnonzero(count)])]
    start, count, number = start[order], count[order], number[order]
    borders = np.flatnonzero(np.diff(number)) + 1  # the runs that another set precedes
    limit = start[borders] - gap
    if files is not None:
        limit = np.maximum(limit, files[np.searchsorted(files, start[borders], side="right") - 1])
    limit = np.append(limit, np.iinfo(np.int64).max)[np.searchsorted(borders, np.arange(len(start)), side="right")]
    kept = np.clip(limit - start, 0, count)
    trimmed = []
    for i, subset in enumerate(sets):
        own = (number == i) & (kept > 0)
        if subset.total and not own.any():
            raise PartitionError(
                f"the gaps of the split leave nothing of set {i + 1} of {len(sets)}",
                expected=f"sets of more than {gap} samples, of which as many are left out in front of another set",
                found=f"{subset.total} samples",
                remedy="split more samples, into larger fractions or in order (without seed=), or give gap= a smaller "
                "number; windows that begin fewer samples apart share rows",
            )
        trimmed.append(Runs(start[own], kept[own]))
    return trimmed
