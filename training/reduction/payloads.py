"""Payloads of collective operations: a dense bucket, or the slices of a sparse gradient."""

from __future__ import annotations

import copy
import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data._types import Array, Integers
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.collectives import Collectives, Op
from matex_data.training.reduction.buckets import Bucket, scaled
from matex_data.training.reduction.graphs import IndexKind, index_parts
from matex_data.training.reduction.rounding import sum_integers, sum_rounded

log = logging.getLogger("matex_data.training")

WHOLE = -1.0
"""Weight that stands for "this batch is whole on every rank": the operation returns its inputs unchanged."""
UNLESS_EQUAL = ", unless all ranks have the same"
"""End of the description of an operation that compares its tensors first."""
DIGEST_BYTES = 16


class Payload(ABC):
    """Tensors that one collective operation takes and returns, and the operation itself."""

    inputs: list[Any]
    dtypes: list[Any]

    def without_tensors(self) -> Payload:
        """Return what can prepare the operation: TensorFlow keeps functions of operations as long as the program runs.

        With its tensors they would keep the graph, and the weights that this reads.
        """
        kept = copy.copy(self)
        for name, value in vars(self).items():
            if any(map(tf.is_tensor, tf.nest.flatten(value))):
                delattr(kept, name)
        return kept

    @abstractmethod
    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        """Copy the inputs; return a *collective* function that communicates and returns the results."""

    @abstractmethod
    def unpack(self, outputs: list[Any]) -> list[Any]:
        """Return the results of the operation as tensors in the shapes and dtypes of those that it reduces."""


class DensePayload(Payload):
    """Dense tensors of one bucket, reduced element by element.

    They are scaled into memory that is used again. TensorFlow packs several tensors, which have static shapes, since
    each input of an operation of Python takes time.

    Parameters
    ----------
    bucket : positions of its tensors in ``tensors``.
    wire_dtype : dtype of 16 bits in which float32 sums are sent; None: as they are.
    unless_equal : leave tensors that are equal on all ranks as they are.

    Attributes
    ----------
    operation : its description, with the shapes and dtypes of its tensors.
    """

    def __init__(
        self,
        channel: Channel,
        bucket: Bucket,
        tensors: Sequence[Any],
        op: Op,
        wire_dtype: np.dtype[Any] | None = None,
        unless_equal: bool = False,
    ) -> None:
        self._channel, self._op, self._sum_dtype, self._unless_equal = channel, op, bucket.dtype, unless_equal
        self._tensors = [tensors[position] for position in bucket.positions]
        self.operation = f"{op} of {[(str(tensor.shape), tensor.dtype.name) for tensor in self._tensors]}"
        self._wire_dtype = wire_dtype if bucket.dtype == np.float32 else None
        if self._wire_dtype is not None:
            self.operation += f" sent as {self._wire_dtype.name}"
        self.operation += UNLESS_EQUAL * unless_equal
        if len(self._tensors) > 1:
            flat = [tf.reshape(tf.cast(tensor, bucket.dtype), [-1]) for tensor in self._tensors]
            self.inputs = [tf.concat(flat, 0)]
        else:
            self.inputs = list(self._tensors)
        self.dtypes = [tensor.dtype for tensor in self.inputs]

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        (array,) = arrays
        nbytes = array.size * self._sum_dtype.itemsize
        out = self._channel.buffers.bytes(nbytes).view(self._sum_dtype).reshape(array.shape)
        scaled(array, None if self._unless_equal or weight == WHOLE else weight, out)
        digest = _digest([out]) if self._unless_equal else None

        def communicate(collectives: Collectives) -> list[Array]:
            if weight != WHOLE:
                self._channel.check_same(f"{self.operation}, {array.shape}", collectives)
                if digest is None:
                    self._reduce(out, collectives)
                elif not _are_equal(digest, weight, collectives):
                    scaled(out, weight, out)
                    self._reduce(out, collectives)
            return [out.astype(array.dtype, copy=False)]

        return communicate

    def is_static(self) -> bool:
        """Return whether these are floats of a static shape, with at least one element."""
        return self._sum_dtype.kind == "f" and bool(self.inputs[0].shape.num_elements())

    def addend(self, weight: Any) -> Any:
        """Return the tensor of this rank that enters the sum over the ranks, in the dtype of the sum."""
        tensor = tf.cast(self.inputs[0], self._sum_dtype)
        return tf.math.multiply_no_nan(tensor, tf.cast(weight, tensor.dtype))

    def _reduce(self, array: Array, collectives: Collectives) -> None:
        if self._wire_dtype is not None:
            sum_rounded(collectives, array.reshape(-1), self._wire_dtype)
        elif array.dtype.kind in "iu" and self._op == "sum":
            sum_integers(collectives, array.reshape(-1))
        else:
            collectives.reduce(array.reshape(-1), self._op, met=not self._unless_equal)

    def unpack(self, outputs: list[Any]) -> list[Any]:
        (whole,) = outputs
        if len(self._tensors) == 1:
            whole.set_shape(self._tensors[0].shape)
            return [whole]
        parts = tf.split(whole, [tensor.shape.num_elements() for tensor in self._tensors])
        pairs = zip(parts, self._tensors, strict=True)
        return [tf.cast(tf.reshape(part, tensor.shape), tensor.dtype) for part, tensor in pairs]


