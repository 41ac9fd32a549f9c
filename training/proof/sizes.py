"""Sizes of axes as products of integers and names, of which one is the number of rows of the batch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

ROWS_NAME = "rows"
"""Name of the number of rows; every other name is a number that all shards of a batch have in common."""
MAYBE_NEGATIVE = "?"
"""First character of the names of integers that may be negative, so that they are no sizes of axes."""


@dataclass(frozen=True)
class Size:
    """Product of an integer and of powers of names.

    Equal products are equal for every value of the names. So what follows from them holds for every batch.

    Parameters
    ----------
    number : integer factor.
    powers : names and their positive exponents, sorted by name.

    Examples
    --------
    >>> Size(1, (("rows", 1),)) * Size(6) / Size(2)
    Size(number=3, powers=(('rows', 1),))
    """

    number: int
    powers: tuple[tuple[str, int], ...] = ()

    def __mul__(self, other: Size) -> Size:
        powers = dict(self.powers)
        for name, power in other.powers:
            powers[name] = powers.get(name, 0) + power
        return Size(self.number * other.number, tuple(sorted(powers.items())))

    def __truediv__(self, other: Size) -> Size | None:
        """Return the quotient, by which ``other`` has to be multiplied to give this size; None if there is none."""
        if other.number == 0 or self.number % other.number:
            return None
        powers = dict(self.powers)
        for name, power in other.powers:
            powers[name] = powers.get(name, 0) - power
        if any(power < 0 for power in powers.values()):
            return None
        return Size(self.number // other.number, tuple(sorted((n, p) for n, p in powers.items() if p)))

    @property
    def integer(self) -> int | None:
        """Return the value, if it is known; else None."""
        return None if self.powers else self.number

    @property
    def has_rows(self) -> bool:
        """Return whether the value depends on the number of rows."""
        return any(name == ROWS_NAME for name, _ in self.powers)

    @property
    def is_axis(self) -> bool:
        """Return whether the value is never negative."""
        return self.number >= 0 and not any(name.startswith(MAYBE_NEGATIVE) for name, _ in self.powers)


ONE = Size(1)
ROWS = Size(1, ((ROWS_NAME, 1),))


def name_size(name: str) -> Size:
    """Return an unknown number, by its name."""
    return Size(1, ((name, 1),))


def product(sizes: Iterable[Size]) -> Size:
    """Return the product of sizes."""
    return math.prod(sizes, start=ONE)
