"""Moving statistics of synchronized batch normalization equal those of one process, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import numpy as np
import pytest

from tests.support import problems
from tests.support.ranks import Pool, Pools

BATCH = 12


def _model(renorm: bool = False) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    norm = keras.layers.BatchNormalization(momentum=0.5, renorm=renorm)
    layers = [keras.layers.Dense(8, use_bias=False), norm, keras.layers.ReLU(), Steps(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((problems.FEATURES,)), *layers])
    return problems.compiled(model, keras.optimizers.SGD(0.1, momentum=0.9))


def Steps() -> Any:  # noqa: N802 - Keras is imported by the ranks alone
    import keras

    class _Steps(keras.layers.Layer):  # type: ignore[misc]
        """Layer that counts its training batches."""

        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="seen")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign(self.seen + 1)
            return x

    return _Steps()


def _reference(comm: Any, samples: int, renorm: bool) -> Any:
    model = _model(renorm)
    history = problems.one_process(model, problems.table(samples), BATCH, 3)
    return problems.weights(model), history.history


def _distributed(comm: Any, samples: int, renorm: bool, path: Path | None = None) -> Any:
    import matex_data as md

    model = _model(renorm)
    if path is None:
        data, options = problems.shard(problems.table(samples), BATCH, comm.rank, comm.size), {}
    else:
        data = md.open_dataset(path, inputs="x", targets="y", comm=comm)
        options = {"batch_size": BATCH, "remainder": "keep"}
    history = md.training.fit(model, data, epochs=3, comm=comm, verbose=0, sync_batch_norm=True, **options)
    return problems.weights(model), history.history


@pytest.mark.rank_counts(2, slow=(1, 3))
@pytest.mark.parametrize(("samples", "renorm"), [(37, False), pytest.param(38, True, marks=pytest.mark.slow)])
def test_fewer_rows_than_ranks(ranks: Pools, pool: Pool, samples: int, renorm: bool) -> None:
    (expected, logs), *_ = ranks(1).run(_reference, samples, renorm)
    results = pool.run(_distributed, samples, renorm, timeout=120)
    _compare(results, expected, logs)


@pytest.mark.rank_counts(2, slow=(3,))
def test_remainder_of_a_dataset_is_kept(ranks: Pools, pool: Pool, tmp_path: Path) -> None:
    x, y = problems.table(37)
    with h5py.File(tmp_path / "table.h5", "w") as file:
        file["x"], file["y"] = x, y
    (expected, logs), *_ = ranks(1).run(_reference, 37, False)
    results = pool.run(_distributed, 37, False, tmp_path / "table.h5", timeout=120)
    _compare(results, expected, logs)


def _compare(results: Any, expected: Any, logs: Any) -> None:
    problems.assert_same_weights([weights for weights, _ in results], expected, 2e-5)
    for _, history in results:
        assert history.keys() == logs.keys()
        for key, values in logs.items():
            np.testing.assert_allclose(history[key], values, rtol=2e-5)


CHANNELS, ROWS = 1024, 10


def _moments(comm: Any, channels: int, offset: float) -> tuple[Any, Any, Any, list[int]]:
    """Return mean, variance, the gradient of this rank's rows, and the bytes of the reductions.

    On one rank they are those of all rows. The loss is the square of the normalized rows, weighted by row.
    """
    import keras
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.comm.collectives import Collectives
    from matex_data.training.exact.batch_norm import GlobalMoments
    from matex_data.training.exact.state import step_state
    from matex_data.training.reduction.ops import Reducer

    channel = open_channel(comm)
    layer = keras.layers.BatchNormalization()
    layer.build((None, channels))
    everything = np.random.default_rng(0).normal(offset, 1, (ROWS, channels)).astype(np.float32)
    own = problems.block(ROWS, comm.rank, comm.size)
    rows, sent = tf.constant(everything[own]), []
    weight = len(everything[own]) / ROWS
    scales = tf.constant(np.linspace(1, 2, ROWS, dtype=np.float32)[own][:, None])

    def reduce(collectives: Any, flat: Any, *args: Any, **options: Any) -> None:
        sent.append(flat.nbytes)
        original(collectives, flat, *args, **options)

    original = Collectives.reduce
    with mock.patch.object(Collectives, "reduce", reduce), step_state(channel).step(weight):
        with tf.GradientTape() as tape:
            tape.watch(rows)
            mean, variance = GlobalMoments(layer, Reducer(channel))(rows, None)
            normalized = (rows - mean) * tf.math.rsqrt(variance + 1e-3)
            loss = tf.reduce_mean(tf.reduce_sum(scales * normalized**3, 1))
        gradient = weight * tape.gradient(loss, rows)
    return mean.numpy(), variance.numpy(), gradient.numpy(), [size for size in sent if size > 16]


@pytest.mark.rank_counts(2, 3, slow=(4,))
@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_moments_and_gradients_equal_those_of_all_rows(ranks: Pools, pool: Pool, offset: float) -> None:
    mean, variance, gradient, _ = ranks(1).run(_moments, 5, offset)[0]
    x = np.random.default_rng(0).normal(offset, 1, (ROWS, 5)).astype(np.float32).astype(np.float64)
    np.testing.assert_allclose(mean, x.mean(0), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(variance, x.var(0), rtol=1e-6 if not offset else 1e-4)
    results = pool.run(_moments, 5, offset)
    for other_mean, other_variance, _, _ in results:
        np.testing.assert_allclose(other_mean, mean, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(other_variance, variance, rtol=1e-6 if not offset else 1e-4)
    joined = np.concatenate([own for _, _, own, _ in results])
    np.testing.assert_allclose(joined, gradient, rtol=1e-4 if not offset else 1e-2, atol=1e-5 if not offset else 1e-3)


@pytest.mark.rank_counts(2, 4)
def test_bytes_do_not_grow_with_the_ranks(pool: Pool) -> None:
    """Forward: sums and counts, then squares of deviations; backward: derivatives of the squares and of the sums."""
    for *_, sent in pool.run(_moments, CHANNELS, 0.0):
        assert sent == [4 * CHANNELS * arrays for arrays in (2, 1, 1, 1)]


def _second_derivative(comm: Any) -> Any:
    """Return this rank's rows of the derivative of a penalty of a derivative, as of a Lipschitz penalty."""
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.exact.batch_norm import _sum
    from matex_data.training.exact.state import step_state
    from matex_data.training.reduction.ops import Reducer

    channel = open_channel(comm)
    everything = np.linspace(0.5, 2, 7, dtype=np.float32)
    own = problems.block(7, comm.rank, comm.size)
    rows, weight = tf.constant(everything[own]), len(everything[own]) / 7
    with step_state(channel).step(weight), tf.GradientTape() as outer:
        outer.watch(rows)
        with tf.GradientTape() as inner:
            inner.watch(rows)
            (total,) = _sum(Reducer(channel), tf.reduce_sum(rows**3))
            loss = tf.reduce_mean(rows) * total**2
        penalty = tf.reduce_sum((weight * inner.gradient(loss, rows)) ** 2) / weight
    return (weight * outer.gradient(penalty, rows)).numpy()


