"""Split a data set: training, validation, test."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from matex_data.errors import PartitionError
from matex_data.index.runs import Runs, merge
from matex_data.sampling.permutation import generator

UNITS = 4096  # runs of neighbours that a random split draws from


def split(runs: Runs, fractions: tuple[float, ...], seed: int | None) -> tuple[Runs, ...]:
    """Split samples into disjoint sets that cover all of them.

    Parameters
    ----------
    runs : samples to split.
    fractions : of the samples for each set; they sum to 1.
    seed : None: the sets are contiguous, in order. Otherwise they are drawn at random: up to 4,096 samples one by one,
        more in runs of neighbours, so that large files are still read in large ranges.

    Returns
    -------
    The samples of each set, ascending; their numbers are the fractions of the total, rounded.

    Raises
    ------
    PartitionError : the fractions are negative or do not sum to 1.

    Examples
    --------
    >>> [subset.total for subset in split(Runs(np.array([0]), np.array([10])), (0.8, 0.2), seed=1)]
    [8, 2]
    """
    if not fractions or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise PartitionError(
            "the fractions of a split must sum to 1, and none may be negative",
            expected="for example split(0.9, 0.1)",
            found=fractions,
        )
    total = runs.total
    ends = [0, *(round(total * sum(fractions[: i + 1])) for i in range(len(fractions) - 1)), total]
    sequence = runs if seed is None else _shuffle_units(runs, seed)
    sets = []
    for low, high in pairwise(ends):
        subset = sequence.slice(np.array([low]), np.array([high - low]))
        order = np.argsort(subset.start)
        sets.append(merge(Runs(subset.start[order], subset.count[order])))
    return tuple(sets)


def _shuffle_units(runs: Runs, seed: int) -> Runs:
    unit = max(1, runs.total // UNITS)
    starts = np.arange(0, runs.total, unit, dtype=np.int64)
    counts = np.minimum(unit, runs.total - starts)
    order = generator(seed).permutation(len(starts))
    return runs.slice(starts[order], counts[order])
