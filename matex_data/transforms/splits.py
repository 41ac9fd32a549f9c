"""Options of splits of a data set: by fractions, classes, groups or borders, into sets or into folds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matex_data.errors import PartitionError
from matex_data.reading.source import Source
from matex_data.sampling.permutation import check_seed
from matex_data.sampling.split import Ties, check_gap

SourceOf = Callable[[str | None], tuple[Source, str]]
"""Callable that returns opened files that have a field, and its name; of None the coordinate. *Collective*."""


@dataclass(frozen=True)
class SplitOptions:
    """Options of ``Dataset.split`` and ``Dataset.kfold``, see there.

    Parameters
    ----------
    seed, gap, stratify, groups, at, along : see ``Dataset.split``.
    """

    seed: int | None = None
    gap: int | None = None
    stratify: str | None = None
    groups: str | None = None
    at: Sequence[Any] | None = None
    along: str | None = None

    @property
    def by_value(self) -> bool:
        """Return whether the sets depend on values of a field, which have to be read."""
        return any(value is not None for value in (self.stratify, self.groups, self.at))

    def check(self, fractions: Sequence[float], ties: Ties) -> None:
        """Raise ``PartitionError`` if the options exclude each other, or the ties of the samples."""
        if self.seed is not None:
            check_seed(self.seed)
        given = {"stratify=": self.stratify, "groups=": self.groups, "at=": self.at}
        named = [name for name, value in given.items() if value is not None]
        if len(named) > 1:
            raise PartitionError(f"{named[0]} and {named[1]} exclude each other", expected="one of them")
        if self.along is not None and self.at is None:
            raise PartitionError("along= names the field of at=", expected="at=", found=f"along={self.along!r} alone")
        if self.at is not None and (fractions or self.seed is not None):
            other = "fractions" if fractions else "seed="
            raise PartitionError(f"at= and {other} exclude each other", expected="borders, or fractions of the samples")
        if self.stratify is None and self.groups is None:
            return
        if self.gap is not None or ties.overlap:
            raise PartitionError(
                f"{named[0]} leaves no gaps" + (" between windows that share rows" if ties.overlap else ""),
                expected="samples that share no rows, and no gap=",
                remedy="split in the order of time: by fractions, or with at=",
            )
        if self.stratify is not None and ties.events is not None:
            raise PartitionError(
                "stratify= would divide the objects of an event between the sets",
                expected="samples without flatten=, or a split by fractions or groups=, which keeps events whole",
                remedy="leave out stratify=, or split by groups=",
            )

    def gap_of(self, ties: Ties) -> tuple[int, Any]:
        """Return the samples to leave out in front of a border, and the sections over which no gap reaches."""
        return (ties.overlap, ties.sections) if self.gap is None else (check_gap(self.gap), None)
