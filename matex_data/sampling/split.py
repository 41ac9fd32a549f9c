"""Parts of a data set: training, validation, test."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from matex_data.errors import PartitionError
from matex_data.index.runs import Runs, merge
from matex_data.sampling.permutation import generator


def split(runs: Runs, fractions: tuple[float, ...], seed: int | None) -> tuple[Runs, ...]:
    """Disjoint parts that cover all samples; part i has ``fractions[i]`` of them, up to rounding.

    Without a seed the parts follow one another. With one they are drawn at random: sample by sample of up to some
    thousands, else in runs of neighbours, so that a part of a large file can still be read in large pieces.

    Raises
    ------
    PartitionError : the fractions are negative or do not sum to 1.
    """
    if not fractions or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise PartitionError(
            "the parts of a split must sum to 1", expected="for example split(0.9, 0.1)", found=fractions
        )
    total = runs.total
    ends = [0, *(round(total * sum(fractions[: i + 1])) for i in range(len(fractions) - 1)), total]
    sequence = runs if seed is None else _drawn(runs, seed)
    parts = []
    for low, high in pairwise(ends):
        part = sequence.slice(np.array([low]), np.array([high - low]))
        order = np.argsort(part.start)
        parts.append(merge(Runs(part.start[order], part.count[order])))
    return tuple(parts)


def _drawn(runs: Runs, seed: int) -> Runs:
    unit = max(1, runs.total // 4096)
    starts = np.arange(0, runs.total, unit, dtype=np.int64)
    counts = np.minimum(unit, runs.total - starts)
    order = generator(seed).permutation(len(starts))
    return runs.slice(starts[order], counts[order])
