"""Owners: each rank keeps the optimizer's state of its section of every weight, and updates this section alone.

Gradients are summed so that each rank gets those of its sections (reduce-scatter); after the update all ranks get the
sections of all others (allgather). Both send as much as an allreduce sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.collectives import Collectives
from matex_data.training.reduction.buckets import Bucket, plan_buckets, scaled
from matex_data.training.reduction.ops import run_chained
from matex_data.training.reduction.payloads import WHOLE, Payload
from matex_data.training.reduction.rounding import WIRE_DTYPES, WireDtype, scattered_rounded

LARGE, ALIGNED = 1 << 10, 16
"""Sections of so many elements have a multiple of ``ALIGNED``.

TensorFlow computes the last elements of an array, which fill no vector register, by other instructions, which round
differently in some optimizers. So all elements of a large array but its last ones are updated as within the whole.
"""


class Flat:
    """Part of an array: one of equal sections of its elements, the last of which are filled up with zeros.

    Parameters
    ----------
    channel : ranks that hold the sections, in the order of ranks.
    shape : of the whole.
    """

    outer: Any = None

    def __init__(self, channel: Channel, shape: Sequence[int]) -> None:
        self.channel, self.shape = channel, tuple(shape)
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.elements = -(-self.size // channel.size)
        if self.elements >= LARGE:
            self.elements += -self.elements % ALIGNED

    def own(self, whole: Array) -> Array:
        """Return this rank's section of a whole array."""
        flat = np.ravel(whole)[self.channel.rank * self.elements :][: self.elements]
        return np.pad(flat, (0, self.elements - flat.size))

    def join(self, parts: Sequence[Array]) -> Array:
        """Return the whole of the sections of all ranks."""
        return np.concatenate(parts)[: self.size].reshape(self.shape)

    def rows(self, whole: Any) -> Any:
        """Return the sections of a whole tensor for all ranks, as rows."""
        flat = tf.reshape(whole, [-1])
        return tf.reshape(tf.pad(flat, [[0, self.elements * self.channel.size - self.size]]), [self.channel.size, -1])

    def section(self, whole: Any) -> Any:
        """Return this rank's section of a whole tensor; that of ``tf.IndexedSlices`` as slices of single elements.

        Rows that occur twice stay two: optimizers square each of them, not their sum.
        """
        if not isinstance(whole, tf.IndexedSlices):
            return self.rows(whole)[self.channel.rank]
        width = int(np.prod(self.shape[1:], dtype=np.int64))
        first = tf.cast(whole.indices, tf.int64) * width - self.channel.rank * self.elements
        elements = tf.reshape(first[:, None] + tf.range(width, dtype=tf.int64), [-1])
        own = (elements >= 0) & (elements < self.elements)
        values = tf.boolean_mask(tf.reshape(whole.values, [-1]), own)
        return tf.IndexedSlices(values, tf.boolean_mask(elements, own), tf.constant([self.elements], tf.int64))

    def whole(self, rows: Any) -> Any:
        """Return the whole tensor of the sections of all ranks."""
        return tf.reshape(tf.reshape(rows, [-1])[: self.size], self.shape)


