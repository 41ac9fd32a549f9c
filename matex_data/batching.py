"""Batches of a data set: their schedule, the agreement of the ranks on their options, warnings of their costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from matex_data.arguments import check_arguments
from matex_data.epochs.batches import Batches, Epochs, strategy_for
from matex_data.epochs.costs import CHOICE_EFFORT, EpochCosts, estimate_costs
from matex_data.epochs.strategies import read_bytes
from matex_data.errors import PartitionError
from matex_data.index.runs import Samples
from matex_data.locks import cached_property
from matex_data.machine import free_memory
from matex_data.mpi.communicator import Equal
from matex_data.sampling.mixing import MixedSchedule
from matex_data.sampling.permutation import VERSION, check_seed
from matex_data.sampling.schedule import Schedule, check_batch_size, check_ranks
from matex_data.sampling.sizing import (
    ShuffleQuality,
    block_borders,
    choose_block_bytes,
    choose_least_window,
    estimate_quality,
    make_schedule,
    most_window_bytes,
)
from matex_data.sampling.state import (
    Fingerprint,
    State,
    check_step,
    identify_samples,
    read_seed,
    read_step,
    resumed_step,
)
from matex_data.transforms.chained import Selected
from matex_data.warning import warn

Shuffle = bool | Literal["global"]
REMEDY = (
    "give the same options, and the same start=, on every rank, and make the data set by the same calls, such as split "
    "with the same seed="
)
WORST_RATIO = 2.0  # of ``ShuffleQuality``; rank 0 warns of a higher one
WORST_AMPLIFICATION = 1.5  # of ``EpochCosts``; likewise


@dataclass(frozen=True)
class _Proposal:
    """Batches that a rank would make: their order, the first step, and whether ranks read blocks for one another."""

    fingerprint: Fingerprint | None
    step: int = 0
    shared: bool = False

    @property
    def seed(self) -> int:
        """Seed of the order; 0: there is none."""
        return (self.fingerprint and self.fingerprint.schedule.seed) or 0

    def equal(self, drawn: bool) -> Equal:
        """Return what has to be equal on all ranks."""
        made = self.fingerprint
        options = {} if made is None else {"step": self.step, **made.options, **made.samples}
        options.update({"seed": "drawn"} if drawn else {})
        return Equal(options, "the options of the batches, or their samples, differ between the ranks", REMEDY)


_NOTHING = _Proposal(None)


class Batching:
    """Batches of the samples of a data set.

    Parameters
    ----------
    selected : the samples, and the structure of a batch.
    """

    def __init__(self, selected: Selected) -> None:
        self.source, self.elements, self.samples = selected.source, selected.elements, selected.samples
        self.ties, self.mixture = selected.ties, selected.mixture
        self._latest: Fingerprint | None = None
        self._seeds: dict[Any, dict[int, bool]] = {}  # of batches of equal options: each seed, and whether it was drawn
        self._shared: dict[Any, bool] = {}  # of batches of equal options: whether the ranks read blocks for one another

    def batches(
        self, batch_size: int, shuffle: Shuffle, seed: int | None, remainder: str, start: State | None
    ) -> Batches:
        """Return this rank's rows of every batch; see ``Dataset.batches``. *Collective*.

        Raises
        ------
        PartitionError : the error of the lowest rank that has one, or the options that differ between the ranks.
        """
        comm, drawn = self.source.comm, False
        proposal, error = _NOTHING, None
        try:
            proposal = self._proposed(batch_size, shuffle, seed, remainder, start)
            drawn = bool(shuffle) and seed is None and start is None
            if drawn and comm.alone and comm.size > 1:
                _ = comm.mpi  # raises: rank 0 cannot send its seed to a forked process
        except Exception as failure:  # of any kind: the other ranks wait
            error = failure
        decided = comm.of_root(proposal.seed if drawn else 0), comm.of_root(proposal.shared)
        of_root, shared, memory = comm.agree(error, proposal.equal(drawn), [*decided, -free_memory()])
        fingerprint, step = proposal.fingerprint, proposal.step
        assert fingerprint is not None
        if drawn:
            fingerprint = replace(fingerprint, schedule=replace(fingerprint.schedule, seed=of_root))
        nbytes = read_bytes(-memory)
        strategy = strategy_for(self.source, fingerprint.schedule, comm.size, shared > 0 and not comm.alone, nbytes)
        batches = Batches(Epochs(strategy), self.elements, fingerprint, step)
        self._remember(fingerprint, drawn)
        return batches

    def _proposed(
        self, batch_size: int, shuffle: Shuffle, seed: int | None, remainder: str, start: State | None
    ) -> _Proposal:
        """Return the batches that this rank would make of its arguments; rank 0 warns of their costs."""
        check_arguments(Batching.batches, locals(), "Dataset.batches")
        fingerprint = self._fingerprint(batch_size, shuffle, seed, remainder, start)
        step, message = (0, "") if start is None else resumed_step(start, fingerprint.schedule)
        if self.source.comm.rank:
            return _Proposal(fingerprint, step)
        if message:
            warn(message)
        options = (*_without_seed(fingerprint), fingerprint.schedule.seed is None)
        if options not in self._shared:  # to plan windows takes longer than to begin an epoch
            self._shared[options] = self._check_costs(fingerprint.schedule)
        return _Proposal(fingerprint, step, self._shared[options])

    def state(self, step: int) -> dict[str, Any]:
        """Return the state of a run after ``step`` batches; see ``Dataset.state``."""
        if self._latest is None:
            return {"step": check_step(step), "version": VERSION, **self._facts}
        seeds = self._seeds.get(_without_seed(self._latest), {})
        if len(seeds) > 1 and any(seeds.values()):
            raise PartitionError(
                "the state is ambiguous: batches of this data set were shuffled by different seeds that were drawn",
                expected="one seed for all batches of equal options",
                found=f"seeds {sorted(seeds)}",
                remedy="give seed=, or use the state of the batches themselves: data.batches(...).state(step)",
            )
        return self._latest.state(step)

    def quality(self, batch_size: int) -> ShuffleQuality:
        """Return how well a shuffle mixes files that are sorted by class."""
        schedule = self._shuffled_schedule(self._schedule(check_batch_size(batch_size), 0, "drop"))
        return estimate_quality(schedule, self.source.row_bytes)

    def costs(
        self, batch_size: int, ranks: int, shuffle: Shuffle, seed: int, remainder: str, ranks_per_node: int | None
    ) -> EpochCosts:
        """Return what an epoch costs; see ``Dataset.read_plan``."""
        for name, value in (("ranks", ranks), ("ranks_per_node", 1 if ranks_per_node is None else ranks_per_node)):
            if value < 1:
                raise PartitionError(f"{name}= is too small", expected=f"{name}= of 1 or more", found=value)
        schedule = self._batch_schedule(batch_size, ranks, shuffle, check_seed(seed), remainder)
        return estimate_costs(self.source, schedule, ranks, ranks_per_node)

    def _batch_schedule(
        self, batch_size: int, ranks: int, shuffle: Shuffle, seed: int | None, remainder: str
    ) -> Schedule:
        """Return the schedule of batches for a number of ranks; raise ``PartitionError`` if there is none."""
        batch_size = check_batch_size(batch_size)
        check_ranks(batch_size, ranks)
        schedule = self._schedule(batch_size, seed if shuffle else None, remainder, uniform=shuffle == "global")
        if remainder == "drop" and not schedule.full_steps:
            raise PartitionError(
                "there are fewer samples than a batch has, of which an epoch would drop all",
                expected=f"at least {batch_size} samples, as batch_size= says",
                found=f"{self.samples.total} samples",
                remedy='give remainder="keep" or remainder="pad", or a smaller batch_size',
            )
        return schedule

    def _schedule(self, batch_size: int, seed: int | None, remainder: str, uniform: bool = False) -> Schedule:
        source, options = self.source, self.source.options
        total_bytes = len(source.index) * source.row_bytes
        window_bytes = options.window_bytes or most_window_bytes(batch_size, source.row_bytes, total_bytes)
        blocks = options.block_bytes or choose_block_bytes(batch_size, window_bytes, total_bytes)
        borders, least = block_borders(source.index, blocks), choose_least_window(source.index)

        def schedule_of(samples: Samples, size: int) -> Schedule:
            window_bytes = None if options.window_bytes is None else max(1, options.window_bytes * size // batch_size)
            return make_schedule(
                samples,
                borders,
                size,
                source.row_bytes,
                window_bytes,
                seed=seed,
                remainder=remainder,
                uniform=uniform,
                least_window_bytes=least,
                kept_bytes=source.kept_bytes,
            )

        whole = schedule_of(self.samples, batch_size)
        return whole if self.mixture is None else MixedSchedule.of(self.mixture, self.samples, whole, schedule_of)

    def _shuffled_schedule(self, schedule: Schedule) -> Schedule:
        """Return the schedule with the windows in effect: a shard in memory is shuffled as a whole."""
        in_memory = self.source.options.cache == "memory" and not schedule.uniform
        return replace(schedule, window_steps=max(1, schedule.steps)) if in_memory else schedule

    def _check_costs(self, schedule: Schedule) -> bool:
        """Return whether the ranks read blocks for one another; warn once of what an epoch costs."""
        source = self.source
        self._warn_of_order(schedule)
        if source.comm.size == 1 or source.options.cache is not None or schedule.uniform:
            return False
        costs = estimate_costs(source, schedule, source.comm.size, effort=CHOICE_EFFORT)
        self._warn_of_costs(costs)
        return costs.shared

    def _warn_of_order(self, schedule: Schedule) -> None:
        """Warn once if sorted files would not be shuffled well."""
        source = self.source
        if schedule.seed is None or schedule.uniform:
            return
        quality = estimate_quality(self._shuffled_schedule(schedule), source.row_bytes)
        if quality.ratio > WORST_RATIO and "quality" not in source.warned:
            source.warned.add("quality")
            remedy = quality.remedy_for_windows if self.ties.overlap else quality.remedy
            if source.kept_bytes:
                remedy = 'Unpack the files, which are compressed as a whole, write smaller ones or use shuffle="global"'
            warn(
                f"batches of files that are sorted (by class, run or time) would not be well mixed: {quality}. {remedy}"
            )

    def _warn_of_costs(self, costs: EpochCosts) -> None:
        """Warn once if bytes are read again and again."""
        if costs.amplification > WORST_AMPLIFICATION and "costs" not in self.source.warned:
            self.source.warned.add("costs")
            warn(
                f"{costs.ranks:,} ranks read {costs.amplification:.1f} times the bytes of an epoch, and decode as many "
                f"chunks again. {'. '.join(costs.remedies)}"
            )

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return identify_samples(self.source.index, self.elements, self.samples, self.source.transforms)

    def _fingerprint(
        self, batch_size: int, shuffle: Shuffle, seed: int | None, remainder: str, start: State | None
    ) -> Fingerprint:
        if start is not None:
            read_step(start)
        seed = None if seed is None else check_seed(seed)
        if shuffle and seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0]) if start is None else read_seed(start)
        schedule = self._batch_schedule(batch_size, self.source.comm.size, shuffle, seed, remainder)
        fingerprint = Fingerprint(self._facts, schedule, self.source.options.cache)
        if start is not None:
            fingerprint.check(start)
        return fingerprint

    def _remember(self, fingerprint: Fingerprint, drawn: bool) -> None:
        self._latest = fingerprint
        seed = fingerprint.schedule.seed
        if seed is not None:
            seeds = self._seeds.setdefault(_without_seed(fingerprint), {})
            seeds[seed] = drawn or seeds.get(seed, False)


def _without_seed(fingerprint: Fingerprint) -> tuple[int, str, bool]:
    """Return the options of batches that ``start=`` compares, without the seed."""
    return fingerprint.schedule.batch_size, fingerprint.schedule.remainder, fingerprint.schedule.uniform
