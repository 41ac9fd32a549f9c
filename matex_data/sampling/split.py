"""Split a data set: training, validation, test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from matex_data._types import Integers
from matex_data.errors import PartitionError
from matex_data.index.runs import Chosen, Runs, Samples, join_runs, sort
from matex_data.sampling.permutation import check_seed, permutation, whole_number
from matex_data.sampling.schedule import rank_range


@dataclass(frozen=True, eq=False)
class Ties:
    """Samples that belong together, so that a split does not divide them.

    Parameters
    ----------
    overlap : number of samples behind a sample that are made of rows of its own, as neighbouring windows are.
    sections : int64[n], first sample of each series of samples, ascending; those of two series share no rows. None: one
        series.
    events : samples that begin an event, of which the samples behind are objects, too. None: there are no events.
    slid : samples are sequence windows, also if these share no rows.
    """

    overlap: int = 0
    sections: Integers | None = None
    events: Chosen | None = None
    slid: bool = False


UNITS = 4096  # sections of neighbours that a random split draws from
SECTION_GAPS = 10  # least length of these, in gaps: at most a tenth of the samples is left out


def split(
    runs: Samples,
    fractions: Sequence[float],
    seed: int | None,
    gap: int = 0,
    files: Integers | None = None,
    events: Chosen | None = None,
) -> tuple[Samples, ...]:
    """Split samples into disjoint sets that cover all of them but for the gaps.

    Parameters
    ----------
    runs : samples to split, ascending.
    fractions : of the samples for each set; they sum to 1.
    seed : None: the sets are contiguous, in order. Otherwise they are drawn at random: up to 4,096 samples one by one,
        more in sections of neighbours, so that large files are still read in large ranges. Sections are ten gaps long
        or longer.
    gap : number of samples to leave out where a set borders on another one; those in front of the border.
    files : int64[files], first sample of each file, ascending; no gap reaches over the border of a file. None: gaps
        reach over all borders.
    events : samples that begin an event, whose samples stay together: a border moves behind the last one of them that
        is among ``runs``. None: each sample is an event.

    Returns
    -------
    The samples of each set, ascending; without gaps, their numbers are the fractions of the total, rounded.

    Raises
    ------
    PartitionError : the fractions are negative or do not sum to 1; the seed is no integer of 0 or more, or the gap;
        the gaps leave nothing of a set.

    Examples
    --------
    >>> [subset.total for subset in split(Runs(np.array([0]), np.array([10])), (0.8, 0.2), seed=1)]
    [8, 2]
    >>> [subset.total for subset in split(Runs(np.array([0]), np.array([10])), (0.8, 0.2), seed=None, gap=3)]
    [5, 2]
    """
    check_fractions(fractions)
    total = runs.total
    ends = [0, *(round(total * sum(fractions[: i + 1])) for i in range(len(fractions) - 1)), total]
    sets, gap = _divide(runs, ends, seed, check_gap(gap), events)
    return leave_gaps(sets, gap, files)


def folds(
    runs: Samples,
    number: int,
    seed: int | None,
    gap: int = 0,
    files: Integers | None = None,
    events: Chosen | None = None,
) -> tuple[tuple[Samples, ...], ...]:
    """Return pairs of the samples to train on and those to validate with, a pair for each of ``number`` folds.

    Parameters
    ----------
    runs, seed, gap, files, events : see `split`. Each pair has gaps of its own.

    Raises
    ------
    PartitionError : there are less than two folds; see `split`.

    Examples
    --------
    >>> pairs = folds(Runs(np.array([0]), np.array([5])), 2, seed=None)
    >>> [[samples.numbers(np.arange(samples.total)).tolist() for samples in pair] for pair in pairs]
    [[[3, 4], [0, 1, 2]], [[0, 1, 2], [3, 4]]]
    """
    ends = [rank_range(runs.total, fold, check_folds(number))[0] for fold in range(number)]
    sets, gap = _divide(runs, [*ends, runs.total], seed, check_gap(gap), events)
    return tuple(leave_gaps(pair, gap, files) for pair in pairs_of(sets))


def pairs_of(sets: Sequence[Samples]) -> list[tuple[Samples, Samples]]:
    """Return each set, behind the union of all others."""
    if all(isinstance(samples, Chosen) and samples.positions is not None for samples in sets):
        chosen = [samples for samples in sets if isinstance(samples, Chosen)]
        positions = [samples.positions for samples in chosen if samples.positions is not None]
        return [(chosen[0].with_positions(rest), chosen[i]) for i, (rest, _) in enumerate(_pairs(positions))]
    return list(_pairs([_as_runs(samples) for samples in sets]))


def _pairs(sets: Sequence[Runs]) -> Iterator[tuple[Runs, Runs]]:
    for i, own in enumerate(sets):
        yield sort(join_runs(*sets[:i], *sets[i + 1 :])), own


def check_folds(number: int) -> int:
    """Return a number of folds as Python's integer; raise ``PartitionError`` if it is no integer of 2 or more."""
    return whole_number(number, 2, "there are too few folds", "an integer of 2 or more")