class SparsePayload(Payload):
    """Values, indices and number of rows of one ``tf.IndexedSlices``, gathered from all ranks.

    One process has the slices of all rows of a batch, whose squares Adam adds up. But it has one slice for an index
    that no row determines, such as a position, or that occurs once in a batch: of these the values of the ranks are
    summed.

    Parameters
    ----------
    dense_share : fraction of the variable's rows from which slices are summed as a dense array; None: never.
    unless_equal : leave slices that are equal on all ranks as they are.
    """

    def __init__(self, channel: Channel, slices: Any, dense_share: float | None, unless_equal: bool = False) -> None:
        self._channel, self._slices, self._dense_share, self._unless_equal = channel, slices, dense_share, unless_equal
        shape = slices.dense_shape
        rows = tf.constant(0, tf.int64) if shape is None else tf.cast(shape[0], tf.int64)  # 0: unknown
        parts = index_parts(slices.indices)
        sizes = [tf.size(part, tf.int64) for part, _ in parts] if len(parts) > 1 else []
        self.inputs = [slices.values, slices.indices, rows, *sizes]
        self._kinds, self._eager = [kind for _, kind in parts], tf.executing_eagerly()
        self.dtypes = [slices.values.dtype, slices.indices.dtype]

    def prepare(self, weight: float, arrays: Sequence[Array]) -> Callable[[Collectives], list[Array]]:
        values, indices, rows, *sizes = arrays
        own_values, own_indices = np.array(values), np.array(indices)
        if weight == WHOLE:
            return lambda collectives: [own_values, own_indices]
        own_sizes = np.array(sizes if sizes else indices.size, np.int64).reshape(1, -1) * bool(weight)
        digest = _digest([own_values, own_indices]) if self._unless_equal else None

        def communicate(collectives: Collectives) -> list[Array]:
            by_rows = set(self._kinds) == {"rows"}
            kinds = "" if by_rows else f" with indices by {', '.join(self._kinds)}"
            operation = f"gather slices of {values.shape[1:]}, {values.dtype.str}{kinds}"
            self._channel.check_same(operation + UNLESS_EQUAL * self._unless_equal, collectives)
            if digest is not None and _are_equal(digest, weight, collectives):
                return [own_values, own_indices]
            scaled(own_values, weight, own_values)
            sent = slice(None if weight else 0)
            all_indices = collectives.gather(own_indices[sent])
            if self._dense_share is not None and len(all_indices) >= self._dense_share * int(rows) > 0:
                return _sum_rows(collectives, own_values[sent], own_indices[sent], int(rows))
            all_values = collectives.gather(own_values[sent])
            if self._eager and not self._channel.rank and len(all_indices) > len(own_indices):
                _warn_if_fixed(all_indices, own_indices)
            if by_rows:
                return [all_values, all_indices]
            return joined_parts(all_values, all_indices, collectives.gather(own_sizes), self._kinds)

        return communicate

    def unpack(self, outputs: list[Any]) -> list[Any]:
        values, indices = outputs
        values.set_shape([None, *self._slices.values.shape[1:]])
        indices.set_shape([None])
        return [tf.IndexedSlices(values, indices, self._slices.dense_shape)]


