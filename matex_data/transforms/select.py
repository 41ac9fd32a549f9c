"""Selection of samples by their values, equal on all ranks."""

from __future__ import annotations

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.index.runs import TILE, Chosen, Runs, Samples
from matex_data.mpi.shared import gathered
from matex_data.reading.plan import Arrays
from matex_data.reading.source import Source
from matex_data.sampling.schedule import rank_range

AT_ONCE = 1 << 20  # samples whose numbers are computed at once
MOST_RUNS = 1 << 16  # of samples, that are kept as such: more of them take gigabytes where bits take megabytes


def select_samples(source: Source, samples: Samples, name: str) -> Samples:
    """Return the samples for which a field is true, equal on all ranks. *Collective*: each rank reads its block.

    Parameters
    ----------
    source : opened files.
    samples : samples to choose from, ascending.
    name : of the field, of truth values.

    Raises
    ------
    DataError : the first error of any rank, on every rank.
    """
    own = np.zeros(source.block(samples).total, bool)

    def select(positions: Integers, arrays: Arrays) -> None:
        own[positions] = arrays[name]

    source.use_block(samples, [name], select)
    return samples_of_mask(source, samples, own)


def samples_of_mask(source: Source, samples: Samples, own: Array) -> Samples:
    """Return the samples that a mask selects, equal on all ranks. *Collective*.

    Parameters
    ----------
    source : opened files.
    samples : samples to choose from, ascending.
    own : bool[samples of this rank's block].
    """
    begin, end = rank_range(samples.total, source.comm.rank, source.comm.size)
    edges = samples.numbers(np.array([begin, end - 1] if end > begin else [], np.int64)).tolist() or [0, -1]
    first = edges[0] // 8 * 8  # of a byte
    selected = np.zeros((edges[1] - first) // 8 + 1, np.uint8)
    for low in range(0, len(own), AT_ONCE):
        chosen = low + np.flatnonzero(own[low : low + AT_ONCE])
        set_bits(selected, samples.numbers(begin + chosen) - first)
    return _shared(source, selected, first)


def _shared(source: Source, selected: Bytes, first: int) -> Samples:
    """Return the samples whose bits any rank has set. *Collective*."""
    rank, begin, end = source.comm.rank, first // 8, first // 8 + len(selected)
    by_rank = source.comm.allgather((begin, end, int(selected[0])) if len(selected) else (0, 0, 0))
    begins, ends, firsts = np.array(by_rank, np.int64).T
    total = -(-len(source.index) // TILE) * (TILE // 8)
    edges = np.concatenate([[0], np.maximum.accumulate(ends)[:-1], [total]])  # the first rank has a byte of two
    low = int(edges[rank])
    own = np.zeros(int(edges[rank + 1]) - low, np.uint8)
    if end > low:
        own[max(begin, low) - low : end - low] = selected[max(low - begin, 0) :]
        of_others = (begins == end - 1) & (ends > 0) & (np.arange(len(ends)) > rank)
        own[end - 1 - low] |= np.bitwise_or.reduce(firsts[of_others])
    return as_samples(gathered(source.comm, own))


def set_bits(bits: Bytes, numbers: Integers) -> None:
    """Set the bits of these ascending numbers."""
    if len(numbers):
        first, last = int(numbers[0]) // 8, int(numbers[-1]) // 8
        mask = np.zeros((last - first + 1) * 8, bool)
        mask[numbers - first * 8] = True
        bits[first : last + 1] |= np.packbits(mask)


def as_samples(bits: Bytes) -> Samples:
    """Return the samples whose bits are set: as runs if there are few."""
    chosen = Chosen.of_bits(bits)
    if _count_runs(bits) > MOST_RUNS:
        return chosen
    tiles = [Runs(np.empty(0, np.int64), np.empty(0, np.int64)), *chosen.tiles()]
    return Runs(np.concatenate([runs.start for runs in tiles]), np.concatenate([runs.count for runs in tiles]))


def _count_runs(bits: Bytes) -> int:
    """Return the number of runs of bits that are set."""
    count, last = 0, 0
    for low in range(0, len(bits), AT_ONCE):
        part = bits[low : low + AT_ONCE]
        before = np.concatenate([[last], part[:-1]]).astype(np.uint8)
        count += int(np.bitwise_count(part & ~((part >> 1) | (before << 7))).sum(dtype=np.int64))
        last = int(part[-1])
    return count
