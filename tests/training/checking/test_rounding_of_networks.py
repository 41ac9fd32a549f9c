"""Self-check of networks that amplify rounding until gradients are others, or in which it decides."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from matex_data.mpi.library import MPI
from matex_data.training.checking.check import SelfCheck
from matex_data.training.checking.report import CheckReport
from matex_data.training.comm.channel import open_channel
from matex_data.training.distributed_model import DistributedModel
from tests.support.ranks import Pool

ROWS, FEATURES, CLASSES = 24, 16, 5


def _amplifying(depth: int) -> Any:
    """Return a network; with 40 layers its first gradients change altogether when the last bits of its weights do."""
    keras.utils.set_random_seed(0)
    hidden: list[Any] = []
    for _ in range(depth):
        hidden += [layers.Dense(FEATURES, "relu"), layers.BatchNormalization(epsilon=1e-5)]
    return keras.Sequential([keras.Input((FEATURES,)), *hidden, layers.Dense(CLASSES)])


def _mean(labels: Any, logits: Any) -> Any:
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


def _sum(labels: Any, logits: Any) -> Any:
    return ops.sum(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


def _of_neighbors(labels: Any, logits: Any) -> Any:
    """Return a loss that combines each row with the next one of the batch."""
    return _mean(labels, logits + ops.roll(logits, 1, 0))


LOSSES = {"mean": _mean, "sum": _sum, "of neighbors": _of_neighbors}


class Kink(layers.Layer):  # type: ignore[misc]
    """Layer with another slope where a weight rounds up, as it does in a batch of all rows at its first value alone."""

    def build(self, shape: Any) -> None:
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x: Any) -> Any:
        rounding = 1e-9 * tf.cast(tf.shape(x)[0], tf.float64)
        return x * tf.where(tf.cast(self.scale, tf.float64) + rounding > 1 + 1e-9 * (ROWS - 1), 2.0, 1.0)


def _kinked() -> Any:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((FEATURES,)), layers.Dense(8, "tanh"), Kink(), layers.Dense(CLASSES)])


def _checked(comm: MPI.Intracomm, loss: str, depth: int) -> tuple[bool, float]:
    """Return whether every rank trains on whole batches after the check, and the change of the weights by it."""
    model = _amplifying(depth) if depth else _kinked()
    model.compile("sgd", LOSSES[loss])
    rng = np.random.default_rng(1)
    x = tf.constant(rng.standard_normal((ROWS, FEATURES), np.float32))
    batch = (x, tf.constant(rng.integers(0, CLASSES, ROWS)))
    with DistributedModel(model, open_channel(comm)) as distributed:
        spec = tuple(tf.TensorSpec(t.shape, t.dtype) for t in batch)
        distributed.prepare(spec, whole_batches=True)
        before = model.get_weights()
        SelfCheck(distributed, "always", CheckReport(comm.rank, comm.size)).before_step(batch, spec)
        return distributed.step.whole, max(abs(a - b).max() for a, b in zip(before, model.get_weights(), strict=True))


@pytest.mark.rank_counts(2, slow=(3,))
@pytest.mark.parametrize(
    ("loss", "depth", "whole"),
    [
        ("mean", 0, False),
        ("of neighbors", 4, True),
        *(
            pytest.param(loss, 40, whole, marks=pytest.mark.slow)  # tracing and checking take 40 s
            for loss, whole in (("mean", False), ("sum", False), ("of neighbors", True))
        ),
    ],
)
def test_rounding_is_told_from_wrong_gradients(pool: Pool, loss: str, depth: int, whole: bool) -> None:
    assert pool.run(_checked, loss, depth) == [(whole, 0.0)] * pool.size
