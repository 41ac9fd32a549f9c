"""Equal random numbers on all ranks, and a check that all ranks see the same batches."""

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
    """Seed the random generators of all ranks with one number, also for scripts that set no seed. *Collective*.

    ``np.random.default_rng()`` then splits data in the same way on all ranks. Python's ``secrets``, ``uuid`` and
    ``tempfile`` still give different results.
    """
    entropy = channel.host.allgather_object(secrets.randbits(128))[0]
    keras.utils.set_random_seed(entropy % 2**32)
    generators: Any = np.random.bit_generator
    if hasattr(generators, "randbits"):  # NumPy's source of entropy, an undocumented name
        generators.randbits = random.Random(entropy).getrandbits


class FirstBatchCheck(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that warns if the ranks do not get the same first batch, of which each one keeps its rows."""

    async_safe = True

    def __init__(self, channel: Channel) -> None:
        super().__init__()
        self._channel = channel
        self._digest = 0
        self._pending = False

    def recording(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Return the dataset with a step that records a digest of its first element in this callback."""
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
        """Compare the digests of the first batch; warn if they differ. *Collective* at the first call."""
        if not self._pending:
            return
        self._pending = False
        if len(set(self._channel.host.allgather_object(self._digest))) > 1 and self._channel.rank == 0:
            log.warning(
                "the ranks do not get the same batches, of which each rank keeps its rows: samples are used twice or "
                "never\n"
                "  remedy: seed every source of random numbers with a number, as in random.Random(0), and sort lists "
                "of files"
            )
