"""Random orders that are the same on every rank: pure functions of a few integers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Integers


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


TABLE = 1 << 22
"""Samples of which a permutation is kept as a table; of more, each destination is computed."""
ROUNDS = 8  # of the network


class Permutation:
    """Uniform permutation of ``total`` things for every key; its memory does not grow with them.

    Beyond ``TABLE`` things it is a Feistel network of hashes over pairs of digits (Luby and Rackoff, 1988), with sums
    instead of exclusive ors, so that there are hardly more pairs than things; what is none is mapped again.

    Parameters
    ----------
    total : things.
    key : integers that the permutation follows from.
    """

    def __init__(self, total: int, *key: int) -> None:
        self.total = total
        self._table = generator(*key).permutation(total) if total <= TABLE else None
        self._low = int(np.ceil(np.sqrt(max(1, total))))
        self._high = -(-total // self._low)
        self._keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)

    def __call__(self, places: Integers) -> Integers:
        """Return the thing at each destination, int64 of the same length."""
        if self._table is not None:
            found: Integers = self._table[places]
            return found
        found = self._network(places)
        outside = np.flatnonzero(found >= self.total)
        while len(outside):
            found[outside] = self._network(found[outside])
            outside = outside[found[outside] >= self.total]
        return found

    def _network(self, numbers: Integers) -> Integers:
        high, low = (half.astype(np.uint64) for half in np.divmod(numbers, self._low))
        for number, key in enumerate(self._keys):
            if number % 2:
                low = (low + self._hashed(high, key)) % np.uint64(self._low)
            else:
                high = (high + self._hashed(low, key)) % np.uint64(self._high)
        return (high * np.uint64(self._low) + low).view(np.int64)

    @staticmethod
    def _hashed(numbers: NDArray[np.uint64], key: np.uint64) -> NDArray[np.uint64]:
        hashed: NDArray[np.uint64] = numbers ^ key
        _hash(hashed)
        hashed >>= np.uint64(16)  # sums with it stay below 2**64
        return hashed


def _hash(numbers: NDArray[np.uint64]) -> None:
    """A one-to-one mixture of the bits: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), in destination."""
    shifted = np.empty_like(numbers)
    numbers *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers ^= np.right_shift(numbers, np.uint64(shift), out=shifted)
        numbers *= np.uint64(factor)
    numbers ^= np.right_shift(numbers, np.uint64(31), out=shifted)
