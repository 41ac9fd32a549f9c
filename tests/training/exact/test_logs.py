"""How numbers that a step returns combine over the ranks, as their graphs tell."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from matex_data.training.exact.logs import combined_numbers, reductions
from tests.support import problems
from tests.support.ranks import Pool, Pools

SCALE = tf.Variable(3.0)


def _square(value: Any) -> Any:
    return value * value  # one tensor that enters an operation twice


NUMBERS: dict[str, tuple[Callable[[Any], Any], str | None]] = {
    "mean": (tf.reduce_mean, "mean"),
    "sum": (tf.reduce_sum, "sum"),
    "largest": (tf.reduce_max, "max"),
    "smallest": (lambda x: tf.reduce_min(tf.reduce_min(x, 1)), "min"),
    "count": (lambda x: tf.reduce_sum(tf.cast(x > 0, tf.int32)), "sum"),
    "rows": (lambda x: tf.shape(x)[0], "sum"),
    "rows as keras counts": (lambda x: keras.ops.shape(x)[0], "sum"),
    "half a sum": (lambda x: tf.reduce_sum(x) / 2, "sum"),
    "sum by rows": (lambda x: tf.reduce_sum(x) / tf.cast(tf.shape(x)[0], tf.float32), "mean"),
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
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_combines_as_its_graph_tells(name: str) -> None:
    function, expected = NUMBERS[name]
    found: dict[str, Any] = {}

    def step(x: Any) -> Any:
        logs = {"number": function(x)}
        found.update(reductions(logs))
        return logs

    step_of_graph = tf.function(step, autograph=False, input_signature=[tf.TensorSpec([None, 3])])
    step_of_graph.get_concrete_function()
    assert found == {"number": expected}
    x = np.random.default_rng(0).normal(size=(7, 3)).astype(np.float32)
    shards = [x[:3], x[3:]]
    values = [(np.asarray(step_of_graph(shard)["number"]), len(shard)) for shard in shards]
    combined, own = combined_numbers(values, found["number"])
    assert own is (expected is None)
    if expected is not None:
        np.testing.assert_allclose(combined, step_of_graph(x)["number"], rtol=1e-5, atol=1e-6)


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
