"""Random orders that are the same on every rank: pure functions of a few integers."""

from __future__ import annotations

import numpy as np

from matex_data.index import Integers

MOST_LANES = 256  # orders that one step may ask for


def generator(*key: int) -> np.random.Generator:
    """A generator of its own for every key."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


class Dice:
    """Orders for the windows of one epoch; seeding a generator for each would cost more than the orders.

    Parameters
    ----------
    seed, epoch : what the orders depend on.
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._bits = np.random.PCG64(np.random.SeedSequence((seed, epoch, 1)))
        self._begin = self._bits.state
        self._generator = np.random.Generator(self._bits)

    def permutation(self, count: int, step: int, lane: int) -> Integers:
        """A random order of ``count`` things: int64[count], the same for the same step and lane."""
        self._bits.state = self._begin
        self._bits.advance((step * MOST_LANES + lane) << 40)  # no order takes more numbers than that
        return self._generator.permutation(count)
