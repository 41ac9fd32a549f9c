"""Splits of a data set: by fractions, classes, groups or borders, into sets or into folds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matex_data.errors import PartitionError
from matex_data.index.runs import Samples
from matex_data.mpi.communicator import Communicator, Equal
from matex_data.reading.source import Source
from matex_data.sampling.mixing import Mixture
from matex_data.sampling.permutation import check_seed
from matex_data.sampling.split import Ties, check_folds, check_fractions, check_gap, folds, leave_gaps, split
from matex_data.transforms.joining import join_samples
from matex_data.transforms.strata import Assignment, divide_at, group, stratify

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


@dataclass(frozen=True)
class Unsplit:
    """Samples of a data set, which are to be split.

    Parameters
    ----------
    comm : the ranks that share them.
    samples : of all ranks, ascending.
    ties : samples that belong together.
    source_of : opens files by field.
    mixture : shares of several data sets, each of which is split alone but by groups and borders; None: it is one.
    """

    comm: Communicator
    samples: Samples
    ties: Ties
    source_of: SourceOf
    mixture: Mixture | None = None

    @property
    def _parts(self) -> list[Unsplit]:
        mixture = self.mixture
        assert mixture is not None
        return [replace(self, samples=samples, mixture=None) for samples in mixture.parts(self.samples)]

    def _joined(self, sets: Sequence[Samples]) -> Samples:
        assert self.mixture is not None
        return join_samples(sets, [0] * len(sets), self.mixture.first[-1])

    def split(self, fractions: Sequence[float], options: SplitOptions) -> tuple[Samples, ...]:
        """Return the samples of each set; see ``Dataset.split``. *Collective* if values have to be read."""
        options.check(fractions, self.ties)
        if self.mixture is not None and options.groups is None and options.at is None:
            by_part = [part.split(fractions, options) for part in self._parts]
            return tuple(self._joined(sets) for sets in zip(*by_part, strict=True))
        gap, sections = self._gap(options)
        if not options.by_value:
            return split(self.samples, fractions, options.seed, gap, sections, self.ties.events)
        return leave_gaps(self._assignment(fractions, options).sets(), gap, sections)

    def folds(self, number: int, options: SplitOptions) -> tuple[tuple[Samples, ...], ...]:
        """Return pairs of training and validation; see ``Dataset.kfold``. *Collective* if values have to be read."""
        fractions = [1 / check_folds(number)] * number
        options.check(fractions, self.ties)
        if self.mixture is not None and options.groups is None:
            by_part = [part.folds(number, options) for part in self._parts]
            pairs = zip(*by_part, strict=True)  # of each fold: pairs of all parts
            return tuple(tuple(self._joined(sets) for sets in zip(*of_fold, strict=True)) for of_fold in pairs)
        gap, sections = self._gap(options)
        if not options.by_value:
            return folds(self.samples, number, options.seed, gap, sections, self.ties.events)
        return tuple(self._assignment(fractions, options).pairs())

    def _gap(self, options: SplitOptions) -> tuple[int, Any]:
        """Return the samples to leave out in front of a border, and the sections over which no gap reaches."""
        return (self.ties.overlap, self.ties.sections) if options.gap is None else (check_gap(options.gap), None)

    def _assignment(self, fractions: Sequence[float], options: SplitOptions) -> Assignment:
        """Return the set of each sample by its values. *Collective*."""
        remedy = "call split and kfold with the same arguments on every rank"
        arguments = {"fractions": fractions, **vars(options)}
        self.comm.agree(equal=Equal(arguments, "the ranks split differently", remedy))
        if options.at is not None:
            source, name = self.source_of(options.along)
            return divide_at(source, self.samples, name, options.at, slid=bool(self.ties.overlap))
        check_fractions(fractions)
        choose, wanted = (stratify, options.stratify) if options.stratify is not None else (group, options.groups)
        source, name = self.source_of(wanted)
        return choose(source, self.samples, name, fractions, options.seed)
