"""A check that all ranks see the same batches."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.digests import REMEDY, LeafDigest, compared, leaf_digests

log = logging.getLogger("matex_data.training")


class FirstBatchCheck(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that compares the first batches of the ranks, and says if they are not what they have to be.

    Parameters
    ----------
    whole : each rank keeps its rows of a batch that has to be the same on all ranks. Otherwise each rank has its own
        rows, which must not be the same on all ranks.
    of : "training" or "validation", the data of ``fit`` of which ranks have their own rows.
    """

    def __init__(self, channel: Channel, whole: bool = True, of: str = "validation") -> None:
        super().__init__()
        self._channel, self._whole, self._of = channel, whole, of
        self._varied = False
        self._leaves: list[LeafDigest] = []
        self._pending = self._began = False

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
        self._leaves = leaf_digests(list(leaves))
        self._varied = any(leaf.size and bool((leaf != leaf.flat[0]).any()) for leaf in leaves)
        return np.True_

    def set_model(self, model: Any) -> None:
        """Keep no model: TensorFlow keeps ``_record`` as long as the program runs."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Compare the digests before the second step. *Collective* then; ``on_train_batch_end`` may run in a thread."""
        if self._began and self._of == "training":
            self.compare()
        self._began = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compare the digests. *Collective* after the first epoch, if it has one step."""
        if self._of == "training":
            self.compare()

    def on_test_end(self, logs: Any = None) -> None:
        """Compare the digests. *Collective* for the first evaluation."""
        if not self._whole and self._of == "validation":
            self.compare()

    def compare(self) -> None:
        """Compare the digests of the first batch; warn, or raise an error. *Collective* at the first call.

        Raises
        ------
        PartitionError : on all ranks, if they have the same rows, which are no constants.
        """
        if not self._pending:
            return
        self._pending = False
        found = compared(self._channel, self._leaves)
        if not self._whole:
            if found is None and self._varied:
                raise _same_rows(self._of)
            return
        if found is not None and self._channel.rank == 0:
            log.warning(
                "the ranks do not get the same batches, of which each rank keeps its rows: samples are used twice or "
                "never\n"
                "  found: in the first batch, leaf %s\n"
                "  remedy: %s",
                found,
                REMEDY,
            )


def _same_rows(of: str) -> PartitionError:
    """Return the error for "training" or "validation" data of which all ranks give the same rows."""
    twice = {"training": "a step would train on each of them again", "validation": "metrics would count each again"}
    arrays = ", or arrays that each rank has as a whole" if of == "validation" else ""
    return PartitionError(
        f"all ranks have the same rows of {of} data: {twice[of]}",
        expected=f"this rank's rows of every batch{arrays}",
        found="the same first batch on all ranks",
        remedy="md.training.shard(dataset)" + (", or the arrays themselves" if arrays else ""),
    )
