"""Variables of a whole model, of which each rank holds some, or parts of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.mpi.library import MPI
from matex_data.training.comm.channel import Channel
from matex_data.training.partition.parts import empty_whole, part_of, whole_at_root, whole_shape


class WholeVariables:
    """Variables of a whole model, each of which rank 0 gets from the ranks that hold it. *Collective*.

    The ranks that hold the parts of a variable join them on the lowest of these, which sends the whole to rank 0.

    Parameters
    ----------
    channel : ranks that have all variables between them.
    described : variables with their paths, shapes and dtypes, the same on all ranks.
    held : for each the Keras variable with its values, or a part of them; None if this rank has none.

    Attributes
    ----------
    holders : lowest rank that holds each variable; the number of ranks if none does.
    """

    def __init__(self, channel: Channel, described: Sequence[Any], held: Sequence[Any]) -> None:
        self._channel, self.described, self.held = channel, described, held
        self.holders = np.array([channel.size if v is None else channel.rank for v in held], np.int64)
        self._cut = np.array([v is not None and part_of(v) is not None for v in held], np.int64)
        if channel.size > 1 and held:
            channel.host.reduce(self.holders, "min")
            channel.host.reduce(self._cut, "max")

    def is_elsewhere(self, number: int) -> bool:
        """Return whether another rank than 0 has a variable, or a part of it."""
        return bool(0 < self.holders[number] < self._channel.size or self._cut[number])

    def at_root(self, number: int) -> Array | None:
        """Return a variable on rank 0, None on others. *Collective* among it and the ranks that hold the variable."""
        holder, variable, whole = int(self.holders[number]), self.held[number], None
        part = None if variable is None else part_of(variable)
        if variable is not None and ((part is not None and part.outer is not None) or self._is_among(holder, part)):
            whole = whole_at_root(variable)
        return at_root(self._channel, holder, whole, self.described[number])

    def wholes(self) -> Iterator[tuple[int, Array]]:
        """Yield the number and the value of each variable on rank 0, nothing on others; each step is *collective*."""
        for number in range(len(self.held)):
            whole = self.at_root(number)
            if whole is not None:
                yield number, whole

    def _is_among(self, holder: int, part: Any) -> bool:
        """Return whether a rank is among those that hold the other parts of a variable, or is this one."""
        if part is None:
            return holder == self._channel.rank
        group = part.channel.user.group
        return bool(self._channel.user.group.Translate_ranks([holder], group)[0] != MPI.UNDEFINED)


def at_root(
    channel: Channel, holder: int, array: Array | None, described: Any, rows: Sequence[int] = ()
) -> Array | None:
    """Return on rank 0 the array of another rank, None elsewhere. *Collective* among the two.

    Parameters
    ----------
    described : variable with the shape and dtype of the array.
    rows : axes of the array before those of the variable.
    """
    if holder == 0 or channel.rank not in (0, holder):
        return array if channel.rank == 0 else None
    empty = empty_whole(described)
    value = np.empty((*rows, *empty.shape), empty.dtype) if array is None else np.ascontiguousarray(array)
    channel.subset((0, holder)).host.broadcast(value.reshape(-1), 1)
    return value if channel.rank == 0 else None


def whole_optimizer(optimizer: Any, variables: Sequence[Any]) -> Any:
    """Return a new optimizer of this kind, built for these variables.

    Its variables are in a graph that never runs, so that they have paths, shapes and dtypes, but no memory.

    Parameters
    ----------
    variables : Keras variables, of which some may have no values.

    Examples
    --------
    >>> import keras
    >>> kernel = keras.Variable(1.0, name="kernel")
    >>> [v.name for v in whole_optimizer(keras.optimizers.SGD(momentum=0.9), [kernel]).variables]
    ['iteration', 'learning_rate', 'kernel_momentum']
    """
    config = optimizer.get_config()
    with tf.Graph().as_default():
        twin = type(optimizer).from_config(config)
        twin.build([_twin(variable) for variable in variables])
        return twin


def _twin(variable: Any) -> Any:
    """Return a variable of the same path, whole shape and dtype in the default graph."""
    twin = keras.Variable("zeros", shape=whole_shape(variable), dtype=variable.dtype, name=variable.name)
    object.__setattr__(twin, "_path", variable.path)
    return twin
