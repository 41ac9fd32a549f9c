"""Replace the strategies of ``tf.distribute`` by that of one replica: each rank is one replica."""

from __future__ import annotations

import logging
from typing import Any

import tensorflow as tf

from matex_data.training.comm.channel import Channel

log = logging.getLogger("matex_data.training")

SYNCHRONOUS = ("MirroredStrategy", "MultiWorkerMirroredStrategy")


def patch_strategies(channel: Channel) -> None:
    """Replace the strategies that train in parallel themselves; warn at the first use."""
    warned: list[str] = []

    class OneReplica:  # a class, since Keras calls isinstance with it
        def __new__(cls, *_: Any, **__: Any) -> Any:
            if channel.rank == 0 and not warned:
                log.warning("%s: each rank is one replica; gradients are averaged over the ranks", cls.__name__)
            warned.append(cls.__name__)
            return tf.distribute.get_strategy()

    for name in SYNCHRONOUS:
        setattr(tf.distribute, name, type(name, (OneReplica,), {}))
