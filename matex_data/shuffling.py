"""Random orders that are the same on every rank: pure functions of a few integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from matex_data.index import Integers


def generator(*key: int) -> np.random.Generator:
    """A generator of its own for every key."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def salts(seed: int, epoch: int, step: Integers, lane: Integers) -> NDArray[np.uint64]:
    """What makes the orders of pairs of a step and a lane differ from one another: uint64[pairs].

    Parameters
    ----------
    step, lane : int64[pairs].
    """
    known, which = np.unique(step, return_inverse=True)
    seeds = [np.random.SeedSequence((seed, epoch, number)) for number in known.tolist()]
    salt: NDArray[np.uint64] = np.concatenate([one.generate_state(1, np.uint64) for one in seeds])[which]
    salt += lane.astype(np.uint64) << np.uint64(40)
    return salt


def orders(salt: NDArray[np.uint64], count: int) -> Integers:
    """A random order of ``count`` things for each salt: int64[salts, count], from 0 on in each.

    The order is that of hashed numbers, since seeding a generator for each lane would cost more than the orders.
    """
    mixed: NDArray[np.uint64] = np.add.outer(salt, np.arange(count, dtype=np.uint64))
    bits = np.uint64((1 << max(1, count - 1).bit_length()) - 1)
    # The last bits of each hash become the number itself: sorting is twice as fast as finding the sorted order.
    _hash(mixed)
    mixed &= ~bits
    mixed |= np.arange(count, dtype=np.uint64)
    mixed.sort(axis=1)
    mixed &= bits
    return mixed.view(np.int64)


def _hash(numbers: NDArray[np.uint64]) -> None:
    """A one-to-one mixture of the bits: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), in place."""
    shifted = np.empty_like(numbers)
    numbers *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers ^= np.right_shift(numbers, np.uint64(shift), out=shifted)
        numbers *= np.uint64(factor)
    numbers ^= np.right_shift(numbers, np.uint64(31), out=shifted)
