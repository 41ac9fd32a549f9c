"""How numbers that a step returns combine over the ranks, as their graphs tell."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from matex_data.training.exact.logs import combined_numbers, possible_reductions, reductions, remaining_reductions
from matex_data.training.exact.rows import static_counts
from tests.support import problems
from tests.support.ranks import Pool, Pools

SCALE = tf.Variable(3.0)
RATE = keras.Variable(0.25)


def _square(value: Any) -> Any:
    return value * value  # one tensor that enters an operation twice


def _rows(x: Any) -> Any:
    return tf.cast(tf.shape(x)[0], tf.float32)


NUMBERS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "mean": (tf.reduce_mean, "mean"),
    "sum": (tf.reduce_sum, "sum"),
    "largest": (tf.reduce_max, "max"),
    "smallest": (lambda x: tf.reduce_min(tf.reduce_min(x, 1)), "min"),
    "count": (lambda x: tf.reduce_sum(tf.cast(x > 0, tf.int32)), "sum"),
    "rows": (lambda x: tf.shape(x)[0], "sum"),
    "rows as keras counts": (lambda x: keras.ops.shape(x)[0], "sum"),
    "half a sum": (lambda x: tf.reduce_sum(x) / 2, "sum"),
    "twice the rows": (lambda x: 2 * tf.shape(x)[0], "sum"),
    "elements": (tf.size, "sum"),
    "product of the shape": (lambda x: tf.reduce_prod(tf.shape(x)), "sum"),
    "columns": (lambda x: tf.shape(x)[1] + 0, "mean"),
    "weights by columns": (lambda x: SCALE / tf.cast(tf.shape(x)[1], tf.float32), "mean"),
    "sum by rows": (lambda x: tf.reduce_sum(x) / _rows(x), "mean"),
    "sum by rows as keras counts": (
        lambda x: tf.reduce_sum(x) / keras.ops.cast(keras.ops.shape(x)[0], "float32"),
        "mean",
    ),
    "sum by elements": (lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32), "mean"),
    "loss of keras": (lambda x: keras.losses.MeanSquaredError()(x, 2 * x), "mean"),
    "loss of joined rows": (
        lambda x: keras.losses.MeanSquaredError()(*[tf.concat([x, y], 0) for y in (x, -x)]),
        "mean",
    ),
    "losses of keras": (
        lambda x: keras.losses.MeanSquaredError()(x, 2 * x) + 0.5 * keras.losses.Huber()(x, -x),
        "mean",
    ),
    "summed loss of keras": (lambda x: keras.losses.MeanSquaredError(reduction="sum")(x, 2 * x), "sum"),
    "variable of keras": (lambda x: RATE, "mean"),
    "number": (lambda x: 0.5, "mean"),
    "scaled mean": (lambda x: SCALE * tf.reduce_mean(x) + 1, "mean"),
    "difference of means": (lambda x: tf.reduce_mean(x) - tf.reduce_mean(x * x), "mean"),
    "mean and a square of weights": (lambda x: tf.reduce_mean(x) + _square(SCALE + 0.0), "mean"),
    "mean of a loss": (lambda x: keras.ops.mean(keras.losses.mean_squared_error(x, 2 * x)), "mean"),
    "of weights": (lambda x: tf.reduce_sum(tf.square(SCALE * [1.0, 2.0])), "mean"),
    "mean and weights": (lambda x: tf.reduce_mean(x) + tf.reduce_sum(SCALE * [1.0, 2.0]), "mean"),
    "sum and one": (lambda x: tf.reduce_sum(x) + 1, None),
    "negative maximum": (lambda x: -tf.reduce_max(x), None),
    "maximum of a sum": (lambda x: tf.reduce_max(x) + tf.reduce_mean(x), None),
    "square of a mean": (lambda x: tf.square(tf.reduce_mean(x)), None),
    "root": (lambda x: tf.sqrt(tf.reduce_sum(x * x)), None),
    "inverse": (lambda x: 1 / tf.reduce_mean(x), None),
    "root of the rows": (lambda x: tf.sqrt(_rows(x)), None),
    "mean times rows": (lambda x: tf.reduce_mean(x) * _rows(x), None),
    "of each row": (lambda x: tf.reduce_mean(x, 1), None),
    "of each column": (lambda x: tf.reduce_mean(x, 0), "mean"),
}


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_combines_as_its_graph_tells(name: str, static: bool) -> None:
    function, expected = NUMBERS[name]
    found: list[Any] = []

    def step(x: Any) -> Any:
        logs = {"number": function(x)}
        found.append(reductions(logs, static_counts(x))["number"])
        return logs

    x = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
    values = []
    for rows in (x[:5], x[5:], x):
        signature = [tf.TensorSpec([len(rows) if static else None, 3])]
        traced = tf.function(step, autograph=False, input_signature=signature)
        values.append((np.asarray(traced(rows)["number"]), len(rows)))
    *shards, (whole, _) = values
    assert found == [expected] * 3
    kinds = remaining_reductions([(kind, None) for kind in found])
    combined, own = combined_numbers(shards, kinds)
    assert own is (expected is None)
    if expected is not None:
        np.testing.assert_allclose(combined, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factor", [10.0, 0.2, 0.1])
def test_a_sum_that_may_be_a_mean_is_neither(factor: float) -> None:
    found: list[Any] = []

    def step(x: Any) -> Any:
        total = tf.reduce_sum(x)
        found.append(reductions({"number": total / factor if factor > 1 else total * factor}, static_counts(x)))
        return x

    tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([5, 3]))
    assert found == [{"number": None}]


@pytest.mark.parametrize(("shards", "whole", "told", "later", "expected"), [
    ([8, 8], 16, "mean", [8, 4], (12, False)), ([0, 3], 3, None, [1, 3], (1, True)),
    ([0, 3], 3, "max", [1, 3], (3, False)), ([0, 3], 3, None, [5, 5], (5, True)),
    ([2, 2], 2, None, [4, 4], (4, False)), ([2, 2], 2, None, [4, 5], (4, True)),
    ([4, 4], 16, "sum", [4, 4], (4, True)), ([4, 4], None, None, [4, 4], (4, True)),
])  # fmt: skip
def test_checks_decide_how_a_number_combines(shards: Any, whole: Any, told: Any, later: Any, expected: Any) -> None:
    possible = None if whole is None else possible_reductions([(value, 3) for value in shards], whole)
    values = [(np.asarray(value), 3) for value in later]
    assert combined_numbers(values, remaining_reductions([(told, possible)] * 2)) == expected


def _logs_of_own(comm: Any, kind: str, distributed: bool) -> Any:
    """Train and validate a model that makes its logs by itself, or by functions of one number a batch."""
    from keras import ops

    from matex_data import training

    class Steps(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = ops.mean(ops.square(y - self(x, training=True)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            rows = tf.shape(x)[0]
            return {"samples": rows, "elements": {"all": tf.size(x)}, "twice": tf.cast(2 * rows, tf.float32)}

    class Computed(keras.Sequential):  # type: ignore[misc]
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.spread = keras.metrics.Mean(name="spread")

        @property
        def metrics(self) -> Any:
            return [*super().metrics, self.spread]  # which Keras lists, too

        def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
            self.spread.update_state(ops.std(y_pred))
            return {**super().compute_metrics(x, y, y_pred, sample_weight), "rows": ops.cast(tf.shape(y)[0], "float32")}

    keras.utils.set_random_seed(1)
    cls = {"steps": Steps, "computed": Computed}.get(kind, keras.Sequential)
    model = cls([keras.Input((problems.FEATURES,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(2)])
    metrics = [keras.losses.dice, keras.metrics.CosineSimilarity(axis=0)] if kind == "functions" else None
    model.compile(keras.optimizers.SGD(0.05), None if kind == "steps" else "mse", metrics=metrics)
    x, _ = problems.table(40)
    arrays, batch = (x, x[:, :2]), 12
    if not distributed:
        data = problems.shard(arrays, batch, 0, 1)
        return model.fit(data, validation_data=None if kind == "steps" else data, epochs=2, verbose=0).history
    data = problems.shard(arrays, batch, comm.rank, comm.size)
    held = None if kind == "steps" else data
    return training.fit(model, data, validation_data=held, epochs=2, comm=comm, verbose=0).history


@pytest.mark.rank_counts(3, slow=(1, 2))
@pytest.mark.parametrize("kind", ["steps", "computed", "functions"])
def test_logs_that_a_model_makes_by_itself(ranks: Pools, pool: Pool, kind: str) -> None:
    expected, *_ = ranks(1).run(_logs_of_own, kind, False)
    for found in pool.run(_logs_of_own, kind, True, timeout=120):
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, rtol=1e-4, err_msg=key)


def _static_numbers(comm: Any, verify: str) -> Any:
    """Train on batches of equal rows by a step that returns numbers in whose graph the rows are constants."""
    from matex_data import training

    class Steps(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = keras.losses.MeanSquaredError()(y, self(x, training=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            counts = {"rows": tf.shape(x)[0], "rows of python": x.shape[0], "elements": tf.size(y)}
            total = tf.reduce_sum(tf.square(y))
            means = {
                "loss": loss,
                "by rows": total / x.shape[0],
                "by elements": total / tf.cast(tf.size(y), tf.float32),
            }
            return {**counts, **means, "half a sum": total / 2, "rate": self.optimizer.learning_rate}

    keras.utils.set_random_seed(1)
    model = Steps([keras.Input((problems.FEATURES,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.05))
    x, _ = problems.table(48)
    data = problems.shard((x, x[:, :2]), 24, comm.rank, comm.size)
    if comm.size == 1:
        return model.fit(data, epochs=2, verbose=0).history
    return training.fit(model, data, epochs=2, comm=comm, verbose=0, verify=verify).history


@pytest.mark.rank_counts(2, 3)
@pytest.mark.parametrize("verify", ["proven", "never"])
def test_numbers_of_batches_of_a_static_size(ranks: Pools, pool: Pool, verify: str) -> None:
    expected, *_ = ranks(1).run(_static_numbers, verify)
    for found in pool.run(_static_numbers, verify, timeout=120):
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, rtol=1e-5, err_msg=key)


def _sparse_number(comm: Any) -> Any:
    """Train on batches of unequal rows by a step that returns a number that is 0 on some shards."""
    from matex_data import training

    class Steps(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x, training=True)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"hits": tf.reduce_mean(y)}

    model = Steps([keras.Input((problems.FEATURES,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.05))
    x, _ = problems.table(34)
    y = np.arange(34) % 12 > 8  # of the last rank, in batches of 12 rows
    data = problems.shard((x, y.astype(np.float32)), 12, comm.rank, comm.size)
    if comm.size == 1:
        return model.fit(data, epochs=2, verbose=0).history
    return training.fit(model, data, epochs=2, comm=comm, verbose=0, verify="always").history


@pytest.mark.rank_counts(2, 3)
def test_numbers_that_are_0_on_some_shards(ranks: Pools, pool: Pool) -> None:
    expected, *_ = ranks(1).run(_sparse_number)
    assert expected["hits"][0] == pytest.approx(0.1)
    for found in pool.run(_sparse_number, timeout=120):
        np.testing.assert_allclose(found["hits"], expected["hits"], rtol=1e-5)


def test_functions_of_keras_that_need_all_rows() -> None:
    from matex_data.training.exact.metrics import OF_BATCH

    rng, found = np.random.default_rng(0), set()
    predicted = rng.uniform(0.1, 1, (4, 3)).astype(np.float32)
    for owner in (keras.losses, keras.metrics):
        for name, function in inspect.getmembers(owner, inspect.isfunction):
            for labels in (np.eye(3, dtype=np.float32)[[0, 1, 2, 1]], np.array([0, 1, 2, 1])):
                try:
                    whole, part = (np.asarray(function(labels[:n], predicted[:n])) for n in (4, 2))
                except Exception:
                    continue
                if not whole.ndim or not np.allclose(whole[:2], part):
                    found.add(name)
                break
    assert found == set(OF_BATCH)


def test_a_number_that_is_not_one_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert possible_reductions([(float("nan"), 2), (1.0, 1)], float("nan")) == {"mean", "sum", "max", "min"}