def joined_parts(values: Array, indices: Array, sizes: Integers, kinds: Sequence[IndexKind]) -> list[Array]:
    """Return values and indices of slices as one process has them, from those of all ranks one after the other.

    Parameters
    ----------
    sizes : int64[ranks, parts], slices of each part of a rank; 0 of a rank without rows.
    kinds : of the indices of each part; see ``index_parts``.

    Examples
    --------
    >>> joined_parts(np.array([1.0, 2, 4, 8]), np.array([7, 9, 9, 3]), np.array([[2], [2]]), ["unique"])
    [array([8., 1., 6.]), array([3, 7, 9])]
    """
    if sizes.sum() != len(indices):
        return [values, indices]  # parts of other sizes than they seem to have
    borders = np.cumsum(sizes).reshape(sizes.shape)
    parts = []
    for part, kind in enumerate(kinds):
        held = [slice(end - size, end) for size, end in zip(sizes[:, part], borders[:, part], strict=True) if size]
        found = [np.concatenate([array[one] for one in held] or [array[:0]]) for array in (values, indices)]
        alike = len({indices[one].tobytes() for one in held}) <= 1
        if kind == "unique":
            found = _sum_equal(*found)
        elif kind == "fixed" and alike and held:
            found = [found[0].reshape(len(held), -1, *values.shape[1:]).sum(0), indices[held[0]]]
        parts.append(found)
    return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]


def _sum_equal(values: Array, indices: Array) -> list[Array]:
    """Return the sums of the values with equal indices, and these."""
    found, position = np.unique(indices, return_inverse=True)
    total = np.zeros((len(found), *values.shape[1:]), values.dtype)
    np.add.at(total, position, values)
    return [total, found]


_warned: list[bool] = []


def _warn_if_fixed(all_indices: Array, own: Array) -> None:
    """Warn once if an eager step has slices with the same indices on all ranks, which no row may determine."""
    if not _warned and np.array_equal(all_indices, np.tile(own, len(all_indices) // max(len(own), 1))):
        _warned.append(True)
        log.warning(
            "an eager step has a sparse gradient with the same indices on all ranks. If they are not computed from "
            "rows, as positions (Embedding of arange), optimizers that square gradients, such as Adam, square those "
            "of each rank by themselves: the result is not that of one process\n"
            "  remedy: compute the step in a tf.function, whose graph tells where indices come from"
        )


def _digest(arrays: Sequence[Array]) -> Integers:
    """Return a digest of shapes and bytes of arrays, int64[4]; it takes 1 to 2 ns per byte."""
    digest = hashlib.blake2b(repr([array.shape for array in arrays]).encode(), digest_size=DIGEST_BYTES)
    for array in arrays:
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return np.frombuffer(digest.digest(), np.uint32).astype(np.int64)


def _are_equal(digest: Integers, weight: float, collectives: Collectives) -> bool:
    """Return whether all ranks have this digest; False if the weights of all ranks are 0. *Collective*."""
    *equal, alike = collectives.same(np.append(digest, weight != 0), met=True)
    return all(equal) and not (alike and weight == 0)


def _sum_rows(collectives: Collectives, values: Array, indices: Array, rows: int) -> list[Array]:
    """Return all rows of the dense sum, and their indices. *Collective*."""
    total = np.zeros((rows, *values.shape[1:]), values.dtype)
    np.add.at(total, indices, values)
    collectives.reduce(total.reshape(-1))
    return [total, np.arange(rows, dtype=indices.dtype)]
