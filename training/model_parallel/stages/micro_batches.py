"""Micro-batches of a batch: consecutive rows, and their number, which may be chosen by the times of the first steps."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.digests import joint_digest
from matex_data.training.exact.rows import batch_size
from matex_data.training.model_parallel.stages.stage import map_tensors

LEAST_ROWS = 32
"""Rows of a micro-batch by default, at least: with fewer, reading the weights takes longer than the multiplications."""


class Batch(NamedTuple):
    """Batch of a replica.

    Attributes
    ----------
    inputs : inputs of the model, flat.
    targets : targets and sample weights, nested.
    digest : checksum of its values; stages that have read other data have another one.
    """

    inputs: list[Any]
    targets: Any
    rows: int
    digest: int

    def rows_of(self, micro_batch: slice) -> tuple[list[Any], Any]:
        """Return inputs and targets of a micro-batch."""
        inputs, targets = map_tensors(lambda x: x[micro_batch], (self.inputs, self.targets))
        return inputs, targets


def read_batch(functional: Any, data: Any) -> Batch:
    """Return a batch as its stages need it.

    Raises
    ------
    PartitionError : it has tensors other than dense ones, or of other numbers of rows.
    """
    data = tf.nest.map_structure(_tensor, data)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    inputs = list(functional._standardize_inputs(x))
    leaves = [leaf for leaf in tf.nest.flatten((y, sample_weight)) if leaf is not None]
    rows = int(batch_size(data))
    for leaf in (*inputs, *leaves):
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0 or leaf.shape[0] != rows:
            raise PartitionError(
                "this batch cannot be divided into micro-batches",
                expected=f"dense tensors of {rows} rows, those of the targets",
                found=f"{type(leaf).__name__} of shape {getattr(leaf, 'shape', None)}",
                remedy="give dense tensors with a row for each sample, or train without stages",
            )
    return Batch(inputs, (y, sample_weight), rows, joint_digest(map(np.asarray, (*inputs, *leaves))))


def _tensor(leaf: Any) -> Any:
    """Return what Keras gives a step as a tensor, of arrays in its precision; None if there is nothing."""
    if leaf is None or isinstance(leaf, tf.experimental.Optional):
        return None
    if tf.is_tensor(leaf):
        return leaf
    array = np.asarray(leaf)
    return tf.convert_to_tensor(array, keras.config.floatx() if array.dtype.kind == "f" else None)


def default_micro_batches(rows: int) -> int:
    """Return the number of micro-batches of at least ``LEAST_ROWS`` rows.

    Examples
    --------
    >>> default_micro_batches(256), default_micro_batches(40), default_micro_batches(5)
    (8, 1, 1)
    """
    return max(1, rows // LEAST_ROWS)


def slices(rows: int, micro_batches: int) -> list[slice]:
    """Return the rows of each micro-batch; those without rows are left out.

    Examples
    --------
    >>> slices(5, 3)
    [slice(0, 1, None), slice(1, 3, None), slice(3, 5, None)]
    """
    ends = [i * rows // micro_batches for i in range(micro_batches + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(ends) if end > begin]


def row_specs(nested: Any) -> Any:
    """Return the specs of nested tensors, for any number of rows."""
    return map_tensors(lambda tensor: tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype), nested)


log = logging.getLogger("matex_data.training")

STEPS = 4  # with a number; the first one is not timed: it allocates memory, and the very first one traces
GAIN = 0.98  # of the time of a step, which twice as many micro-batches have to stay below
CHOICE = "_matex_micro_batches"
"""Attribute of a model: the number that was chosen, with the batch that it was chosen for, as a list."""


class Trial:
    """Choice of the number of micro-batches: from that of the stages on, it is doubled as long as steps get faster.

    Parameters
    ----------
    model : compiled model, which keeps the choice.
    changing : this stage has variables that each micro-batch changes: seeds, moving statistics. If any stage does, the
        weights depend on the number, which therefore is not chosen by time.

    Attributes
    ----------
    count : number of micro-batches of the next step; None: as many as without a choice.
    """

    def __init__(self, model: Any, world: Channel, stages: int, changing: bool) -> None:
        self._model, self._world, self._stages = model, world, stages
        self._batch: list[int] = []
        self._least_rows = 0
        self._times: list[float] = []
        self._tried: dict[int, int] = {}
        (any_changes,) = world.communicator.maximum(int(changing))
        self._done = bool(any_changes)
        self.count: int | None = None if self._done else stages
        if self._done:
            self._say("as without it: each micro-batch changes moving statistics or seeds, and so the weights")

    @contextmanager
    def step(self, own_rows: int, rows: int) -> Iterator[None]:
        """Context manager: a step of training. *Collective*.

        Parameters
        ----------
        own_rows, rows : of the batch of this replica, and of those of all replicas.
        """
        if not self._batch:
            self._begin(own_rows, rows)
        begin = time.perf_counter()
        yield
        if not self._done and rows == self._batch[1]:
            self._times.append(time.perf_counter() - begin)
            if len(self._times) == STEPS:
                self._compare()

    def _begin(self, own_rows: int, rows: int) -> None:
        """Take the choice of an earlier fit, or of a checkpoint, on as many stages and rows. *Collective*."""
        (least,) = self._world.communicator.maximum(-own_rows)
        self._least_rows, self._batch = -least, [self._stages, rows, self._world.size]
        before = vars(self._model).get(CHOICE, [])
        if before[:-1] == self._batch and before[-1] in range(1, max(rows, self._stages) + 1) and not self._done:
            self._choose(before[-1], "as before")

    def _compare(self) -> None:
        """Go on with twice as many micro-batches, or end with the best number. *Collective*."""
        assert self.count is not None
        (slowest,) = self._world.communicator.maximum(int(1e9 * min(self._times[1:])))
        faster = not self._tried or slowest < GAIN * min(self._tried.values())
        self._tried[self.count], self._times = slowest, []
        if faster and 2 * self.count <= self._least_rows:
            self.count *= 2
            return
        found = ", ".join(f"{count}: {nanoseconds / 1e6:.3g} ms" for count, nanoseconds in self._tried.items())
        self._choose(min(self._tried, key=lambda count: self._tried[count]), f"steps took {found}")

    def _choose(self, count: int, reason: str) -> None:
        self.count, self._done = count, True
        object.__setattr__(self._model, CHOICE, [*self._batch, count])
        self._say(f"{count}; {reason}")

    def _say(self, text: str) -> None:
        if self._world.rank == 0:
            log.warning('micro_batches="auto": %s', text)
