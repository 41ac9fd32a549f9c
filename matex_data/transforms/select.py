"""Selection of samples by their values, equal on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.index.chosen import Chosen, Samples
from matex_data.index.runs import Runs
from matex_data.reading.plan import Arrays
from matex_data.reading.source import Source
from matex_data.sampling.schedule import rank_range

TILE = 1 << 20  # samples whose numbers are computed at once
MOST_RUNS = 1 << 16  # of samples, that are kept as such: more of them take gigabytes where bits take megabytes
Condition = Callable[[Mapping[str, Array]], Array]
"""Callable that gets arrays of samples by field name, and returns bool[samples]."""


def select_samples(source: Source, samples: Samples, names: Sequence[str], condition: Condition) -> Samples:
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
    begin, first, selected = _own_bits(source, samples)

    def select(positions: Integers, arrays: Arrays) -> None:
        _set_bits(selected, samples.numbers(begin + positions[condition(arrays)]) - first)

    source.use_block(samples, names, select)
    return _shared(source, selected, first)


def samples_of_mask(source: Source, samples: Samples, own: Array) -> Samples:
    """Return the samples that a mask selects, equal on all ranks. *Collective*.

    Parameters
    ----------
    source : opened files.
    samples : samples to choose from, ascending.
    own : bool[samples of this rank's block].
    """
    begin, first, selected = _own_bits(source, samples)
    for low in range(0, len(own), TILE):
        chosen = low + np.flatnonzero(own[low : low + TILE])
        _set_bits(selected, samples.numbers(begin + chosen) - first)
    return _shared(source, selected, first)


def _own_bits(source: Source, samples: Samples) -> tuple[int, int, Bytes]:
    """Return this rank's first position in the samples, the number of its first bit, and bits for its samples."""
    begin, end = rank_range(samples.total, source.comm.rank, source.comm.size)
    edges = samples.numbers(np.array([begin, end - 1] if end > begin else [], np.int64)).tolist() or [0, -1]
    first = edges[0] // 8 * 8
    return begin, first, np.zeros((edges[1] - first) // 8 + 1, np.uint8)


def _shared(source: Source, selected: Bytes, first: int) -> Samples:
    """Return the samples whose bits any rank has set. *Collective*."""
    bits = np.zeros(-(-len(source.index) // 8), np.uint8)
    for of_rank, number in source.comm.allgather((selected, first)):
        bits[number // 8 : number // 8 + len(of_rank)] |= of_rank
    return as_samples(bits)


def _set_bits(bits: Bytes, numbers: Integers) -> None:
    """Set the bits of these ascending numbers."""
    if len(numbers):
        first, last = int(numbers[0]) // 8, int(numbers[-1]) // 8
        mask = np.zeros((last - first + 1) * 8, bool)
        mask[numbers - first * 8] = True
        bits[first : last + 1] |= np.packbits(mask)


def as_samples(bits: Bytes) -> Samples:
    """Return the samples whose bits are set: as runs if there are few."""
    last = np.concatenate([[0], bits[:-1] & 1]).astype(np.uint8)
    begins = bits & ~((bits >> 1) | (last << 7))
    chosen = Chosen.of_bits(bits)
    if int(np.bitwise_count(begins).sum(dtype=np.int64)) > MOST_RUNS:
        return chosen
    tiles = [Runs(np.empty(0, np.int64), np.empty(0, np.int64)), *chosen.tiles()]
    return Runs(np.concatenate([runs.start for runs in tiles]), np.concatenate([runs.count for runs in tiles]))
