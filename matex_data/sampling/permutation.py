"""Pseudorandom orders that are equal on every rank: pure functions of a few integers.

All of them are made of one hash of counters. Streams of NumPy's ``Generator`` change between its releases (NEP 19).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Integers
from matex_data.errors import PartitionError

TABLE_ITEMS = 1 << 22
"""Items up to which a permutation is stored as a table; for more, each value is computed."""
ROUNDS = 8  # of the Feistel network
VERSION = 2
"""Version of the orders: a state of a run names it, since another one means other orders."""
_PI = np.uint64(0x243F6A8885A308D3)  # first digits: hashed zeros would stay zeros


def check_seed(seed: int) -> int:
    """Return a seed as Python's integer; raise ``PartitionError`` if it is no integer of 0 or more."""
    return whole_number(seed, 0, "a seed is an integer that is not negative", "seed= an integer of 0 or more")


def whole_number(number: object, least: int, problem: str, expected: str) -> int:
    """Return a number as Python's integer; raise ``PartitionError`` if it is none, or below the least one."""
    if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
        raise PartitionError(problem, expected=expected, found=repr(number))
    return int(number)


def random_words(count: int, *key: int) -> NDArray[np.uint64]:
    """Return random numbers for a key of integers of 0 or more, uint64[count].

    Examples
    --------
    >>> random_words(2, 7, 1).tolist() == random_words(2, 7, 2).tolist()
    False
    """
    state = np.array([_PI])
    for number in map(int, key):
        for shift in range(0, max(1, number.bit_length()), 64):
            state += np.uint64(number >> shift & 0xFFFFFFFFFFFFFFFF)
            _hash(state)
    words: NDArray[np.uint64] = state + np.arange(count, dtype=np.uint64)
    _hash(words)
    return words


def permutation(total: int, *key: int) -> Integers:
    """Return a random order of the numbers 0 to ``total - 1`` for a key of integers of 0 or more, int64[total].

    Examples
    --------
    >>> sorted(permutation(5, 1, 0).tolist())
    [0, 1, 2, 3, 4]
    """
    order: Integers = orders(random_words(1, *key), total)[0]
    return order


def salts(seed: int, epoch: int, step: Integers, lane: Integers) -> NDArray[np.uint64]:
    """Return a salt for each pair of a step and a lane, uint64[pairs]; `orders` makes a random order of each.

    Parameters
    ----------
    seed, epoch : of the shuffle.
    step, lane : int64[pairs].
    """
    unique, which = np.unique(step, return_inverse=True)
    of_step = [random_words(1, seed, epoch, number) for number in unique.tolist()]
    salt: NDArray[np.uint64] = np.concatenate(of_step)[which]
    salt += lane.astype(np.uint64) << np.uint64(40)
    return salt


def orders(salt: NDArray[np.uint64], count: int) -> Integers:
    """Return a random order of the numbers 0 to ``count - 1`` for each salt, int64[salts, count].

    The order is that of hashed numbers.
    """
    mixed: NDArray[np.uint64] = np.add.outer(salt, np.arange(count, dtype=np.uint64))
    bits = np.uint64((1 << max(1, count - 1).bit_length()) - 1)
    # The number replaces the last bits of its hash: sorting these takes half the time of argsort.
    _hash(mixed)
    mixed &= ~bits
    mixed |= np.arange(count, dtype=np.uint64)
    mixed.sort(axis=1)
    mixed &= bits
    return mixed.view(np.int64)


def sample_seeds(seed: int, epoch: int, numbers: Integers) -> Integers:
    """Return a seed for each sample, int64 of 0 or more, independent of all others.

    Parameters
    ----------
    seed, epoch : int of 0 or more.
    numbers : int64[samples], numbers of the samples.

    Examples
    --------
    >>> seeds = sample_seeds(1, 0, np.arange(1000))
    >>> len(set(seeds.tolist())), bool((seeds == sample_seeds(1, 1, np.arange(1000))).any())
    (1000, False)
    """
    mixed = numbers.astype(np.uint64) + random_words(1, seed, epoch)
    _hash(mixed)
    mixed >>= np.uint64(1)
    return mixed.view(np.int64)


class Permutation:
    """Pseudorandom permutation of the integers below ``total``, in memory that does not grow beyond a table.

    Beyond ``TABLE_ITEMS`` items it is a Feistel network of hashes over pairs of digits (Luby and Rackoff, 1988), with
    modular sums in place of exclusive ors, so that there are hardly more pairs than items. Values outside of the range
    are mapped again (cycle walking).

    Parameters
    ----------
    total : number of items.
    key : integers that determine the permutation.

    Examples
    --------
    >>> permutation = Permutation(5, 1, 0)
    >>> sorted(permutation(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, total: int, *key: int) -> None:
        self.total = total
        self._table = permutation(total, *key) if total <= TABLE_ITEMS else None
        self._low = int(np.ceil(np.sqrt(max(1, total))))
        self._high = -(-total // self._low)
        self._keys = random_words(ROUNDS, *key)

    def __call__(self, positions: Integers) -> Integers:
        """Return the item at each position, int64 of the same length."""
        if self._table is not None:
            return self._table[positions]
        items = self._network(positions)
        outside = np.flatnonzero(items >= self.total)
        while len(outside):
            items[outside] = self._network(items[outside])
            outside = outside[items[outside] >= self.total]
        return items

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
    """Mix the bits of the numbers in place, one-to-one: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    shifted = np.empty_like(numbers)
    numbers *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        numbers ^= np.right_shift(numbers, np.uint64(shift), out=shifted)
        numbers *= np.uint64(factor)
    numbers ^= np.right_shift(numbers, np.uint64(31), out=shifted)
