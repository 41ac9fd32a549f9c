"""The networks of the papers as plain Keras scripts, on JPEGs in folders, or on images in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.data import Task
from benchmarks.harness.worker import cpu_seconds
from benchmarks.readers import images
from benchmarks.readers.ours import SEED
from benchmarks.readers.stages import CLASSES, bottlenecks
from benchmarks.readers.steps import averaging_step, mirrored_step, mirrored_strategy

STEPS = 4  # of which the first one, which is traced, is not timed
Probe = Callable[[], dict[str, float]]


def task_of(folder: Path, of_files: bool, batch: int, quick: bool) -> Task:
    """Return the task of a network.

    Parameters
    ----------
    of_files : JPEGs of 256 x 256 in a folder for each class; otherwise noise in memory.
    batch : rows of a batch.
    """
    path = images.photographs(folder, quick).path if of_files else ""
    return Task(path, "image", "label", batch, STEPS * batch, 0, STEPS * batch)


def alexnet(side: int) -> Any:
    """Return AlexNet without its split over two GPUs and its local normalization (Krizhevsky et al. 2012)."""
    import keras
    from keras import layers

    def convolution(filters: int, size: int, stride: int = 1) -> Any:
        return layers.Conv2D(filters, size, stride, padding="same", activation="relu")

    features = [convolution(96, 11, 4), layers.MaxPooling2D(3, 2), convolution(256, 5), layers.MaxPooling2D(3, 2)]
    features += [convolution(384, 3), convolution(384, 3), convolution(256, 3), layers.MaxPooling2D(3, 2)]
    dense = [layer for _ in range(2) for layer in (layers.Dense(4096, "relu"), layers.Dropout(0.5))]
    return keras.Sequential([keras.Input((side, side, 3)), *features, layers.Flatten(), *dense, layers.Dense(CLASSES)])


GOOGLENET = (
    (64, 96, 128, 16, 32, 32),
    (128, 128, 192, 32, 96, 64),
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    (256, 160, 320, 32, 128, 128),
    (384, 192, 384, 48, 128, 128),
)
"""Filters of the modules: 1 x 1; before 3 x 3, and 3 x 3; before 5 x 5, and 5 x 5; behind the pool."""


def googlenet(side: int) -> Any:
    """Return GoogLeNet without its auxiliary classifiers (Szegedy et al. 2015, table 1)."""
    import keras
    from keras import layers

    def convolution(x: Any, filters: int, size: int, stride: int = 1) -> Any:
        return layers.Conv2D(filters, size, stride, padding="same", activation="relu")(x)

    def pool(x: Any, stride: int = 2) -> Any:
        return layers.MaxPooling2D(3, stride, padding="same")(x)

    inputs = keras.Input((side, side, 3))
    x = pool(convolution(inputs, 64, 7, 2))
    x = pool(convolution(convolution(x, 64, 1), 192, 3))
    for number, (one, before_3, three, before_5, five, behind) in enumerate(GOOGLENET):
        x = pool(x) if number in (2, 7) else x
        threes, fives = convolution(x, before_3, 1), convolution(x, before_5, 1)
        branches = [convolution(x, one, 1), convolution(threes, three, 3), convolution(fives, five, 5)]
        x = layers.Concatenate()([*branches, convolution(pool(x, 1), behind, 1)])
    x = layers.Dropout(0.4)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def _network(network: str, side: int) -> Any:
    """Return a compiled network; "resnet-v2-110" is one of bottlenecks of that depth."""
    import keras

    keras.utils.set_random_seed(0)
    options = {"weights": None, "input_shape": (side, side, 3), "classes": CLASSES, "classifier_activation": None}
    if network.startswith("resnet-v2-"):
        model = bottlenecks(int(network.rpartition("-")[2]))
    elif network == "inceptionv3":
        model = keras.applications.InceptionV3(**options)
    elif network == "resnet50":
        model = keras.applications.ResNet50(**options)
    else:
        model = {"alexnet": alexnet, "googlenet": googlenet}[network](side)
    model.compile(keras.optimizers.SGD(0.001), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _data(task: Task, side: int, batch: int) -> Any:
    """Return the batches of a script that knows no other library than Keras."""
    import keras
    import tensorflow as tf

    if not task.path:
        rng, count = np.random.default_rng(0), STEPS * batch
        x = rng.standard_normal((count, side, side, 3), np.float32)
        return tf.data.Dataset.from_tensor_slices((x, rng.integers(0, CLASSES, count))).batch(batch)
    files = {"batch_size": batch, "image_size": (side, side), "seed": SEED, "verbose": False}
    data = keras.utils.image_dataset_from_directory(task.path, **files)
    return data.map(lambda x, y: (x / 255, y)).repeat().take(STEPS).prefetch(1)


def _ours(task: Task, side: int, batch: int) -> Any:
    return images.opened(task, (side, side), dtype="float32").tf_dataset(batch, shuffle=True, seed=SEED).take(STEPS)


def fit(task: Task, network: str, side: int, ours: bool = False, times: int = 1) -> Probe:
    """Train by ``model.fit``, and return a probe.

    Its figures are samples and seconds of the timed steps; of these seconds, "averaging" in reductions, waits for other
    ranks included; and the seconds in which the same data come without training, "data".

    Parameters
    ----------
    side : pixels of the images.
    ours : the data are those of matex_data; otherwise every rank makes whole batches.
    times : that a batch is larger than that of the task.
    """
    import keras
    from mpi4py import MPI

    from matex_data.timeline import timeline

    batch = times * task.batch_size
    model = _network(network, side)
    make = _ours if ours else _data

    def run() -> dict[str, float]:
        stamps: list[float] = []
        clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs=None: stamps.append(time.time()))
        cpu = cpu_seconds()
        model.fit(make(task, side, batch), verbose=0, callbacks=[clock])
        spans = [event for event in timeline._events if event["cat"] == "communication"]
        averaging = sum(event["dur"] for event in spans if event["ts"] > 1e6 * stamps[0])
        figures = {"seconds": stamps[-1] - stamps[0], "cpu": cpu_seconds() - cpu}
        begin = time.time()
        for _ in make(task, side, batch):
            pass
        data = (time.time() - begin) * (STEPS - 1) / STEPS
        shared = {"samples": batch * (STEPS - 1), "averaging": averaging / 1e6, "data": data}
        return figures | {name: value / MPI.COMM_WORLD.size for name, value in shared.items()}  # ranks are added up

    return run


def horovod(task: Task, network: str, side: int) -> Probe:
    """Train in a loop that averages by Horovod, on the rows of each rank."""
    import horovod.tensorflow as hvd

    hvd.init()
    model = _network(network, side)
    step = averaging_step(model, model.loss, model.optimizer, hvd.grouped_allreduce)
    own = task.batch_size // hvd.size()
    return _loop(_data(task, side, own), step, own)


def mirrored(task: Task, network: str, side: int) -> Probe:
    """Train in a loop with ``MultiWorkerMirroredStrategy``, on the rows of each rank."""
    strategy = mirrored_strategy()
    with strategy.scope():
        model = _network(network, side)
        step = mirrored_step(strategy, model, model.loss, model.optimizer, task.batch_size)
    own = task.batch_size // strategy.num_replicas_in_sync
    data = strategy.distribute_datasets_from_function(lambda context: _data(task, side, own))
    return _loop(data, step, own)


def _loop(data: Any, step: Callable[..., Any], own: int) -> Probe:
    """Return a probe of steps with so many rows of this rank."""

    def run() -> dict[str, float]:
        cpu, stamps = cpu_seconds(), []
        for _, batch in zip(range(STEPS), data, strict=False):
            float(step(*batch))
            stamps.append(time.time())
        samples = own * (STEPS - 1)
        return {"samples": samples, "seconds": stamps[-1] - stamps[0], "cpu": cpu_seconds() - cpu}

    return run
