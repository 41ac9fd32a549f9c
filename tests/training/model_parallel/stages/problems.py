"""Training problems of the tests of stages, on one process and in stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from matex_data import open_dataset
from matex_data.errors import PartitionError
from matex_data.training.exact.batch_weights import shard
from matex_data.training.inference import evaluate, predict
from matex_data.training.model_parallel.deferred import deferred, is_absent
from matex_data.training.model_parallel.mesh import Mesh
from matex_data.training.saving import save
from matex_data.training.trainer import fit
from tests.training.model_parallel.models import MODELS


def normalized() -> Any:
    """Return a model with batch normalization, dropout, a regularizer and losses that layers add."""
    x = keras.Input((6,))
    y = keras.layers.Dense(8, "tanh", kernel_regularizer=keras.regularizers.L2(0.05), name="first")(x)
    y = keras.layers.BatchNormalization(name="normalization1")(y)
    y = keras.layers.Dropout(0.3, seed=5, name="dropout1")(y)
    y = keras.layers.Dense(8, "tanh", activity_regularizer=keras.regularizers.L2(0.02), name="second")(y)
    y = keras.layers.Dense(8, "tanh", activity_regularizer=keras.regularizers.L2(0.02), name="third")(y)
    y = keras.layers.BatchNormalization(name="normalization2")(y)
    y = keras.layers.Dropout(0.3, seed=6, name="dropout2")(y)
    return keras.Model(x, keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.05), name="head")(y))


def text() -> Any:
    """Return a model of masked sequences."""
    x = keras.Input((5,), dtype="int32")
    y = keras.layers.Embedding(10, 6, mask_zero=True, name="embedding")(x)
    y = keras.layers.Dense(6, "tanh", name="dense")(y)
    y = keras.layers.LSTM(6, name="recurrent")(y)
    return keras.Model(x, keras.layers.Dense(1, name="head")(y))


def frozen() -> Any:
    """Return a model whose first two layers are not trained."""
    model = MODELS["chain"]()
    for layer in model.layers[:2]:
        layer.trainable = False
    return model


BUILDERS: dict[str, Callable[[], Any]] = {**MODELS, "normalized": normalized, "text": text, "frozen": frozen}
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
    "ema": lambda: keras.optimizers.SGD(0.05, use_ema=True, ema_momentum=0.5),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.01, global_clipnorm=0.5), initial_scale=2.0**127, dynamic_growth_steps=3
    ),
}
ROWS, BATCH = 69, 23
"""Samples, and those of a batch; no number of micro-batches or replicas divides it."""


def build(name: str, optimizer: str = "sgd", seed: int = 3, defer: bool = False) -> Any:
    """Return a compiled model with the same initial weights everywhere."""
    keras.utils.set_random_seed(seed)
    with deferred() if defer else contextlib.nullcontext():
        model = BUILDERS[name]()
    loss: Any = {"early": "mse", "late": "mae"} if name == "several" else "mse"
    metrics: Any = {"late": ["mae"]} if name == "several" else ["mae"]
    model.compile(OPTIMIZERS[optimizer](), loss, metrics=metrics)
    return model


def samples(name: str, weights: bool = True) -> Any:
    """Return inputs, targets and sample weights."""
    random = np.random.default_rng(0)
    x: Any = random.normal(size=(ROWS, 6)).astype("float32")
    y: Any = random.normal(size=(ROWS, 1)).astype("float32")
    if name == "several":
        x = {"a": x, "b": random.normal(size=(ROWS, 3)).astype("float32")}
        y = {"early": y, "late": random.normal(size=(ROWS, 2)).astype("float32")}
        return x, y
    if name == "text":
        x = random.integers(0, 10, (ROWS, 5)).astype("int32")
        x[:, 0] = 1  # a text has a word
    return (x, y, random.uniform(0.5, 2, ROWS).astype("float32")) if weights else (x, y)


def dataset(name: str, replica: int = 0, replicas: int = 1, rows: int = ROWS) -> tf.data.Dataset:
    """Return the batches of a replica: its consecutive rows of each global batch."""
    whole, batches = samples(name), []
    for first in range(0, rows, BATCH):
        count = min(BATCH, rows - first)
        begin, end = (first + i * count // replicas for i in (replica, replica + 1))
        batches.append(tf.nest.map_structure(itemgetter(slice(begin, end)), whole))
    spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), whole)
    data = tf.data.Dataset.from_generator(lambda: iter(batches), output_signature=spec)
    return data.apply(tf.data.experimental.assert_cardinality(len(batches)))


def accumulated(name: str, optimizer: str, micro_batches: int, replicas: int, epochs: int) -> tuple[Any, Any]:
    """Return the weights and the losses of one process, after steps that accumulate the same micro-batches."""
    model, losses = trained_model(name, optimizer, micro_batches, replicas, epochs)
    return weights_of(model), losses


def trained_model(name: str, optimizer: str, micro_batches: int, replicas: int, epochs: int) -> tuple[Any, Any]:
    """Return the model and the losses of one process, after steps that accumulate the same micro-batches."""
    model = build(name, optimizer)
    model.optimizer.build(model.trainable_variables)
    metric = keras.metrics.Mean()
    losses = []
    for _ in range(epochs):
        metric.reset_state()
        for parts in zip(*(dataset(name, i, replicas) for i in range(replicas)), strict=True):
            total = [0.0] * len(model.trainable_variables)
            for data in parts:
                rows = len(tf.nest.flatten(data)[0])
                for i in range(micro_batches):
                    rows_of = slice(i * rows // micro_batches, (i + 1) * rows // micro_batches)
                    count = rows_of.stop - rows_of.start
                    if not count:
                        continue
                    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(
                        tf.nest.map_structure(lambda leaf, rows_of=rows_of: leaf[rows_of], data)
                    )
                    with tf.GradientTape() as tape:
                        loss = model.compute_loss(x, y, model(x, training=True), sample_weight)
                        scaled = model.optimizer.scale_loss(loss * (count / BATCH))
                    metric.update_state(loss, sample_weight=count)
                    gradients = tape.gradient(scaled, model.trainable_variables)
                    total = [old + tf.convert_to_tensor(new) for old, new in zip(total, gradients, strict=True)]
            model.optimizer.apply(total, model.trainable_variables)
        losses.append(float(metric.result()))
    model.optimizer.finalize_variable_values(model.trainable_variables)
    return model, losses


def weights_of(model: Any) -> list[Any]:
    """Return all weights in float32."""
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in model.weights]


def in_stages(
    comm: Any,
    name: str,
    optimizer: str,
    stages: int,
    micro_batches: int,
    epochs: int = 2,
    validate: bool = False,
    **options: Any,
) -> tuple[Any, Any]:
    """Return weights and logs of a run in stages, on this rank."""
    mesh = Mesh(stages=stages, comm=comm)
    model = build(name, optimizer, seed=3 if comm.rank == 0 else 9)
    data = dataset(name, mesh.coordinates.replica, mesh.shape[0])
    if validate:
        options["validation_data"] = data
    history = fit(model, data, epochs=epochs, verbose=0, mesh=mesh, micro_batches=micro_batches, **options)
    return weights_of(model), history.history


def resumed(
    comm: Any, folder: str, name: str, optimizer: str, stages: int, epochs: int, save_every: int | None, stop: int = 0
) -> list[Any]:
    """Return the weights of a run with a checkpoint; it stops after a number of steps if that is given."""
    mesh = Mesh(stages=stages, comm=comm)
    model = build(name, optimizer, seed=3 if stop else 9)
    data = dataset(name, mesh.coordinates.replica, mesh.shape[0])
    options: dict[str, Any] = {"mesh": mesh, "micro_batches": 3} if stages > 1 else {"comm": mesh.world}
    steps = [0]

    def begin(batch: int, logs: Any) -> None:
        if steps[0] == stop:
            raise Interrupted
        steps[0] += 1

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_begin=begin)] if stop else []
    with contextlib.suppress(Interrupted):
        fit(
            model,
            data,
            epochs=epochs,
            verbose=0,
            checkpoint=folder,
            save_every=save_every,
            callbacks=callbacks,
            **options,
        )
    return weights_of(model)


def predicted(comm: Any, file: str) -> list[tuple[Any, Any]]:
    """Return predictions and an evaluation of a deferred model after a run, and predictions within runs."""
    mesh, (x, *_) = Mesh(stages=2, comm=comm), samples("several")
    found = []
    for defer in (True, False):
        model, within = build("several", defer=defer), []
        data = dataset("several", mesh.coordinates.replica, mesh.shape[0])
        predict = lambda *_, model=model, within=within: within.append(model.predict(x, batch_size=20, verbose=0))  # noqa: E731
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=predict)]
        fit(model, data, epochs=1, verbose=0, mesh=mesh, micro_batches=3, callbacks=callbacks)
        if defer:
            save(model, file, comm=comm)
            found.append(
                (model.predict(x, batch_size=20, verbose=0), model.evaluate(data, verbose=0, return_dict=True))
            )
        found.append((within[0], None))
    return found


def looked_at(comm: Any, before: str, folder: str) -> dict[str, Any]:
    """Return predictions and losses of a deferred model after a run in stages, before which it was looked at."""
    mesh, (x, y) = Mesh(stages=2, comm=comm), samples("chain", weights=False)
    model = build("chain", defer=True)
    data = open_dataset({"x": x, "y": y}, inputs="x", targets="y", comm=mesh.data)
    {"predict": predict, "evaluate": evaluate}[before](model, data, comm=mesh.data, verbose=0)
    fit(model, data, batch_size=24, remainder="keep", epochs=3, verbose=0, mesh=mesh, micro_batches=2, shuffle=False)
    own = len(predict(model, data))
    batches = shard(tf.data.Dataset.from_tensor_slices(x).batch(20), comm=mesh.data)
    found = {
        "own": own,
        "all": predict(model, data, gather=True, batch_size=8),
        "batches": predict(model, batches, gather=True, verbose=0),
        "again": model.predict(x, batch_size=ROWS, verbose=0),
        "batch": model.predict_on_batch(x),
        "evaluated": evaluate(model, data, verbose=0)[0],
    }
    predict(model, data, to=f"{folder}/scores.csv")
    with pytest.raises(PartitionError, match="mesh of these stages"):
        model.train_on_batch(x, y)
    with pytest.raises(PartitionError, match="mesh of these stages"):
        model.fit(x, y, verbose=0)
    save(model, f"{folder}/model.keras", comm=comm)
    found["evaluated again"] = evaluate(model, data, verbose=0)[0]
    rows = slice(mesh.coordinates.replica, None, mesh.shape[0])
    found["test_on_batch"] = model.test_on_batch(x[rows], y[rows])[0]
    with pytest.raises(PartitionError, match="no micro-batch"):
        fit(model, data, verbose=0, mesh=mesh, micro_batches=-1)
    with pytest.raises(PartitionError, match="no stages evaluate or predict"):
        predict(model, data)
    save(model, f"{folder}/again.weights.h5", comm=comm)
    return found


class Interrupted(Exception):
    """Interruption of a run."""


def deferred_in_stages(comm: Any, name: str, optimizer: str, stages: int, file: str, **options: Any) -> dict[str, Any]:
    """Return the weights that this rank has, by path, after a run in stages of a deferred model; save all of them."""
    mesh = Mesh(stages=stages, comm=comm)
    model = build(name, optimizer, defer=True)
    data = dataset(name, mesh.coordinates.replica, mesh.shape[0])
    for epochs in (1, 2):
        first = {"initial_epoch": 1} if epochs == 2 and "checkpoint" not in options else {}
        fit(model, data, epochs=epochs, verbose=0, mesh=mesh, micro_batches=3, **first, **options)
    save(model, file, comm=comm)
    with pytest.raises(PartitionError, match="was trained in stages"):
        fit(model, data, comm=comm)
    return {v.path: v.numpy() for v in model.weights if not is_absent(v)}