def summed_sections(
    parts: Sequence[Flat], gradients: Sequence[Any], weight: Any, wire_dtype: WireDtype | None = None
) -> list[Any]:
    """Return this rank's sections of the sums over all ranks of ``weight`` times each gradient. *Collective*.

    Parameters
    ----------
    gradients : dense tensors, of the shapes of the parts.
    weight : factor of this rank, a number or a scalar tensor.
    wire_dtype : dtype in which float32 sums are sent; None: as they are.
    """
    rows = [part.rows(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    wire = None if wire_dtype is None else WIRE_DTYPES[wire_dtype]
    return _run(parts, rows, partial(Scattered, wire_dtype=wire), weight)


def gathered_wholes(parts: Sequence[Flat], sections: Sequence[Any]) -> list[Any]:
    """Return the whole tensors of which this rank has these sections. *Collective*."""
    rows = _run(parts, [tf.reshape(section, [1, -1]) for section in sections], Gathered, 1.0)
    return [part.whole(found) for part, found in zip(parts, rows, strict=True)]


def _run(parts: Sequence[Flat], rows: Sequence[Any], kind: Callable[..., SectionPayload], weight: Any) -> list[Any]:
    """Return the results of one kind of operation on rows of sections, packed into buckets. *Collective*."""
    channel = parts[0].channel
    dtypes = [np.dtype(tensor.dtype.as_numpy_dtype) for tensor in rows]
    buckets = plan_buckets([part.elements * channel.size for part in parts], dtypes)
    payloads = [kind(channel, bucket, [rows[p] for p in bucket.positions]) for bucket in buckets]
    outputs = run_chained(channel, payloads, tf.convert_to_tensor(weight, tf.float64))
    found: dict[int, Any] = {}
    for bucket, payload, output in zip(buckets, payloads, outputs, strict=True):
        found.update(zip(bucket.positions, payload.unpack(output), strict=True))
    return [found[position] for position in range(len(rows))]


class SectionPayload(Payload):
    """Sections of several tensors, which are sent as one.

    Parameters
    ----------
    bucket : dtype of the operation.
    rows : tensors of shape (rows, elements), with equal numbers of rows.
    """

    def __init__(self, channel: Channel, bucket: Bucket, rows: Sequence[Any]) -> None:
        self._channel, self._sum_dtype, self._rows = channel, bucket.dtype, list(rows)
        cast = [tf.cast(tensor, self.sent_dtype) for tensor in rows]
        self.inputs = [tf.concat(cast, 1) if len(cast) > 1 else cast[0]]
        self.dtypes = [self.inputs[0].dtype]
        self._operation = f"{type(self).__name__} {[(str(t.shape), t.dtype.name) for t in rows]}"

    @property
    def sent_dtype(self) -> Any:
        """Return the dtype of what is sent."""
        return self._rows[0].dtype

    def unpack(self, outputs: list[Any]) -> list[Any]:
        (packed,) = outputs
        sizes = [tensor.shape[1] for tensor in self._rows]
        parts = tf.split(packed, sizes, -1) if len(sizes) > 1 else [packed]
        return [tf.cast(part, tensor.dtype) for part, tensor in zip(parts, self._rows, strict=True)]


class Scattered(SectionPayload):
    """Sums over all ranks, of which each gets its row.

    Parameters
    ----------
    wire_dtype : dtype of 16 bits in which float32 sums are sent; None: as they are.
    """

    def __init__(
        self, channel: Channel, bucket: Bucket, rows: Sequence[Any], wire_dtype: np.dtype[Any] | None = None
    ) -> None:
        super().__init__(channel, bucket, rows)
        self._wire_dtype = wire_dtype if bucket.dtype == np.float32 else None
        if self._wire_dtype is not None:
            self._operation += f" sent as {self._wire_dtype.name}"

    @property
    def sent_dtype(self) -> Any:
        return tf.as_dtype(self._sum_dtype)

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        (array,) = arrays
        rows = np.empty(array.shape, array.dtype)
        scaled(array, None if weight == WHOLE else weight, rows)

        def communicate(collectives: Collectives) -> list[Array]:
            if weight == WHOLE:
                return [rows[self._channel.rank]]
            self._channel.check_same(self._operation, collectives)
            if self._wire_dtype is not None:
                return [scattered_rounded(collectives, rows, self._wire_dtype)]
            return [collectives.reduce_scatter(rows)]

        return communicate

    def unpack(self, outputs: list[Any]) -> list[Any]:
        outputs[0].set_shape([sum(tensor.shape[1] for tensor in self._rows)])
        return super().unpack(outputs)


class Gathered(SectionPayload):
    """Sections of all ranks, as rows."""

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        (array,) = arrays
        row = np.array(array.reshape(-1))

        def communicate(collectives: Collectives) -> list[Array]:
            self._channel.check_same(self._operation, collectives)
            return [collectives.allgather(row)]

        return communicate

    def unpack(self, outputs: list[Any]) -> list[Any]:
        outputs[0].set_shape([self._channel.size, sum(tensor.shape[1] for tensor in self._rows)])
        return super().unpack(outputs)
