"""Scripts that ask for a strategy of ``tf.distribute`` get that of one replica: the ranks are the replicas."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from matex_data.training.comm.channel import Channel

log = logging.getLogger("matex_data.training")

SYNCHRONOUS = ("MirroredStrategy", "MultiWorkerMirroredStrategy")


def patch_strategies(channel: Channel) -> None:
    """Replace the strategies that train in parallel themselves. The user is told of the first that is asked for."""
    warned: list[str] = []

    class OneReplica:  # a class, since Keras asks what is an instance of it
        def __new__(cls, *_: Any, **__: Any) -> Any:
            if channel.rank == 0 and not warned:
                log.warning("%s: each rank is one replica; gradients are averaged over the ranks", cls.__name__)
            warned.append(cls.__name__)
            return tf.distribute.get_strategy()

    for name in SYNCHRONOUS:
        setattr(tf.distribute, name, type(name, (OneReplica,), {}))
