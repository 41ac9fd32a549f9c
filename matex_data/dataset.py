"""``Dataset``: what the user holds. A choice of samples of some files, and the ways to get at them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from matex_data.batches import Batches
from matex_data.elements import Elements
from matex_data.errors import PartitionError
from matex_data.fields import Schema
from matex_data.partition import check_ranks
from matex_data.passes import MemoryPasses, ReadPasses
from matex_data.profile import Profile
from matex_data.runs import Runs
from matex_data.sizing import block_borders, schedule
from matex_data.source import Source
from matex_data.splitting import split
from matex_data.statistics import Statistics, statistics

if TYPE_CHECKING:
    import tensorflow as tf

State = Mapping[str, int]


class Dataset:
    """Samples of one or more files, shared out among the ranks.

    Parameters
    ----------
    source : the opened files.
    elements : what a batch looks like.
    samples : the samples that belong to it, in ascending order; None: all.
    """

    def __init__(self, source: Source, elements: Elements, samples: Runs | None = None) -> None:
        self._source = source
        self._elements = elements
        self._samples = samples or Runs(np.array([0]), np.array([len(source.index)]))

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
        shuffle: bool = False,
        seed: int | None = None,
        remainder: str = "drop",
        start: State | None = None,
    ) -> Batches:
        """This rank's share of every global batch, as NumPy arrays. *Collective*.

        Parameters
        ----------
        batch_size : samples of a global batch, that is over all ranks; the number of ranks divides it.
        shuffle : another order in every epoch; otherwise the order of the files.
        seed : fixes the orders of all epochs; None: drawn on rank 0.
        remainder : what becomes of the samples that do not fill a batch. "drop": left out of this epoch. "pad":
            filled up with zeros of sample weight 0. "keep": a smaller batch, which may be empty on some ranks.
        start : where to go on, from ``state``.

        Returns
        -------
        Elements of arrays of shape (batch_size / ranks, *field shape). One pass is one epoch.

        Raises
        ------
        PartitionError : the ranks cannot share the batch equally, or ``start`` belongs to other data.
        """
        comm = self._source.comm
        check_ranks(batch_size, comm.size)
        if shuffle and seed is None:
            seed = comm.broadcast(int(np.random.SeedSequence().generate_state(1)[0]))
        plan = schedule(
            self._samples,
            block_borders(self._source.index),
            batch_size,
            self._source.row_bytes,
            self._source.window_bytes,
            seed=seed if shuffle else None,
            remainder=remainder,
        )
        step = self._step_of(start)
        kind = MemoryPasses if self._source.cache == "memory" else ReadPasses
        return Batches(kind(self._source, plan), self._elements, step)

    def tf_dataset(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        remainder: str = "drop",
        start: State | None = None,
    ) -> tf.data.Dataset:
        """The same as ``batches``, as a ``tf.data.Dataset`` of known element spec and cardinality. *Collective*.

        A data set that starts in mid-epoch has unknown cardinality: its first pass is shorter than the others.
        Parameters, errors and order are those of ``batches``.
        """
        from matex_data.tfdata import as_tf_dataset

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

    def state(self, step: int) -> dict[str, int]:
        """Where a run stands after ``step`` global batches, counted from the first batch of epoch 0.

        Give it to ``tf_dataset(start=...)`` with the same batch size, seed and remainder, on any number of ranks, and
        the next batch is the one that would have come. It can be stored as JSON.
        """
        return {"step": int(step), "samples": len(self)}

    def _step_of(self, start: State | None) -> int:
        if start is None:
            return 0
        if start.get("samples") != len(self) or start.get("step", -1) < 0:
            raise PartitionError(
                "this state is not one of this data set",
                expected=f"a state of {len(self)} samples, from Dataset.state(step)",
                found=dict(start),
                remedy="resume with the files, and the split, that the run began with",
            )
        return int(start["step"])
