"""Operations between the ranks of a layer, with gradients, in the order of the program on all ranks.

With layouts all ranks of a layer compute the loss of the same rows. A tensor is either whole, and then equal on all of
them, or cut along its last axis, or a partial sum. Gradients have the form of their tensors, so each change of form has
its counterpart in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.errors import PartitionError
from matex_data.training.comm.channel import open_channel
from matex_data.training.comm.collectives import Collectives
from matex_data.training.exact.digests import joint_digest
from matex_data.training.model_parallel.mesh import Mesh
from matex_data.training.partition.parts import AxisPart
from matex_data.training.reduction.ops import Reducer, gather_rows, run_once
from matex_data.training.zero.optimizer import Totals


class ModelRanks:
    """Ranks that hold parts of the layers of one replica, and the operations between them.

    Parameters
    ----------
    mesh : its axis "model" counts the ranks.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.channel = open_channel(mesh.model)
        self.rank, self.size = self.channel.rank, self.channel.size
        # One sequence for replicas and layers: with two, a rank that waits for a replica could keep its layer waiting.
        self.channel.counters = open_channel(mesh.data).counters
        # Without a gradient; in a scope of its own, since what is computed from one replica's rows stays so.
        self.total = Reducer(self.channel, scope="matex_parts").total

    def totals(self) -> Totals:
        """Return the sums over these ranks, for an optimizer of parts."""
        return [(self.channel, self.total)]

    def copied(self, tensor: Any) -> Any:
        """Return a whole tensor for layers of which each rank computes its units. *Collective* in the backward pass.

        Each rank has the gradient of its own units; their sum is that of the tensor.
        """
        return self._changed(tensor, tf.identity, self.total)

    def summed(self, partial: Any) -> Any:
        """Return the sum of the partial sums of all ranks. *Collective*."""
        return self._changed(partial, self.total, tf.identity)

    def gathered(self, cut: Any, axis: int = -1) -> Any:
        """Return the whole of a tensor that is cut along an axis. *Collective*.

        What follows is computed on all ranks alike; so the gradient of this rank's section is a section of theirs.
        """
        return self._changed(cut, lambda x: self._gather(x, axis), lambda dy: self._section_of_gradient(dy, cut, axis))

    def section(self, whole: Any, axis: int = -1) -> Any:
        """Return this rank's section of a whole tensor. *Collective* in the backward pass."""
        return self._changed(whole, lambda x: self._section(x, axis), lambda dy: self._gather(dy, axis))

    def own_positions(self, numbers: Any, count: int) -> tuple[Any, Any]:
        """Return the positions of numbers among the ``count`` consecutive ones of this rank, and which it has.

        Those of other ranks have position 0, unknown ones -1, which raises an error as they do in one process.
        """
        own = numbers - self.rank * count
        here = (own >= 0) & (own < count)
        known = (numbers >= 0) & (numbers < count * self.size)
        return tf.where(here, own, tf.where(known, tf.zeros_like(own), -tf.ones_like(own))), here

    def check_equal(self, tensors: Sequence[Any]) -> Any:
        """Return an operation that raises an error if tensors differ between the ranks. *Collective*.

        Raises
        ------
        PartitionError : on all ranks, when the operation runs.
        """

        def run(number: Any, *arrays: Array) -> list[Any]:
            self.check_digest(joint_digest(arrays), self.channel.graph)
            return [number, np.True_]

        (checked,) = run_once(self.channel, run, tensors, [tf.bool])
        return checked

    @staticmethod
    def check_digest(digest: int, collectives: Collectives) -> None:
        """Raise ``PartitionError`` on all ranks unless they have rows with the same digest. *Collective*."""
        if not collectives.have_equal(digest):
            raise PartitionError(
                "the ranks of one replica have different rows",
                expected="the same rows on all ranks that hold parts of one replica",
                found="inputs that differ between them",
                remedy="open the data with comm=mesh.data, shuffle with a seed, and seed what else makes the inputs",
            )

    def _changed(self, tensor: Any, forward: Callable[[Any], Any], backward: Callable[[Any], Any]) -> Any:
        @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
        def change(x: Any) -> tuple[Any, Callable[[Any], Any]]:
            return forward(x), backward

        return tf.autograph.experimental.do_not_convert(change)(tensor)

    def _section(self, whole: Any, axis: int) -> Any:
        return AxisPart(self.channel, whole.shape, axis % whole.shape.rank).own(whole)

    def _section_of_gradient(self, gradient: Any, cut: Any, axis: int) -> Any:
        """Return this rank's section of a gradient; that of ``tf.IndexedSlices``, as of an Embedding, as slices."""
        if not isinstance(gradient, tf.IndexedSlices):
            return self._section(gradient, axis)
        values, indices, axis = gradient.values, gradient.indices, axis % cut.shape.rank
        if axis:
            values = self._section(values, axis)
        else:
            indices -= self.rank * cut.shape[0]
            here = (indices >= 0) & (indices < cut.shape[0])
            values, indices = tf.boolean_mask(values, here), tf.boolean_mask(indices, here)
        return tf.IndexedSlices(values, indices, tf.shape(cut))

    def _gather(self, cut: Any, axis: int) -> Any:
        axis %= cut.shape.rank
        order = [axis, *(i for i in range(cut.shape.rank) if i != axis)]
        (rows,) = gather_rows(self.channel, [tf.transpose(cut, order)])
        whole = tf.transpose(rows, [order.index(i) for i in range(cut.shape.rank)])
        whole.set_shape([size * self.size if i == axis else size for i, size in enumerate(cut.shape)])
        return whole
