"""Steps of a network whose weights are cut over two ranks, and of the same network in other ways."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.data import Task
from benchmarks.readers.ceiling import Pass
from benchmarks.readers.epochs_of_fit import passes
from benchmarks.readers.steps import one_thread

BLOCKS, WIDTH, HIDDEN, BATCH, STEPS = 4, 1024, 4096, 64, 10


def task() -> Task:
    """Return the task of a pass; a "sample" is a step of all ranks."""
    return Task("layouts", "", "", BATCH, STEPS, 0, STEPS)


def _network() -> Any:
    import keras
    from keras import layers

    x = inputs = keras.Input((WIDTH,))
    for i in range(BLOCKS):
        x = layers.Dense(HIDDEN, "relu", name=f"up_{i}")(x)
        x = layers.Dense(WIDTH, name=f"down_{i}")(x)
    return keras.Model(inputs, x)


def fit(task: Task, parts: int = 1, shard_optimizer: bool = False, threads: int = 1) -> Pass:
    """Run epochs of ``training.fit``, one for each pass.

    Parameters
    ----------
    parts : ranks over which the weights are cut; the others share the rows of a batch.
    shard_optimizer : cut the optimizer's state over the ranks.
    threads : of TensorFlow, on each rank.
    """
    import keras
    import tensorflow as tf

    from matex_data import training

    if threads == 1:
        one_thread()
    keras.utils.set_random_seed(0)
    mesh = training.Mesh(model=parts)
    layouts = mesh.layout_map()
    if parts > 1:
        layouts["up_./kernel"] = (None, "model")
        layouts["down_./kernel"] = ("model", None)
    with training.deferred(layouts):
        model = _network()
    model.compile(keras.optimizers.AdamW(1e-4), "mse", jit_compile=False)
    rows = BATCH // mesh.data.size
    rng = np.random.default_rng(mesh.data.rank)
    x = rng.standard_normal((STEPS, rows, WIDTH), np.float32)
    options = tf.data.Options()
    options.autotune.enabled = False
    data = tf.data.Dataset.from_tensor_slices((x, x)).with_options(options)
    arguments = {"mesh": mesh, **({"shard_optimizer": True} if shard_optimizer else {})}
    train = partial(training.fit, model, data, verbose=0, **arguments)
    return passes(train, task.samples if mesh.world.rank == 0 else 0)
