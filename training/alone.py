"""Training that every rank does for itself, because no patch of ours sees it: the user is told."""

from __future__ import annotations

import functools
import logging
from typing import Any

import keras
import tensorflow as tf

from matex_data.training.channel import Channel

log = logging.getLogger("matex_data.training")


class Alone:
    """Watches whether a script takes gradients that are never averaged."""

    def __init__(self, opened: Channel) -> None:
        self._channel = opened
        self._gradients = False
        original = tf.GradientTape.gradient

        @functools.wraps(original)
        def gradient(tape: Any, *args: Any, **kwargs: Any) -> Any:
            self._gradients = True
            return original(tape, *args, **kwargs)

        tf.GradientTape.gradient = gradient

    def tell(self) -> None:
        """At the end of the script."""
        if self._gradients and not self._channel.sums and self._channel.rank == 0:
            log.warning(
                "this script took gradients, but none was averaged: every rank trained on the same data, for itself\n"
                "  remedy: update weights by an optimizer of Keras 3 or tf.compat.v1 (not tf_keras, not by hand), "
                "or average gradients by matex_data.training.allreduce"
            )


def check_backend() -> None:
    """Make sure that Keras computes by TensorFlow.

    Raises
    ------
    SystemExit : it does not.
    """
    if keras.backend.backend() != "tensorflow":
        raise SystemExit(
            f"matex run trains Keras models of the backend tensorflow, not {keras.backend.backend()}\n"
            "  remedy: set KERAS_BACKEND=tensorflow, or leave it out"
        )
