"""What one collective operation does with its tensors: copy them, communicate, give the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.collectives import Collectives, Op
from matex_data.training.reduction.buckets import Bucket, pack

WHOLE = -1.0
"""Weight of a batch that all ranks have as a whole: nothing is communicated."""


class Payload:
    """What one operation does: take a private copy of its inputs, then communicate."""

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        """Copy what is needed of the inputs; the result does the rest, *collectively*."""
        raise NotImplementedError

    def dtypes(self, inputs: Sequence[Any]) -> list[Any]:
        """Of the results."""
        raise NotImplementedError

    def restore_shapes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Tell TensorFlow the shapes of the results."""
        raise NotImplementedError


class DensePayload(Payload):
    def __init__(self, channel: Channel, bucket: Bucket, op: Op) -> None:
        self.channel, self.bucket, self.op = channel, bucket, op

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        if weight == WHOLE:
            return _local_copies(arrays)
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
    def __init__(self, channel: Channel, dense_share: float | None) -> None:
        self.channel, self.dense_share = channel, dense_share

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        values, indices, rows = arrays
        if weight == WHOLE:
            return _local_copies([values, indices])
        _, (local_values,) = pack([values if weight else values[:0]], values.dtype, weight)
        local_indices = np.array(indices if weight else indices[:0])

        def communicate(collectives: Collectives) -> list[Array]:
            self.channel.check_same(f"gather slices of {values.shape[1:]}, {values.dtype.str}", collectives)
            all_indices = collectives.gather(local_indices)
            if self.dense_share is not None and len(all_indices) >= self.dense_share * int(rows) > 0:
                return _sum_rows(collectives, local_values, local_indices, int(rows))
            return [collectives.gather(local_values), all_indices]

        return communicate

    def dtypes(self, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[0].dtype, inputs[1].dtype]

    def restore_shapes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        outputs[0].set_shape([None, *inputs[0].shape[1:]])
        outputs[1].set_shape([None])


def _local_copies(arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
    copies = [np.array(array) for array in arrays]
    return lambda collectives: copies


def _sum_rows(collectives: Collectives, values: Array, indices: Array, rows: int) -> list[Array]:
    """All rows of the dense sum, and their indices."""
    total = np.zeros((rows, *values.shape[1:]), values.dtype)
    np.add.at(total, indices, values)
    collectives.reduce(total.reshape(-1))
    return [total, np.arange(rows, dtype=indices.dtype)]
