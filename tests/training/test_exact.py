"""Weights after 50 steps equal those of one process, for every optimizer, kind of model and kind of step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tests.support import problems
from tests.support.ranks import Pools

BATCH = 24


@dataclass(frozen=True)
class Case:
    """Model, data and optimizer of a run, by the names of functions below, and the tolerance of its weights."""

    optimizer: str
    model: str = "perceptron"
    data: str = "table"
    samples: int = 240
    options: dict[str, Any] = field(default_factory=dict)
    compiled: dict[str, Any] = field(default_factory=dict)
    rtol: float = 1e-5


CASES = {
    "momentum": Case("SGD", options={"learning_rate": 0.1, "momentum": 0.9}),
    "adam": Case("Adam", options={"learning_rate": 0.01}),
    "clipnorm": Case("AdamW", options={"learning_rate": 0.01, "clipnorm": 0.1}),
    "global_clipnorm": Case("SGD", options={"learning_rate": 0.3, "global_clipnorm": 0.1}),
    "clipvalue": Case("SGD", options={"learning_rate": 0.3, "clipvalue": 0.02}),
    "moving_average": Case("SGD", options={"learning_rate": 0.1, "use_ema": True, "ema_overwrite_frequency": 7}),
    "accumulation": Case("Adam", options={"learning_rate": 0.01, "gradient_accumulation_steps": 4}),
    "float16": Case("SGD", "half", "overflowing", options={"learning_rate": 0.05}, rtol=5e-3),
    "embedding": Case("Adam", "embedding", "words", options={"learning_rate": 0.01}),
    "positions": Case("Adam", "positions", "words", samples=250, options={"learning_rate": 0.01}),
    "one_table": Case("Adam", "one_table", "words", samples=250, options={"learning_rate": 0.01}),
    "masked": Case("Adam", "masked", "words", samples=250, options={"learning_rate": 0.01}),
    "ignored": Case("Adam", "ignoring", "unknown", samples=250, options={"learning_rate": 0.01}),
    "batch_norm": Case("SGD", "normalized", samples=250, options={"learning_rate": 0.1}),
    "uneven": Case("Adam", samples=241, options={"learning_rate": 0.01}),
    "two_losses": Case("Adam", "two_outputs", "two_targets", samples=250, options={"learning_rate": 0.01}),
    "own_step": Case("Adam", "own_step", samples=250, options={"learning_rate": 0.01}),
    "own_clipping": Case("SGD", "own_clipping", samples=250, options={"learning_rate": 0.3, "momentum": 0.9}),
    "eagerly": Case("Adam", samples=96, options={"learning_rate": 0.01}, compiled={"run_eagerly": True}),
    "several_steps": Case("Adam", samples=250, options={"learning_rate": 0.01}, compiled={"steps_per_execution": 4}),
    "sum": Case("SGD", "penalized", samples=250, options={"learning_rate": 0.002}),
    "none": Case("SGD", "unreduced", "two_targets", samples=250, options={"learning_rate": 0.002}),
    "one_number": Case("Adam", "one_number", "words", samples=250, options={"learning_rate": 0.01}),
    "unused": Case("Adam", "unused", options={"learning_rate": 0.01}),
    "weighted": Case("SGD", "weighted_mean", "weighted", samples=250, options={"learning_rate": 0.3}),
}


def table(samples: int) -> Any:
    return problems.table(samples)


def overflowing(samples: int) -> Any:
    x, y = problems.table(samples)
    x[100] = 1e5  # infinite in float16, on one rank
    return x, y


def words(samples: int) -> Any:
    """Return sequences of 7 of 40 words; word 0 is padding."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, 8, samples)
    x = np.where(np.arange(7) < lengths[:, None], rng.integers(1, 40, (samples, 7)), 0).astype(np.int32)
    return x, x % 3


def unknown(samples: int) -> Any:
    """Return classes that are mostly -1 in the second half of each batch."""
    x, y = problems.table(samples)
    hidden = (np.arange(samples) % BATCH >= BATCH // 2) & (np.arange(samples) % 5 > 0)
    return x, np.where(hidden, -1, y)


def two_targets(samples: int) -> Any:
    x, y = problems.table(samples)
    return x, y, x[:, :2] * 2


def weighted(samples: int) -> Any:
    x, y = problems.table(samples)
    return x, y, np.linspace(0, 2, samples).astype(np.float32) ** 2


def perceptron() -> Any:
    return problems.perceptron(), _cross_entropy()


def half() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, activation="relu", dtype="mixed_float16"), keras.layers.Dense(3, dtype="float32")]
    model = keras.Sequential([keras.Input((problems.FEATURES,)), *layers])
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    return model, _cross_entropy()


def embedding(mask: bool = False) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(40, 5, mask_zero=mask), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((7,), dtype="int32"), *layers]), _cross_entropy()


def positions() -> Any:
    """Return a model that looks up positions, which no row determines, beside words."""
    import keras

    class Positions(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.words, self.positions = keras.layers.Embedding(40, 5), keras.layers.Embedding(7, 5)

        def call(self, x: Any) -> Any:
            return self.words(x) + self.positions(keras.ops.arange(keras.ops.shape(x)[-1]))

    keras.utils.set_random_seed(1)
    layers = [Positions(), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((7,), dtype="int32"), *layers]), _cross_entropy()


