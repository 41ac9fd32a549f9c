"""Equal values of variables on several ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data.training.comm.channel import Channel
from matex_data.training.partition.parts import channels_of
from matex_data.training.reduction.buckets import plan_buckets


def broadcast_in(channel: Channel, variables: list[Any], root: int = 0) -> None:
    """Broadcast the values of variables from rank ``root`` of a channel. *Collective*.

    Variables of which the ranks of this channel hold different parts keep them.

    Parameters
    ----------
    variables : Keras or TensorFlow variables.

    Raises
    ------
    RuntimeError : on all ranks, if the ranks have different variables.
    """
    if channel.size == 1:
        return
    variables = [v for v in variables if channel not in channels_of(v)]
    shapes = [(tuple(variable.shape), str(variable.dtype)) for variable in variables]
    channel.check_same(f"broadcast {shapes} from rank {root}")
    sizes = [math.prod(variable.shape) * tf.as_dtype(variable.dtype).size for variable in variables]
    for bucket in plan_buckets(sizes, [np.dtype(np.uint8)] * len(sizes)):
        together = [variables[position] for position in bucket.positions]
        values = [np.ascontiguousarray((v if hasattr(v, "numpy") else v.value).numpy()) for v in together]
        packed = np.concatenate([value.reshape(-1).view(np.uint8) for value in values])
        channel.host.broadcast(packed, root)
        if channel.rank == root:
            continue
        parts = np.split(packed, np.cumsum([value.nbytes for value in values])[:-1])
        for variable, value, part in zip(together, values, parts, strict=True):
            variable.assign(part.view(value.dtype).reshape(variable.shape))
