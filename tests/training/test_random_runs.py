"""Random training configurations on ranks, and interrupted at a random step and resumed on another number of them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support import problems
from tests.support.ranks import Pools

BATCH, EPOCHS = 12, 3
ALL = 200
# All values of all options. In 52 the result of a metric is a variable, in a step of the
# model's own.
QUICK = (24, 41, 52, 61, 62, 70, 110, 136, 140, 192)


def _draw(seed: int) -> dict[str, Any]:
    """Return the configuration of a seed."""
    rng = np.random.default_rng([54, seed])

    def one(*choices: Any) -> Any:
        return choices[rng.integers(len(choices))]

    samples = int(rng.integers(25, 50))
    steps = -(-samples // BATCH)
    return {
        "samples": samples,
        "model": one("dense", "masked", "normalized", "two", "own_layer", "own_step", "centered"),
        "loss": one("plain", "sum", "mean", "ignored", "own", "number", "weighted_mean", "squares"),
        "weights": bool(rng.integers(2)),
        "optimizer": one("SGD", "Adam", "AdamW", "RMSprop"),
        "clipping": one({}, {"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.02}),
        "options": one({}, {"gradient_accumulation_steps": 3}, {"weight_decay": 0.1},
                       {"use_ema": True, "ema_overwrite_frequency": 4}),
        "metrics": one((), ("accuracy",), ("own",), ("function",), ("accuracy", "own", "top")),
        "callback": one(None, "plateau", "stopping", "schedule", "batches"),
        "steps_per_execution": one(1, 1, 1, 2),
        "validation": bool(rng.integers(2)),
        "shard_optimizer": one(False, False, False, True),
        "ranks": (one(2, 3), one(1, 2, 3)),
        "stop": int(rng.integers(1, steps * EPOCHS)),
    }  # fmt: skip


def _own_classes() -> Any:
    import keras
    import tensorflow as tf
    from keras import ops

    class Scaled(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

        def call(self, x: Any) -> Any:
            return ops.tanh(x * self.scale)

    class Centered(Scaled):
        def call(self, x: Any) -> Any:
            return x * self.scale - ops.mean(x, 0)

    class Largest(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.value = self.add_weight(name="value", initializer="zeros")

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            self.value.assign(ops.maximum(self.value, ops.max(p)))

        def result(self) -> Any:
            return self.value

    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                predicted = self(x, training=True)
                loss = self.compute_loss(x, y, predicted, weight)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            return self.compute_metrics(x, y, predicted, weight)

    return Scaled, Centered, Largest, Own


def _losses(name: str) -> Any:
    import keras
    from keras import ops

    def values(y: Any, p: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)

    named = {
        "own": values,
        "number": lambda y, p: ops.mean(values(y, p)),
        "squares": lambda y, p: ops.mean(ops.square(ops.one_hot(y, 3) - p), -1),
    }
    reductions = {"sum": "sum", "mean": "mean", "weighted_mean": "mean_with_sample_weight"}
    return named.get(name) or keras.losses.SparseCategoricalCrossentropy(
        from_logits=True,
        ignore_class=0 if name == "ignored" else None,
        reduction=reductions.get(name, "sum_over_batch_size"),
    )


def _model(drawn: dict[str, Any]) -> Any:
    import keras

    scaled, centered, largest, own = _own_classes()
    keras.utils.set_random_seed(1)
    kind, layers = drawn["model"], keras.layers
    inner = {
        "masked": [layers.Masking(0.0), layers.SimpleRNN(7)],
        "normalized": [layers.Dense(7, use_bias=False), layers.BatchNormalization(synchronized=True), layers.ReLU()],
        "two": [layers.Dense(7, "tanh", kernel_regularizer="l2"), layers.Dense(5, "gelu")],
        "own_layer": [layers.Dense(7), scaled()],
        "centered": [layers.Dense(7, "tanh"), centered()],
    }.get(kind, [layers.Dense(7, "tanh")])
    shape = (3, 2) if kind == "masked" else (6,)
    model = (own if kind == "own_step" else keras.Sequential)([keras.Input(shape), *inner, layers.Dense(3)])
    rate = {"SGD": 0.05}.get(drawn["optimizer"], 0.01) / (10 if drawn["loss"] == "sum" else 1)
    optimizer = getattr(keras.optimizers, drawn["optimizer"])(rate, **drawn["clipping"], **drawn["options"])
    metrics = {
        "accuracy": keras.metrics.SparseCategoricalAccuracy(name="accuracy"),
        "top": keras.metrics.SparseTopKCategoricalAccuracy(2, name="top"),
        "own": largest(),
        "function": keras.metrics.MeanMetricWrapper(_losses("number"), name="function"),
    }
    model.compile(
        optimizer,
        _losses(drawn["loss"]),
        metrics=[metrics[name] for name in drawn["metrics"]],
        steps_per_execution=drawn["steps_per_execution"],
        jit_compile=False,
    )
    return model


def _callbacks(drawn: dict[str, Any], stop: int | None) -> list[Any]:
    import keras

    class Batches(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if int(self.model.optimizer.iterations) == 4:
                self.model.optimizer.learning_rate = 0.001

    class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
        seen = 0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if self.seen >= (stop or 0):
                raise KeyboardInterrupt
            self.seen += self.model.steps_per_execution

    found = {
        "plateau": [keras.callbacks.ReduceLROnPlateau("loss", 0.5, patience=0, min_delta=0.5)],
        "stopping": [keras.callbacks.EarlyStopping("loss", patience=1, min_delta=5.0)],
        "schedule": [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / (1 + epoch))],
        "batches": [Batches()],
    }
    return [*found.get(f"{drawn['callback']}", []), *([Interrupt()] if stop is not None else [])]


def _run(comm: Any, drawn: dict[str, Any], path: str, folder: str | None, stop: int | None) -> Any:
    import matex_data as md
    from matex_data import training

    weights = "w" if drawn["weights"] else None
    data = md.open_dataset(
        path, inputs="x3" if drawn["model"] == "masked" else "x", targets="k", weights=weights, comm=comm
    )
    model = _model(drawn)
    options: dict[str, Any] = {"validation_data": data} if drawn["validation"] else {}
    if folder is not None:
        options |= {"checkpoint": folder, "save_every": 1, "shard_optimizer": drawn["shard_optimizer"]}
    history: dict[str, Any] = {}
    with contextlib.suppress(KeyboardInterrupt):
        history = training.fit(
            model, data, batch_size=BATCH, remainder="keep", shuffle=True, seed=3, epochs=EPOCHS, comm=comm, verbose=0,
            callbacks=_callbacks(drawn, stop), **options,
        ).history  # fmt: skip
    return problems.weights(model), history


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.slow) for seed in range(ALL)]
)
def test_a_random_run_is_that_of_one_process(ranks: Pools, tmp_path: Path, seed: int) -> None:
    drawn, path = _draw(seed), str(tmp_path / "table.h5")
    x, k = problems.table(drawn["samples"], seed)
    with h5py.File(path, "w") as file:
        x3 = x.reshape(-1, 3, 2).copy()
        x3[np.arange(len(x)) % 3 == 0, 2] = 0
        file["x"], file["x3"], file["k"] = x, x3, k
        file["w"] = np.random.default_rng(seed).uniform(0, 2, len(x)).astype(np.float32)
    (expected, logs), *_ = ranks(1).run(_run, drawn, path, None, None, timeout=120)
    before, after = drawn["ranks"]
    folder = str(tmp_path / "run")
    ranks(before).run(_run, drawn, path, folder, drawn["stop"], timeout=120)
    results = ranks(after).run(_run, drawn, path, folder, None, timeout=120)
    problems.assert_same_weights([weights for weights, _ in results], expected)
    for _, history in results:
        assert history.keys() == logs.keys()
        for key, values in logs.items():
            np.testing.assert_allclose(history[key], values, rtol=1e-4, atol=1e-6, err_msg=f"{key}: {drawn}")
