"""Gradients are averaged and sent once, whatever a step computes from the averages; and always where they are local."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

from matex_data import training
from matex_data.mpi.library import MPI
from matex_data.training.average.optimizer import GradientAverage, GradientPatches
from matex_data.training.comm.channel import open_channel
from matex_data.training.comm.collectives import Collectives
from matex_data.training.reduction.ops import Reducer
from tests.support import problems
from tests.support.ranks import Pool, Pools

FEATURES, HIDDEN, BATCH, STEPS = 32, 256, 12, 4
SMALL = 1 << 10
"""Bytes of a step that are no gradients, at most: counts of rows, digests, comparisons of operations."""


@contextlib.contextmanager
def _sent() -> Iterator[list[int]]:
    """Context manager: collect the bytes that this rank sends in each collective operation."""
    sent: list[int] = []

    def recorded(original: Any) -> Any:
        def method(self: Any, flat: Any, *args: Any, **kwargs: Any) -> Any:
            sent.append(flat.nbytes)
            return original(self, flat, *args, **kwargs)

        return method

    with contextlib.ExitStack() as stack:
        for name in ("reduce", "exchange", "gather"):
            stack.enter_context(mock.patch.object(Collectives, name, recorded(getattr(Collectives, name))))
        yield sent


def _clipped(model: Any, tape: Any, loss: Any) -> list[Any]:
    gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.05)
    return gradients


def _decayed(model: Any, tape: Any, loss: Any) -> list[Any]:
    gradients = tape.gradient(loss, model.trainable_variables)
    return [g + 0.01 * v.value for g, v in zip(gradients, model.trainable_variables, strict=True)]


def _kept(model: Any, tape: Any, loss: Any) -> list[Any]:
    """Return the moving average of the gradients, from variables that the model keeps."""
    for kept, gradient in zip(model.kept, tape.gradient(loss, model.trainable_variables), strict=True):
        kept.assign(0.5 * kept + gradient)
    return [kept.value for kept in model.kept]


def _skipped(model: Any, tape: Any, loss: Any) -> list[Any]:
    """Return gradients that a branch of the graph chooses."""
    gradients = tape.gradient(loss, model.trainable_variables)
    norm = tf.linalg.global_norm(gradients)
    return tf.cond(norm < 0.1, lambda: gradients, lambda: [g / norm for g in gradients])  # type: ignore[no-any-return]


STEP_KINDS: dict[str, Callable[..., list[Any]]] = {f.__name__[1:]: f for f in (_clipped, _decayed, _kept, _skipped)}


def _model(kind: str, eagerly: bool) -> Any:
    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            self.optimizer.apply(STEP_KINDS[kind](self, tape, loss), self.trainable_variables)
            return {"loss": loss}

    keras.utils.set_random_seed(1)
    model = Own([keras.Input((FEATURES,)), keras.layers.Dense(HIDDEN, "tanh"), keras.layers.Dense(1)])
    if kind == "kept":
        model.kept = [keras.Variable(tf.zeros(v.shape), trainable=False) for v in model.trainable_variables]
    model.compile(keras.optimizers.SGD(0.3, momentum=0.5), run_eagerly=eagerly)
    return model


def _data(rank: int, size: int) -> Any:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCH * STEPS, FEATURES)).astype("float32")
    y = np.sin(x.sum(1, keepdims=True))
    return problems.shard((x, y), BATCH, rank, size)


def _trained(comm: MPI.Intracomm, kind: str, eagerly: bool, wire_dtype: Any = None) -> tuple[list[Any], int, int]:
    """Return the weights, the bytes sent in an epoch, and those of the gradients of a step."""
    model = _model(kind, eagerly)
    with _sent() as sent:
        training.fit(model, _data(comm.rank, comm.size), comm=comm, verbose=0, wire_dtype=wire_dtype, verify="never")
    return problems.weights(model), sum(sent), sum(4 * v.value.shape.num_elements() for v in model.trainable_variables)


def _alone(comm: MPI.Intracomm, kind: str) -> list[Any]:
    model = _model(kind, eagerly=False)
    model.fit(_data(0, 1), verbose=0)
    return problems.weights(model)


@pytest.mark.openmpi
@pytest.mark.rank_counts(2, slow=(3,))
@pytest.mark.parametrize("eagerly", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in ("decayed", "kept") else ()) for kind in STEP_KINDS]
)
def test_what_a_step_computes_from_averages_is_not_sent(ranks: Pools, pool: Pool, kind: str, eagerly: bool) -> None:
    (expected,) = ranks(1).run(_alone, kind)
    results = pool.run(_trained, kind, eagerly)
    problems.assert_same_weights([weights for weights, _, _ in results], expected)
    for _, sent, gradients in results:
        assert STEPS * gradients <= sent < STEPS * (gradients + SMALL) + 2 * SMALL


@pytest.mark.rank_counts(2)
def test_clipped_averages_are_rounded_once(pool: Pool) -> None:
    """In 16 bits the gradients of a rank are sent once, in two exchanges of their sections and sums."""
    for _, sent, gradients in pool.run(_trained, "clipped", False, "float16"):
        assert sent < STEPS * (0.75 * gradients + SMALL) + 2 * SMALL


def _two_optimizers(comm: MPI.Intracomm, distributed: bool) -> list[Any]:
    """Return the weights of a model whose second optimizer gets gradients from a tape that still records."""

    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
                first, *rest = tape.gradient(loss, self.trainable_variables)
                self.second.apply([first], self.trainable_variables[:1])
            self.optimizer.apply([0.5 * g for g in rest], self.trainable_variables[1:])
            return {"loss": loss}

    keras.utils.set_random_seed(1)
    model = Own([keras.Input((FEATURES,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.second = keras.optimizers.SGD(0.1)
    model.compile(keras.optimizers.SGD(0.2, momentum=0.5))
    model.optimizer.build(model.trainable_variables[1:])
    if distributed:
        training.fit(model, _data(comm.rank, comm.size), comm=comm, verbose=0)
    else:
        model.fit(_data(0, 1), verbose=0)
    return problems.weights(model)


def test_every_optimizer_of_a_model_gets_averages(ranks: Pools, pool: Pool) -> None:
    (expected,) = ranks(1).run(_two_optimizers, False)
    problems.assert_same_weights(pool.run(_two_optimizers, True), expected)


def _of_rows(way: str, model: Any, x: Any, y: Any) -> list[Any]:
    """Return the gradients of each row."""
    variables = model.trainable_variables

    def of_row(row: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(row[0][None]) - row[1]))
        return tape.gradient(loss, variables)

    if way == "jacobian":
        with tf.GradientTape() as tape:
            losses = tf.reduce_sum(tf.square(model(x) - y), 1)
        return tape.jacobian(losses, variables)  # type: ignore[no-any-return]
    if way == "vectorized_map":
        return tf.vectorized_map(of_row, (x, y))  # type: ignore[no-any-return]
    return tf.map_fn(of_row, (x, y), fn_output_signature=[tf.TensorSpec(v.shape, v.dtype) for v in variables])  # type: ignore[no-any-return]


def _rows_clipped(comm: MPI.Intracomm, way: str, distributed: bool) -> list[Any]:
    """Return the weights of a model that clips the gradient of each row by itself."""

    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            by_row = [tf.reshape(g, [tf.shape(g)[0], -1]) for g in _of_rows(way, self, *data)]
            means = [tf.reduce_mean(tf.clip_by_norm(g, 0.1, [1]), 0) for g in by_row]
            shaped = [tf.reshape(g, v.shape) for g, v in zip(means, self.trainable_variables, strict=True)]
            self.optimizer.apply(shaped, self.trainable_variables)
            return {"rows": tf.shape(data[0])[0]}

    keras.utils.set_random_seed(1)
    model = Own([keras.Input((FEATURES,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01))
    if distributed:
        training.fit(model, _data(comm.rank, comm.size), comm=comm, verbose=0, verify="never")
    else:
        model.fit(_data(0, 1), verbose=0)
    return problems.weights(model)


@pytest.mark.rank_counts(2, slow=(3,))
@pytest.mark.parametrize("way", ["jacobian", "map_fn", "vectorized_map"])
def test_gradients_of_rows_are_averaged_after_their_clipping(ranks: Pools, pool: Pool, way: str) -> None:
    (expected,) = ranks(1).run(_rows_clipped, way, False)
    problems.assert_same_weights(pool.run(_rows_clipped, way, True, timeout=60), expected)


def _mixed(comm: MPI.Intracomm, values: list[list[float]], weight: list[float]) -> tuple[list[list[float]], list[int]]:
    """Apply an average, a multiple of it, a gradient of this rank, and a sum of both; return what is applied."""
    average = GradientAverage(Reducer(open_channel(comm)))
    variables = [tf.Variable([1.0, 2.0]) for _ in range(2)]
    with average.state.step(weight[comm.rank]), GradientPatches(average):

        @tf.function(autograph=False)
        def step(own: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(own * variables[0]) + tf.reduce_sum(own * own * variables[1])
            first, second = tape.gradient(loss, variables)
            return average.applied([first, 3 * second, own, first + own, None])[:4]

        with _sent() as sent:
            applied = step(tf.constant(values[comm.rank]))
    return [tensor.numpy().tolist() for tensor in applied], sent


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize("weight", [[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]])
def test_gradients_of_a_rank_beside_averages_are_averaged(pool: Pool, weight: list[float]) -> None:
    own = np.array([[1.0, 4.0], [3.0, -2.0]])
    mean, squares = np.average(own, 0, weight), np.average(own**2, 0, weight)
    for applied, _ in pool.run(_mixed, own.tolist(), weight):
        np.testing.assert_allclose(applied, [mean, 3 * squares, mean, 2 * mean])


def test_equal_gradients_without_any_row_are_zero(pool: Pool) -> None:
    """A batch that has no row on any rank has weight 0 everywhere; stand-in rows may give equal gradients."""
    own = [[1.0, 4.0]] * pool.size
    for applied, _ in pool.run(_mixed, own, [0.0] * pool.size):
        assert pool.size == 1 or applied == [[0.0, 0.0]] * 4


def _slices(comm: MPI.Intracomm, clip: bool) -> tuple[list[Any], int]:
    """Return the sparse gradient that is applied as a dense array, and its number of slices."""
    average = GradientAverage(Reducer(open_channel(comm)))
    table = tf.Variable(tf.ones([6, 2]))
    with average.state.step(), GradientPatches(average), tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(tf.gather(table, [comm.rank, 5]))
        with tape.stop_recording():
            gradient = tape.gradient(loss, table)
            if clip:
                gradient = tf.IndexedSlices(0.5 * gradient.values, gradient.indices, gradient.dense_shape)
            (applied,) = average.applied([gradient])
    return tf.convert_to_tensor(applied).numpy().tolist(), int(tf.shape(applied.indices)[0])


@pytest.mark.parametrize("clip", [False, True])
def test_slices_are_gathered_once(pool: Pool, clip: bool) -> None:
    expected = np.zeros((6, 2))
    expected[: pool.size] = 1 / pool.size
    expected[5] = 1
    for applied, slices in pool.run(_slices, clip):
        np.testing.assert_allclose(applied, expected * (0.5 if clip else 1), rtol=1e-6)
        assert slices == 2 * pool.size
