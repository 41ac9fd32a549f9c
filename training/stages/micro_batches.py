"""Micro-batches of a batch: consecutive rows, of numbers that differ by one at most."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.exact.rows import batch_size
from matex_data.training.stages.messages import memory_of
from matex_data.training.stages.stage import Targets

LEAST_ROWS = 32
"""Rows of a micro-batch by default, at least: with fewer, reading the weights takes longer than the multiplications."""


class Batch(NamedTuple):
    """Batch of a replica.

    Attributes
    ----------
    inputs : inputs of the model, flat.
    targets : targets and sample weights.
    rows : number of its samples.
    digest : checksum of its values; stages that have read other data have another one.
    """

    inputs: list[Any]
    targets: Targets
    rows: int
    digest: int

    def rows_of(self, micro_batch: slice) -> tuple[list[Any], list[Any]]:
        """Return inputs and targets of a micro-batch."""
        return [x[micro_batch] for x in self.inputs], [y[micro_batch] for y in self.targets.tensors]


def read_batch(functional: Any, data: Any) -> Batch:
    """Return a batch as its stages need it.

    Parameters
    ----------
    functional : model that takes the inputs.
    data : what Keras gives a training step.

    Raises
    ------
    PartitionError : it has tensors other than dense ones, or of other numbers of rows.
    """
    data = tf.nest.map_structure(lambda leaf: None if isinstance(leaf, tf.experimental.Optional) else leaf, data)
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    inputs = list(functional._standardize_inputs(x))
    structure, leaves = numbered((y, sample_weight))
    rows = int(batch_size(data))
    for leaf in (*inputs, *leaves):
        if not isinstance(leaf, tf.Tensor) or leaf.shape.rank == 0 or leaf.shape[0] != rows:
            raise PartitionError(
                "this batch cannot be divided into micro-batches",
                expected=f"dense tensors of {rows} rows, those of the targets",
                found=f"{type(leaf).__name__} of shape {getattr(leaf, 'shape', None)}",
                remedy="give dense tensors with a row for each sample, or train without stages",
            )
    return Batch(inputs, Targets(structure, leaves), rows, _digest([*inputs, *leaves]))


def numbered(data: Any) -> tuple[Any, list[Any]]:
    """Return a nested structure with positions in place of its tensors, and the tensors; None stays None."""
    leaves: list[Any] = []

    def number(leaf: Any) -> Any:
        if leaf is None:
            return None
        leaves.append(leaf)
        return len(leaves) - 1

    return tf.nest.map_structure(number, data), leaves


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


def row_specs(tensors: Sequence[Any]) -> list[tf.TensorSpec]:
    """Return the specs of tensors, for any number of rows."""
    return [tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for tensor in tensors]


def _digest(tensors: Sequence[Any]) -> int:
    digest = 0
    for tensor in tensors:
        if tensor.dtype == tf.string:
            memory = np.frombuffer(b"\0".join(tensor.numpy().reshape(-1)), np.uint8)
        else:
            memory = memory_of(tensor)
        digest = zlib.crc32(memory.data, digest)
    return digest