def _divide(
    runs: Samples, ends: Sequence[int], seed: int | None, gap: int, events: Chosen | None
) -> tuple[list[Samples], int]:
    """Return the samples between ``ends``, positions of which sections are shuffled; and the gap to leave."""
    if isinstance(runs, Chosen) and not gap and events is None:
        chosen, everything = runs, Runs.between(0, runs.total)
        return [chosen.at(positions) for positions in _cut(everything, ends, seed, gap, None)], gap
    return list(_cut(_as_runs(runs), ends, seed, gap, events)), gap


def _as_runs(samples: Samples) -> Runs:
    return samples if isinstance(samples, Runs) else samples.part(0, samples.total)


def _cut(runs: Runs, ends: Sequence[int], seed: int | None, gap: int, events: Chosen | None) -> Iterator[Runs]:
    """Yield the samples between ``ends``, ascending."""
    inner = np.array(ends[1:-1], np.int64)
    if seed is None:
        sequence, inner = runs, _snap(runs, inner, events)
    else:
        sections = _shuffled_sections(runs, check_seed(seed), gap, events)
        sequence, before = runs.at(sections), sections.numbers(inner[inner < runs.total])
        inner[inner < runs.total] += _snap(runs, before, events) - before  # a section ends with an event
    for low, high in pairwise([ends[0], *inner.tolist(), ends[-1]]):
        yield sort(sequence.part(low, high))


def _shuffled_sections(runs: Runs, seed: int, gap: int, events: Chosen | None) -> Runs:
    """Return the positions in ``runs``, in a random order of sections."""
    length = max(1, runs.total // UNITS, SECTION_GAPS * gap)
    starts = np.unique(_snap(runs, np.arange(0, runs.total, length, dtype=np.int64), events))
    counts = np.diff(starts, append=runs.total)
    order = permutation(len(starts), seed)
    return Runs(starts[order], counts[order])


def _snap(runs: Runs, positions: Integers, events: Chosen | None) -> Integers:
    """Return the positions in ``runs``, ascending, moved behind the event of the sample in front of them."""
    moving = (positions > 0) & (positions < runs.total)
    if events is None or not moving.any():
        return positions
    behind = runs.numbers(positions[moving] - 1) + 1
    before = events.rank(behind)
    following = runs.rank(events.numbers(np.minimum(before, events.total - 1)))
    moved = positions.copy()
    moved[moving] = np.where(before < events.total, following, runs.total)
    return moved


def check_fractions(fractions: Sequence[float]) -> None:
    """Raise ``PartitionError`` if the fractions of a split are negative, or do not sum to 1."""
    if not fractions or min(fractions) < 0 or not abs(sum(fractions) - 1) <= 1e-6:  # of NaN no comparison is true
        raise PartitionError(
            "the fractions of a split must sum to 1, and none may be negative",
            expected="for example split(0.9, 0.1)",
            found=fractions,
            remedy="divide each by their sum",
        )


def check_gap(gap: int) -> int:
    """Return a gap as Python's integer; raise ``PartitionError`` if it is no integer of 0 or more."""
    return whole_number(gap, 0, "a gap is a number of samples", "gap= an integer of 0 or more")


def leave_gaps(samples: Sequence[Samples], gap: int, files: Integers | None) -> tuple[Samples, ...]:
    """Return the sets without the last ``gap`` samples before each run of another set.

    Parameters
    ----------
    samples : of each set, ascending.
    gap, files : see `split`.

    Raises
    ------
    PartitionError : the gaps leave nothing of a set.
    """
    if not gap:
        return tuple(samples)
    sets = [_as_runs(subset) for subset in samples]
    joined = join_runs(*sets)
    start, count = joined.start, joined.count
    number = np.repeat(np.arange(len(sets)), [len(subset.start) for subset in sets])
    order = np.flatnonzero(count)[np.argsort(start[np.flatnonzero(count)])]
    start, count, number = start[order], count[order], number[order]
    borders = np.flatnonzero(np.diff(number)) + 1  # the runs that another set precedes
    limit = start[borders] - gap
    if files is not None:
        limit = np.maximum(limit, files[np.searchsorted(files, start[borders], side="right") - 1])
    limit = np.append(limit, np.iinfo(np.int64).max)[np.searchsorted(borders, np.arange(len(start)), side="right")]
    kept = np.clip(limit - start, 0, count)
    trimmed: list[Samples] = []
    for i, subset in enumerate(sets):
        own = (number == i) & (kept > 0)
        if subset.total and not own.any():
            raise PartitionError(
                f"the gaps of the split leave nothing of set {i + 1} of {len(sets)}",
                expected=f"sets of more than {gap} samples, of which as many are left out in front of another set",
                found=f"{subset.total} samples",
                remedy="split more samples, into larger fractions or in order (without seed=), or give gap= a smaller "
                "number; windows that begin fewer samples apart share rows",
            )
        trimmed.append(Runs(start[own], kept[own]))
    return tuple(trimmed)
