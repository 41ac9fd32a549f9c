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
    def __init__(self, opened: Channel, bucket: Bucket, op: Op) -> None:
        self.channel, self.bucket, self.op = opened, bucket, op

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        if weight == WHOLE:
            return _unchanged(arrays)
        flat, parts = pack(arrays, self.bucket.dtype, weight)
        dtypes = [array.dtype for array in arrays]
        what = f"{self.op} of {[(array.shape, array.dtype.str) for array in arrays]}"

        def communicate(line: Collectives) -> list[Array]:
            self.channel.agree(what, line)
            line.reduce(flat, self.op)
            return [part.astype(dtype, copy=False) for part, dtype in zip(parts, dtypes, strict=True)]

        return communicate

    def dtypes(self, inputs: Sequence[Any]) -> list[Any]:
        return [tensor.dtype for tensor in inputs]

    def restore_shapes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        for tensor, output in zip(inputs, outputs, strict=True):
            output.set_shape(tensor.shape)


class SparsePayload(Payload):
    def __init__(self, opened: Channel, dense_share: float | None) -> None:
        self.channel, self.dense_share = opened, dense_share

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        values, indices, rows = arrays
        if weight == WHOLE:
            return _unchanged([values, indices])
        _, (mine,) = pack([values if weight else values[:0]], values.dtype, weight)
        where = np.array(indices if weight else indices[:0])

        def communicate(line: Collectives) -> list[Array]:
            self.channel.agree(f"gather slices of {values.shape[1:]}, {values.dtype.str}", line)
            everywhere = line.gather(where)
            if self.dense_share is not None and len(everywhere) >= self.dense_share * int(rows) > 0:
                return _sum_rows(line, mine, where, int(rows))
            return [line.gather(mine), everywhere]

        return communicate

    def dtypes(self, inputs: Sequence[Any]) -> list[Any]:
        return [inputs[0].dtype, inputs[1].dtype]

    def restore_shapes(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        outputs[0].set_shape([None, *inputs[0].shape[1:]])
        outputs[1].set_shape([None])


def _unchanged(arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
    copies = [np.array(array) for array in arrays]
    return lambda line: copies


def _sum_rows(line: Collectives, values: Array, indices: Array, rows: int) -> list[Array]:
    """All rows of the dense sum, and their indices."""
    total = np.zeros((rows, *values.shape[1:]), values.dtype)
    np.add.at(total, indices, values)
    line.reduce(total.reshape(-1))
    return [total, np.arange(rows, dtype=indices.dtype)]
