"""``Dataset``: what the user holds. A choice of samples of some files, and the ways to get at them."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from matex_data.errors import PartitionError
from matex_data.fields import ElementSpec, Schema
from matex_data.index.runs import Runs
from matex_data.io.counters import Profile
from matex_data.mpi.communicator import pickle_error
from matex_data.pipeline.batches import Batches
from matex_data.pipeline.epochs import Epochs, GlobalEpochs, MemoryEpochs, RowEpochs, StreamedEpochs
from matex_data.pipeline.source import Source
from matex_data.sampling.schedule import Schedule, check_ranks
from matex_data.sampling.sizing import (
    ShuffleQuality,
    block_borders,
    choose_block_bytes,
    estimate_quality,
    make_schedule,
)
from matex_data.sampling.split import split
from matex_data.sampling.state import OPTIONS, Fingerprint, State, identify_samples, read_seed, read_step
from matex_data.transforms.statistics import Statistics, statistics

if TYPE_CHECKING:
    import tensorflow as tf

Shuffle = bool | Literal["global"]
WORST_RATIO = 2.0  # of the shuffle; a worse one is warned of


class Dataset:
    """Samples of one or more files, shared out among the ranks.

    Parameters
    ----------
    source : the opened files.
    elements : what a batch looks like.
    samples : the samples that belong to it, in ascending order; None: all.
    """

    def __init__(self, source: Source, elements: ElementSpec, samples: Runs | None = None) -> None:
        self._source = source
        self._elements = elements
        self._samples = samples or Runs(np.array([0]), np.array([len(source.index)]))
        self._latest: Fingerprint | None = None
        self._seeds: dict[Any, dict[int, bool]] = {}  # of equal batches: each seed, and whether it was drawn

    @property
    def schema(self) -> Schema:
        """The fields of a sample by name."""
        return MappingProxyType(self._source.index.fields)

    @property
    def static(self) -> Mapping[str, NDArray[Any]]:
        """Arrays of the files that belong to no sample, by name."""
        return MappingProxyType(self._source.index.static)

    @property
    def paths(self) -> tuple[str, ...]:
        """The files."""
        return tuple(file.path for file in self._source.index.files)

    @property
    def ranks(self) -> int:
        """How many ranks share the samples."""
        return int(self._source.comm.size)

    def __len__(self) -> int:
        """Samples over all files and ranks."""
        return self._samples.total

    def __repr__(self) -> str:
        fields = ", ".join(f"{f.name}: {f.dtype}{list(f.shape)}" for f in self.schema.values())
        return f"Dataset({len(self)} samples of {len(self._source.index.files)} files; {fields})"

    def split(self, *fractions: float, seed: int | None = None) -> tuple[Dataset, ...]:
        """Disjoint parts that cover all samples, the same for every number of ranks.

        Parameters
        ----------
        fractions : of the samples, that sum to 1.
        seed : draws the samples of each part at random; None: the parts follow one another.

        Raises
        ------
        PartitionError : the fractions are negative or do not sum to 1.
        """
        parts = split(self._samples, fractions, seed)
        return tuple(Dataset(self._source, self._elements, part) for part in parts)

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: Shuffle = False,
        seed: int | None = None,
        remainder: str = "drop",
        start: State | None = None,
    ) -> Batches:
        """This rank's share of every global batch, as NumPy arrays. *Collective*.

        Parameters
        ----------
        batch_size : samples of a global batch, that is over all ranks; the number of ranks divides it.
        shuffle : True: another order in every epoch, of blocks over all data and of samples within a window, which
            ``shuffle_quality`` describes. "global": every epoch is a uniform permutation of all samples; how they come
            is ``global_reads`` of ``open_dataset``. False: the order of the files.
        seed : fixes the orders of all epochs; None: drawn on rank 0.
        remainder : what becomes of the samples that do not fill a batch. "drop": left out of this epoch. "pad":
            filled up with zeros of sample weight 0. "keep": a smaller batch, which may be empty on some ranks.
        start : where to go on, from ``state``; the same on every rank. Its seed is taken where none is given.

        Returns
        -------
        Elements of arrays of shape (batch_size / ranks, *field shape). One pass is one epoch.

        Raises
        ------
        PartitionError : the ranks cannot share the batch equally, ``start`` is the state of other samples, options or
            another order, the ranks do not ask for the same, or a global shuffle finds no memory.
        """
        drawn = bool(shuffle) and seed is None and start is None
        fingerprint, step, failure = None, 0, None
        try:
            fingerprint = self._fingerprint(batch_size, shuffle, seed, remainder, start)
            step = 0 if start is None else read_step(start)
        except PartitionError as error:
            failure = error
        fingerprint = self._begun_alike(fingerprint, step, drawn, failure)
        self._warn(fingerprint)
        passes = self._kind(fingerprint.schedule)(self._source, fingerprint.schedule)
        batches = Batches(passes, self._elements, fingerprint, step)
        self._remember(fingerprint, drawn)
        return batches

    def tf_dataset(
        self,
        batch_size: int,
        *,
        shuffle: Shuffle = False,
        seed: int | None = None,
        remainder: str = "drop",
        start: State | None = None,
    ) -> tf.data.Dataset:
        """The same as ``batches``, as a ``tf.data.Dataset`` of known element spec and cardinality. *Collective*.

        A data set that starts in mid-epoch has unknown cardinality: its first pass is shorter than the others.
        Parameters, errors and order are those of ``batches``.
        """
        from matex_data.pipeline.tfdata import as_tf_dataset

        batches = self.batches(batch_size, shuffle=shuffle, seed=seed, remainder=remainder, start=start)
        return as_tf_dataset(batches, self.schema)

    def load(self) -> dict[str, NDArray[Any]]:
        """This rank's block of the samples, in file order, in memory: field name -> array. *Collective*.

        Raises
        ------
        DataError : of any rank, on every rank.
        """
        return self._source.load(self._samples)

    def statistics(self, *fields: str, axis: int | Sequence[int] | None = None) -> Statistics:
        """Count, missing, mean, standard deviation, least and greatest value of fields. *Collective*.

        One pass, in which each rank reads its share of these fields; no result depends on the number of ranks beyond
        rounding.

        Parameters
        ----------
        fields : names; none: all fields of numbers.
        axis : axes of the batch to keep apart, for example -1 for channels, as in ``keras.layers.Normalization``;
            None: one number for the whole field.

        Raises
        ------
        FieldNotFound : a field is not there.
        FormatError : a field has no numbers, or not that axis.
        """
        return statistics(self._source, self._samples, fields, axis)

    def normalization(self, field: str, axis: int | Sequence[int] | None = -1) -> Any:
        """The ``keras.layers.Normalization`` that gives the field mean 0 and variance 1. *Collective*."""
        return self.statistics(field, axis=axis).normalization(field)

    @property
    def profile(self) -> Profile:
        """Where the time of this rank's passes went so far, over all parts of a split."""
        return self._source.profile

    def state(self, step: int) -> dict[str, Any]:
        """Where a run stands after ``step`` global batches, counted from the first batch of epoch 0.

        Give it to ``tf_dataset(start=...)`` with the options that the run began with, on any number of ranks, and the
        next batch is the one that would have come. It can be stored as JSON.

        It holds the samples, and the options of the latest call of ``batches`` or ``tf_dataset``, the seed that was
        drawn among them: ``start=`` refuses what differs. Without such a call it holds the samples alone.

        Raises
        ------
        PartitionError : batches of equal options were made several times, and a seed drawn for them: which of the
            orders is meant nobody could tell.
        """
        if self._latest is None:
            return {"step": int(step), **self._facts}
        seeds = self._seeds.get(_without_seed(self._latest), {})
        if len(seeds) > 1 and any(seeds.values()):
            raise PartitionError(
                "the state of which batches? This data set was shuffled several times, by seeds that were drawn",
                expected="one seed for all batches of equal options",
                found=f"seeds {sorted(seeds)}",
                remedy="give seed=, or ask for the state of the batches themselves: data.batches(...).state(step)",
            )
        return self._latest.state(step)

    def shuffle_quality(self, batch_size: int) -> ShuffleQuality:
        """Return how well batches that are shuffled by blocks represent data that are sorted. Reads nothing.

        Parameters
        ----------
        batch_size : samples of a global batch.

        Returns
        -------
        Its ``ratio`` is the standard deviation of the share that a class has in a batch, over that of batches drawn
        from all samples alike, for files that are sorted by class; 1 is a shuffle of all samples. The other figures,
        ``blocks_per_window`` above all, are what it follows from.

        Raises
        ------
        PartitionError : a batch size below 1.
        """
        return estimate_quality(self._in_passes(self._schedule(batch_size, 0, "drop")), self._source.row_bytes)

    def _schedule(self, batch_size: int, seed: int | None, remainder: str, uniform: bool = False) -> Schedule:
        source = self._source
        total_bytes = len(source.index) * source.row_bytes
        blocks = source.block_bytes or choose_block_bytes(max(1, batch_size), source.window_bytes, total_bytes)
        return make_schedule(
            self._samples,
            block_borders(source.index, blocks),
            int(batch_size),
            source.row_bytes,
            source.window_bytes,
            seed=seed,
            remainder=remainder,
            uniform=uniform,
        )

    def _in_passes(self, plan: Schedule) -> Schedule:
        """Return the schedule as it is passed over: what is kept in memory is shuffled as a whole."""
        kept = self._source.cache == "memory" and not plan.uniform
        return replace(plan, window_steps=max(1, plan.steps)) if kept else plan

    def _kind(self, plan: Schedule) -> type[Epochs]:
        if plan.uniform:
            return RowEpochs if self._source.global_reads == "rows" else GlobalEpochs
        return MemoryEpochs if self._source.cache == "memory" else StreamedEpochs

    def _warn(self, fingerprint: Fingerprint) -> None:
        """Warn once, on rank 0, that sorted files are shuffled badly."""
        source, plan = self._source, fingerprint.schedule
        if plan.seed is None or plan.uniform or source.comm.rank or source.warned:
            return
        found = estimate_quality(self._in_passes(plan), source.row_bytes)
        if found.ratio > WORST_RATIO:
            source.warned = True
            warnings.warn(
                f"batches of files that are sorted (by class, run or time) would not be well mixed: {found}. "
                f"{found.remedy}",
                stacklevel=3,
            )

    @cached_property
    def _facts(self) -> dict[str, Any]:
        return identify_samples(self._source.index, self._elements, self._samples)

    def _fingerprint(
        self, batch_size: int, shuffle: Shuffle, seed: int | None, remainder: str, start: State | None
    ) -> Fingerprint:
        check_ranks(batch_size, self._source.comm.size)
        if isinstance(shuffle, str) and shuffle != "global":
            raise PartitionError("no such shuffle", expected='True, False or "global"', found=repr(shuffle))
        if start is not None:
            read_step(start)
        if shuffle and seed is None:
            seed = int(np.random.SeedSequence().generate_state(1)[0]) if start is None else read_seed(start)
        plan = self._schedule(
            batch_size, int(seed) if shuffle and seed is not None else None, remainder, uniform=shuffle == "global"
        )
        fingerprint = Fingerprint(self._facts, plan, self._source.cache)
        if start is not None:
            fingerprint.check(start)
        return fingerprint

    def _begun_alike(
        self, fingerprint: Fingerprint | None, step: int, drawn: bool, failure: PartitionError | None
    ) -> Fingerprint:
        """Make sure that all ranks begin with the same batch, and take the seed that rank 0 has drawn. *Collective*.

        Raises
        ------
        PartitionError : the failure of the lowest rank that has one, or what differs.
        """
        options = {} if fingerprint is None else {"step": step, **fingerprint.options}
        seed = options.pop("seed", None)
        said = (pickle_error(failure), {**options, "seed": "drawn" if drawn else seed}, seed)
        comm = self._source.comm
        needs_others = drawn or not comm.alone  # a forked process cannot ask for a seed, and is told so
        everyone = comm.allgather(said) if needs_others else [said]
        first = next((error for error, *_ in everyone if error is not None), None)
        if first is not None:
            raise pickle.loads(first) from failure
        assert fingerprint is not None
        for rank, (_, other, _) in enumerate(everyone):
            differ = [name for name in ("step", *OPTIONS) if other[name] != everyone[0][1][name]]
            if differ:
                raise PartitionError(
                    "the ranks do not ask for the same batches",
                    expected="on every rank " + ", ".join(f"{name}={everyone[0][1][name]!r}" for name in differ),
                    found=f"on rank {rank} " + ", ".join(f"{name}={other[name]!r}" for name in differ),
                    remedy="give the same options, and the same start=, on every rank",
                )
        return replace(fingerprint, schedule=replace(fingerprint.schedule, seed=everyone[0][2]))

    def _remember(self, fingerprint: Fingerprint, drawn: bool) -> None:
        self._latest = fingerprint
        if fingerprint.schedule.seed is not None:
            seeds = self._seeds.setdefault(_without_seed(fingerprint), {})
            seeds[fingerprint.schedule.seed] = drawn or seeds.get(fingerprint.schedule.seed, False)


def _without_seed(fingerprint: Fingerprint) -> tuple[int, str, bool]:
    """What batches of one data set have in common for which ``start=`` would see no difference but the seed."""
    return fingerprint.schedule.batch_size, fingerprint.schedule.remainder, fingerprint.schedule.uniform
