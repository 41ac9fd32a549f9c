"""Payloads of collective operations: a dense bucket, or the slices of a sparse gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.collectives import Collectives, Op
from matex_data.training.reduction.buckets import Bucket, pack

WHOLE = -1.0
"""Weight that stands for "this batch is whole on every rank": the operation returns its inputs unchanged."""


class Payload:
    """Input tensors of one collective operation, and the operation itself."""

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        """Copy the inputs; return a *collective* function that communicates and returns the results."""
        raise NotImplementedError

    def dtypes(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the dtypes of the results."""
        raise NotImplementedError

    def restore_shapes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Set the static shapes of the results, which ``tf.numpy_function`` loses."""
        raise NotImplementedError


class DensePayload(Payload):
    """Dense tensors of one bucket, reduced element by element."""

    def __init__(self, channel: Channel, bucket: Bucket, op: Op) -> None:
        self.channel, self.bucket, self.op = channel, bucket, op

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        if weight == WHOLE:
            return _copies(arrays)
        flat, views = pack(arrays, self.bucket.dtype, weight)
        dtypes = [array.dtype for array in arrays]
        operation = f"{self.op} of {[(array.shape, array.dtype.str) for array in arrays]}"

        def communicate(collectives: Collectives) -> list[Array]:
            self.channel.check_same(operation, collectives)
            collectives.reduce(flat, self.op)
            return [view.astype(dtype, copy=False) for view, dtype in zip(views, dtypes, strict=True)]

        return communicate

    def dtypes(self, inputs: Sequence[Any]) -> list[Any]:
        return [tensor.dtype for tensor in inputs]

    def restore_shapes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        for tensor, output in zip(inputs, outputs, strict=True):
            output.set_shape(tensor.shape)


class SparsePayload(Payload):
    """Values, indices and number of rows of one ``tf.IndexedSlices``, gathered from all ranks.

    Parameters
    ----------
    dense_share : fraction of the variable's rows from which slices are summed as a dense array; None: never.
    """

    def __init__(self, channel: Channel, dense_share: float | None) -> None:
        self.channel, self.dense_share = channel, dense_share

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        values, indices, rows = arrays
        if weight == WHOLE:
            return _copies([values, indices])
        _, (own_values,) = pack([values if weight else values[:0]], values.dtype, weight)
        own_indices = np.array(indices if weight else indices[:0])

        def communicate(collectives: Collectives) -> list[Array]:
            self.channel.check_same(f"gather slices of {values.shape[1:]}, {values.dtype.str}", collectives)
            all_indices = collectives.gather(own_indices)
            if self.dense_share is not None and len(all_indices) >= self.dense_share * int(rows) > 0:
                return _sum_rows(collectives, own_values, own_indices, int(rows))
            return [collectives.gather(own_values), all_indices]

        return communicate

    def dtypes(self, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[0].dtype, inputs[1].dtype]

    def restore_shapes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        outputs[0].set_shape([None, *inputs[0].shape[1:]])
        outputs[1].set_shape([None])


def _copies(arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
    copies = [np.array(array) for array in arrays]
    return lambda collectives: copies


def _sum_rows(collectives: Collectives, values: Array, indices: Array, rows: int) -> list[Array]:
    """Return all rows of the dense sum, and their indices. *Collective*."""
    total = np.zeros((rows, *values.shape[1:]), values.dtype)
    np.add.at(total, indices, values)
    collectives.reduce(total.reshape(-1))
    return [total, np.arange(rows, dtype=indices.dtype)]
