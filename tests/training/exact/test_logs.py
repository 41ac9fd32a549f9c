"""How numbers that a step returns combine over the ranks, as their graphs tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from matex_data.training.exact.logs import combined_numbers, reductions

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
