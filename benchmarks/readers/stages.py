"""Steps of one batch in stages, in data parallel and in one process, and the memory that each takes."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import Any

import numpy as np

from benchmarks.harness.data import Task
from benchmarks.readers.ceiling import Pass
from benchmarks.readers.epochs_of_fit import passes
from benchmarks.readers.steps import one_thread

SHAPES = {"resnet": (32, 32, 3), "deep": (32, 32, 3), "mlp": (1024,), "memory": (1024,)}
BATCH = {"resnet": 256, "deep": 8, "mlp": 1024, "memory": 128}
STEPS = {"resnet": 2, "deep": 3, "mlp": 4, "memory": 1}
MICRO_BATCHES = {"resnet": 8, "deep": 4, "mlp": 4, "memory": 4}
LAYERS = {"mlp": 16, "memory": 32}
CLASSES = 10


def task_of(model: str) -> Task:
    """Return the task of a pass; a "sample" is a step of the whole batch."""
    return Task(model, "", "", BATCH[model], STEPS[model], 0, STEPS[model])


def resnet(depth: int = 20) -> Any:
    """Return a ResNet for images of 32 x 32 pixels, of depth 6 n + 2."""
    import keras
    from keras import layers

    def normalized(x: Any, filters: int, size: int, stride: int) -> Any:
        x = layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization()(x)

    inputs = keras.Input(SHAPES["resnet"])
    x = layers.ReLU()(normalized(inputs, 16, 3, 1))
    for filters in (16, 32, 64):
        for block in range((depth - 2) // 6):
            stride = 2 if filters > 16 and block == 0 else 1
            y = layers.ReLU()(normalized(x, filters, 3, stride))
            y = normalized(y, filters, 3, 1)
            x = layers.ReLU()(layers.Add()([normalized(x, filters, 1, stride) if stride > 1 else x, y]))
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(x)))


def bottlenecks(depth: int = 1001) -> Any:
    """Return a ResNet v2 of bottlenecks, of depth 9 n + 2, for images of 32 x 32 pixels (He et al. 2016, section 4)."""
    import keras
    from keras import layers

    def activated(x: Any) -> Any:
        return layers.ReLU()(layers.BatchNormalization()(x))

    def convolution(x: Any, filters: int, size: int = 1, stride: int = 1) -> Any:
        return layers.Conv2D(filters, size, stride, padding="same", use_bias=False)(x)

    sys.setrecursionlimit(1 << 15)  # Keras follows a model from layer to layer
    inputs = keras.Input(SHAPES["deep"])
    x = convolution(inputs, 16, 3)
    for width in (16, 32, 64):
        for block in range((depth - 2) // 9):
            stride = 2 if width > 16 and block == 0 else 1
            y = activated(x)
            shortcut = convolution(y, 4 * width, 1, stride) if block == 0 else x
            y = activated(convolution(y, width, 1, stride))
            y = activated(convolution(y, width, 3))
            x = layers.Add()([shortcut, convolution(y, 4 * width)])
    return keras.Model(inputs, layers.Dense(CLASSES)(layers.GlobalAveragePooling2D()(activated(x))))


def _network(model: str) -> Any:
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    if model in ("resnet", "deep"):
        return resnet() if model == "resnet" else bottlenecks()
    hidden = [layers.Dense(1024, "relu") for _ in range(LAYERS[model])]
    return keras.Sequential([keras.Input(SHAPES[model]), *hidden, layers.Dense(CLASSES)])


def _compiled(model: str, deferred: bool) -> Any:
    import contextlib

    import keras

    import matex_data as md

    with md.training.deferred() if deferred else contextlib.nullcontext():
        network = _network(model)
    optimizer = keras.optimizers.Adam(1e-4) if model == "memory" else keras.optimizers.SGD(0.01)
    network.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    return network


def _dataset(model: str, batch: int) -> Any:
    import tensorflow as tf

    random, count = np.random.default_rng(0), STEPS[model] * batch
    x = random.standard_normal((count, *SHAPES[model]), np.float32)
    data = tf.data.Dataset.from_tensor_slices((x, random.integers(0, CLASSES, count)))
    options = tf.data.Options()
    options.autotune.enabled = False
    return data.batch(batch, drop_remainder=True).with_options(options)


def _fit(model: str, way: str, **options: Any) -> Any:
    """Train in one process, in data parallel or in stages.

    Parameters
    ----------
    way : "one", "data" or "stages".
    """
    import matex_data as md

    if way == "stages":
        mesh = md.training.Mesh(stages=md.training.world().size)
        options |= {"mesh": mesh, "micro_batches": MICRO_BATCHES[model]}
    batch = BATCH[model] // (md.training.world().size if way == "data" else 1)
    network = _compiled(model, deferred=way == "stages")
    fit = network.fit if way == "one" else lambda *args, **kwargs: md.training.fit(network, *args, **kwargs)
    return fit(_dataset(model, batch), verbose=0, **options)


def fit(task: Task, way: str) -> Pass:
    """Run epochs of a fit, one for each pass; parameters as above. The steps of all ranks are those of rank 0."""
    import matex_data as md

    one_thread()
    return passes(partial(_fit, task.path, way), task.samples if md.training.world().rank == 0 else 0)


def memory(task: Task, way: str) -> Any:
    """Return a probe: the peak of a rank's memory above that of the imports, in MB, and seconds of the first steps.

    They are those of the rank with the most: "built" until training begins, "first" step with tracing, "later" step.
    """
    import resource

    import keras
    import numpy as np
    import tensorflow as tf

    import matex_data as md

    one_thread()
    assert keras.backend.backend() == "tensorflow"
    tf.constant(1.0) + 1.0  # TensorFlow takes memory of its own for the first operation
    md.training.world()

    def run() -> dict[str, float]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        times = [time.monotonic()]
        clock = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs=None: times.append(time.monotonic()),
            on_train_batch_end=lambda batch, logs=None: times.append(time.monotonic()),
        )
        _fit(task.path, way, epochs=1 if STEPS[task.path] > 1 else 2, callbacks=[clock])
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        found = np.array([peak, times[1] - times[0], times[2] - times[1], times[-1] - times[-2]])
        if md.training.world().size > 1:
            from mpi4py import MPI

            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, found, MPI.MAX)
        return dict(zip(("megabytes", "built", "first", "later"), map(float, found), strict=True))

    return run