def one_table() -> Any:
    """Return a model that looks up words, positions, and each word of the batch once, in one table."""
    import keras
    import tensorflow as tf

    class Table(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(40, 5)

        def call(self, x: Any) -> Any:
            words, places = tf.unique(tf.reshape(x, [-1]))
            once = tf.reshape(tf.gather(self.table(words), places), [-1, 7, 5])
            return self.table(x) + self.table(keras.ops.arange(7)) * once

    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((7,), dtype="int32"), Table(), keras.layers.Dense(3)]), _cross_entropy()


def masked() -> Any:
    return embedding(mask=True)


def ignoring() -> Any:
    import keras

    return problems.perceptron(), keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)


def normalized() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, use_bias=False), keras.layers.BatchNormalization(synchronized=True)]
    return keras.Sequential(
        [keras.Input((problems.FEATURES,)), *layers, keras.layers.ReLU(), keras.layers.Dense(3)]
    ), _cross_entropy()


def two_outputs() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    x = keras.Input((problems.FEATURES,))
    hidden = keras.layers.Dense(8, activation="tanh")(x)
    model = keras.Model(x, [keras.layers.Dense(3, name="kind")(hidden), keras.layers.Dense(2, name="place")(hidden)])
    return model, [_cross_entropy(), "mae"]


def own_step(clip: bool = False) -> Any:
    import keras
    import tensorflow as tf

    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))
            gradients = tape.gradient(loss, self.trainable_variables)
            if clip:
                gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"own": loss}

    keras.utils.set_random_seed(1)
    return Own([keras.Input((problems.FEATURES,)), keras.layers.Dense(9, "tanh"), keras.layers.Dense(3)]), None


def own_clipping() -> Any:
    return own_step(clip=True)


def penalized() -> Any:
    import keras

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, "relu", kernel_regularizer="l2"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((problems.FEATURES,)), *layers]), _cross_entropy("sum")


def unreduced() -> Any:
    """Return a model whose loss has one value per row, of which TensorFlow takes the gradient of the sum."""
    import keras

    model, _ = two_outputs()
    model.layers[1].kernel_regularizer = keras.regularizers.L2(0.01)
    return model, [_cross_entropy("none"), "mae"]


def one_number() -> Any:
    """Return a model with a mask, and a loss that returns one number for a batch."""
    import keras

    def loss(y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True))

    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(40, 5, mask_zero=True), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((7,), dtype="int32"), *layers]), loss


def unused() -> Any:
    """Return a model with weights that get no gradient."""
    import keras

    class Branch(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.idle = self.add_weight(shape=(4,), name="idle")

        def call(self, x: Any) -> Any:
            return x

    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((problems.FEATURES,)), Branch(), keras.layers.Dense(3)]), _cross_entropy()


def weighted_mean() -> Any:
    return problems.perceptron(), _cross_entropy("mean_with_sample_weight")


def _cross_entropy(reduction: str = "sum_over_batch_size") -> Any:
    import keras

    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


def _run(comm: Any, name: str, fit: Callable[..., Any] | None) -> Any:
    import keras

    case = CASES[name]
    model, loss = globals()[case.model]()
    optimizer = getattr(keras.optimizers, case.optimizer)(**case.options)
    model.compile(optimizer, loss, **case.compiled)
    rank, size = (comm.rank, comm.size) if fit else (0, 1)
    data = problems.shard(globals()[case.data](case.samples), BATCH, rank, size)
    if case.data == "two_targets":
        data = data.map(lambda x, kind, place: (x, (kind, place)))
    epochs = -(-50 * BATCH // case.samples)
    if fit:
        fit(model, data, epochs=epochs, comm=comm, verbose=0)
    else:
        model.fit(data, epochs=epochs, verbose=0)
    scale = getattr(model.optimizer, "dynamic_scale", None)
    return problems.weights(model), [int(model.optimizer.iterations), None if scale is None else float(scale.numpy())]


def _distributed(comm: Any, name: str) -> Any:
    from matex_data import training

    return _run(comm, name, training.fit)


def _reference(comm: Any, name: str) -> Any:
    return _run(comm, name, None)


QUICK = {
    **dict.fromkeys(("accumulation", "embedding", "float16", "global_clipnorm", "masked"), 2),
    **dict.fromkeys(("several_steps", "unused", "weighted"), 2),
    **dict.fromkeys(("batch_norm", "none", "one_table", "own_clipping", "uneven"), 3),
}
"""Numbers of ranks of the cases that run by default; on three ranks, batches are divided into unequal blocks."""


def _params() -> list[Any]:
    cases = [(name, size) for name in CASES for size in (1, 2, 3, 4)]
    return [pytest.param(*case, marks=() if case in QUICK.items() else pytest.mark.slow) for case in cases]


@pytest.mark.parametrize(("name", "size"), _params())
def test_weights_equal_one_process(ranks: Pools, name: str, size: int) -> None:
    (expected, counters), *_ = ranks(1).run(_reference, name)
    results = ranks(size).run(_distributed, name, timeout=120)
    problems.assert_same_weights([weights for weights, _ in results], expected, CASES[name].rtol)
    assert all(result[1] == counters for result in results)
    if name == "float16":
        assert counters[1] is not None
        assert counters[1] < 2.0**15  # the overflow did happen
