"""What a script takes for granted in one process: its random numbers, and that a batch is the same for all ranks."""

from __future__ import annotations

import logging
import random
import secrets
import zlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.training.comm.channel import Channel

log = logging.getLogger("matex_data.training")


def seed_all_ranks(channel: Channel) -> None:
    """Let all ranks draw the same random numbers, also those that the script does not seed. *Collective*.

    So ``np.random.default_rng()`` splits data alike on all ranks. What Python's ``secrets``, ``uuid`` and
    ``tempfile`` draw still differs.
    """
    entropy = channel.host.allgather_object(secrets.randbits(128))[0]
    keras.utils.set_random_seed(entropy % 2**32)
    generators: Any = np.random.bit_generator
    if hasattr(generators, "randbits"):  # what NumPy asks for entropy; its name is no promise
        generators.randbits = random.Random(entropy).getrandbits


class FirstBatchCheck(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Tells the user where the ranks do not get the same first batch, of which each would take its rows."""

    async_safe = True

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._digest = 0
        self._pending = False

    def recording(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The data set, which leaves a digest of its first element here."""
        self._pending = True

        def record(position: Any, element: Any) -> Any:
            leaves = tf.nest.flatten(element, expand_composites=True)
            recorded = tf.cond(position == 0, lambda: tf.numpy_function(self._record, leaves, tf.bool), lambda: True)
            with tf.control_dependencies([recorded]):
                return tf.nest.map_structure(tf.identity, element)

        return dataset.enumerate().map(record)

    def _record(self, *leaves: Any) -> Any:
        digest = 0
        for leaf in leaves:
            values = np.asarray(leaf)
            raw = values.tobytes() if values.dtype != object else repr(values.tolist()).encode()
            digest = zlib.crc32(raw, digest)
        self._digest = digest
        return np.True_

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Compare the digests. *Collective* for the first batch."""
        self.compare()

    def compare(self) -> None:
        """Compare the digests of the first batch, once. *Collective* then."""
        if not self._pending:
            return
        self._pending = False
        if len(set(self._channel.host.allgather_object(self._digest))) > 1 and self._channel.rank == 0:
            log.warning(
                "the ranks do not get the same data, of which each takes its rows of a batch: some samples are used "
                "twice, others never\n"
                "  remedy: seed every source of random numbers with a number, as in random.Random(0), and sort lists "
                "of files"
            )
