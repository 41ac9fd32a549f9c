"""Sections: each rank keeps the optimizer's state of its section of every weight, and updates this section alone.

Gradients are summed so that each rank gets those of its sections (reduce-scatter); after the update all ranks get the
sections of all others (allgather). Both send as much as an allreduce sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.collectives import Collectives
from matex_data.training.reduction.buckets import plan_buckets, scaled
from matex_data.training.reduction.ops import run_chained
from matex_data.training.reduction.payloads import WHOLE, Payload
from matex_data.training.reduction.rounding import WIRE_DTYPES, WireDtype, scattered_rounded

LARGE, ALIGNED = 1 << 10, 16
"""Sections of so many elements have a multiple of ``ALIGNED``.

TensorFlow computes the last elements of an array, which fill no vector register, by other instructions, which round
differently in some optimizers. So all elements of a large array but its last ones are updated as within the whole.
"""


class FlatSection:
    """Part of an array: one of equal sections of its elements, the last of which are filled up with zeros.

    Parameters
    ----------
    channel : ranks that hold the sections, in the order of ranks.
    """

    outer: Any = None

    def __init__(self, channel: Channel, shape: Sequence[int]) -> None:
        self.channel, self.shape = channel, tuple(shape)
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.elements = -(-self.size // channel.size)
        if self.elements >= LARGE:
            self.elements += -self.elements % ALIGNED

    def own(self, whole: Array) -> Array:
        flat = np.ravel(whole)[self.channel.rank * self.elements :][: self.elements]
        return np.pad(flat, (0, self.elements - flat.size))

    def join(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)[: self.size].reshape(self.shape)

    def rows(self, whole: Any) -> Any:
        """Return the sections of a whole tensor for all ranks, as rows."""
        flat = tf.reshape(whole, [-1])
        shape = [self.channel.size, self.elements]  # the shape of a gradient need not be known
        return tf.reshape(tf.pad(flat, [[0, self.elements * self.channel.size - self.size]]), shape)

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
    parts: Sequence[FlatSection], gradients: Sequence[Any], weight: Any, wire_dtype: WireDtype | None = None
) -> list[Any]:
    """Return this rank's sections of the sums over all ranks of ``weight`` times each gradient. *Collective*.

    Parameters
    ----------
    gradients : dense tensors, of the shapes of the parts.
    weight : factor of this rank, a number or a scalar tensor.
    wire_dtype : dtype in which float32 sums are sent; None: as they are.
    """
    rows = [part.rows(gradient) for part, gradient in zip(parts, gradients, strict=True)]
    return _communicated(parts, rows, weight, True, None if wire_dtype is None else WIRE_DTYPES[wire_dtype])


def gathered_wholes(parts: Sequence[FlatSection], sections: Sequence[Any]) -> list[Any]:
    """Return the whole tensors of which this rank has these sections. *Collective*."""
    rows = _communicated(parts, [tf.reshape(section, [1, -1]) for section in sections], 1.0, False)
    return [part.whole(found) for part, found in zip(parts, rows, strict=True)]


def _communicated(
    parts: Sequence[FlatSection], rows: Sequence[Any], weight: Any, sums: bool, wire_dtype: np.dtype[Any] | None = None
) -> list[Any]:
    """Return sums or all rows of sections, which are packed into buckets. *Collective*."""
    channel = parts[0].channel
    dtypes = [np.dtype(tensor.dtype.as_numpy_dtype) for tensor in rows]
    buckets = plan_buckets([part.elements * channel.size for part in parts], dtypes)
    payloads = [SectionPayload(channel, [rows[p] for p in b.positions], b.dtype, sums, wire_dtype) for b in buckets]
    outputs = run_chained(channel, payloads, tf.convert_to_tensor(weight, tf.float64))
    found: dict[int, Any] = {}
    for bucket, payload, output in zip(buckets, payloads, outputs, strict=True):
        found.update(zip(bucket.positions, payload.unpack(output), strict=True))
    return [found[position] for position in range(len(rows))]


class SectionPayload(Payload):
    """Sections of several tensors, sent as one: each rank gets its row of their sum, or all ranks the rows of all.

    Parameters
    ----------
    rows : tensors of shape (ranks, elements) to be summed, or (1, elements) to be gathered.
    wire_dtype : dtype of 16 bits in which float32 sums are sent; None: as they are.
    """

    def __init__(
        self, channel: Channel, rows: Sequence[Any], dtype: Any, sums: bool, wire_dtype: np.dtype[Any] | None
    ) -> None:
        self._channel, self._rows, self._sums = channel, rows, sums
        self._wire_dtype = wire_dtype if dtype == np.float32 else None
        alike = not sums and len({tensor.dtype for tensor in rows}) == 1
        packed = [tensor if alike else tf.cast(tensor, dtype) for tensor in rows]
        self.inputs = [tf.concat(packed, 1) if len(packed) > 1 else packed[0]]
        self.dtypes = [self.inputs[0].dtype]
        shapes = [(str(tensor.shape), tensor.dtype.name) for tensor in rows]
        self._operation = f"{'sum' if sums else 'gather'} sections {shapes}, sent as {self._wire_dtype or 'they are'}"

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        (array,) = arrays
        rows = np.empty(array.shape, array.dtype)
        scaled(array, None if weight == WHOLE else weight, rows)

        def communicate(collectives: Collectives) -> list[Array]:
            if weight == WHOLE:
                return [rows[self._channel.rank]]
            self._channel.check_same(self._operation, collectives)
            if not self._sums:
                return [collectives.allgather(rows[0])]
            if self._wire_dtype is not None:
                return [scattered_rounded(collectives, rows, self._wire_dtype)]
            return [collectives.reduce_scatter(rows)]

        return communicate

    def unpack(self, outputs: list[Any]) -> list[Any]:
        (packed,) = outputs
        sizes = [tensor.shape[1] for tensor in self._rows]
        packed.set_shape([sum(sizes)] if self._sums else [self._channel.size, sum(sizes)])
        parts = tf.split(packed, sizes, -1) if len(sizes) > 1 else [packed]
        return [tf.cast(part, tensor.dtype) for part, tensor in zip(parts, self._rows, strict=True)]
