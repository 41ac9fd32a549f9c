"""Selection of samples by their values, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from matex_data._types import Array
from matex_data.index.runs import Runs, compress, merge
from matex_data.reading.source import Source
from matex_data.sampling.schedule import rank_range

Condition = Callable[[Mapping[str, Array]], Array]
"""Callable that gets arrays of samples by field name, and returns bool[samples]."""


def select_samples(source: Source, samples: Runs, names: Sequence[str], condition: Condition) -> Runs:
    """Return the samples that meet a condition, equal on all ranks. *Collective*: each rank reads its block.

    Parameters
    ----------
    source : opened files.
    samples : samples to choose from, ascending.
    names : fields that the condition needs, at least one.
    condition : the condition.

    Raises
    ------
    DataError : the first error of any rank, on every rank.
    """
    begin, _ = rank_range(samples.total, source.comm.rank, source.comm.size)
    selected = [np.empty(0, np.int64)]
    first_error: Exception | None = None
    for positions, arrays in source.blocks(samples, names):
        try:
            if first_error is None:
                selected.append(samples.numbers(begin + positions[condition(arrays)]))
        except Exception as error:  # of any kind: the other ranks have to raise it, once they have read their blocks
            first_error = error
    source.comm.agree(first_error)
    by_rank = source.comm.allgather(compress(np.concatenate(selected)))
    return merge(Runs(np.concatenate([r.start for r in by_rank]), np.concatenate([r.count for r in by_rank])))