def test_sums_are_differentiable_twice(pool: Pool) -> None:
    x = np.linspace(0.5, 2, 7)
    mean, total, squares = x.mean(), (x**3).sum(), 3 * x**2
    gradient = total**2 / 7 + 2 * mean * total * squares
    jacobian = (squares[:, None] + squares) * 2 * total / 7 + 2 * mean * np.outer(squares, squares)
    jacobian += np.diag(12 * mean * total * x)
    np.testing.assert_allclose(np.concatenate(pool.run(_second_derivative)), 2 * jacobian @ gradient, rtol=1e-5)


def test_fit_trains_a_part_that_is_called_for_inference_unless_it_is_frozen() -> None:
    import keras

    from matex_data.training.exact.batch_norm import local_normalizations

    inputs = keras.Input((4,))
    inner = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(name="inner")])
    last = keras.layers.BatchNormalization(name="last")
    model = keras.Model(inputs, last(inner(inputs, training=False)))

    def changed() -> list[str]:
        """Return the layers that normalize by the batch in a step of Keras, which then changes their statistics."""
        layers = [*inner.layers, last]
        before = [layer.moving_variance.numpy() for layer in layers]
        model.compile("sgd", "mse")
        model.fit(np.eye(4), np.eye(4), verbose=0)
        pairs = zip(layers, before, strict=True)
        return [layer.name for layer, value in pairs if not np.array_equal(layer.moving_variance.numpy(), value)]

    def local() -> list[str]:
        return [layer.name for layer in local_normalizations(model)]

    assert local() == changed() == ["inner", "last"]
    inner.trainable = False
    assert local() == changed() == ["last"]
    last.synchronized = True
    assert local() == []
