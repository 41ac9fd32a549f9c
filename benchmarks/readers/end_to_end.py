"""One epoch of a convolutional network, from opening the file to the last step: matex_data and TensorFlow's ways.

The networks are the same for all, PyTorch's included (``readers/end_to_end_torch.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.data import GRATING_CLASSES, GRATING_SIDE, Array, Task, grating_images
from benchmarks.harness.worker import cpu_seconds
from benchmarks.readers import ours as matex
from benchmarks.readers.batches import as_dataset
from benchmarks.readers.steps import averaging_step, mirrored_step, mirrored_strategy, one_thread

HELD_OUT, HELD_OUT_SEED = 2000, 1_000_003
RATE, EPSILON = 2e-3, 1e-7  # of Adam
SEED = 1
TOUCHED_BYTES = 1 << 30
"""Memory that is written and freed before the clock starts: a virtual machine gives idle memory back, and the first
write to a page may take ten times as long as the second one."""

Probe = Callable[[], dict[str, float]]


@dataclass(frozen=True)
class Network:
    """Convolutional network, each of whose convolutions is followed by ``relu``; a dense layer comes last.

    Parameters
    ----------
    binning : pixels that are averaged in each direction before the first convolution.
    convolutions : filters, width and stride of each.
    """

    binning: int
    convolutions: tuple[tuple[int, int, int], ...]


NETWORKS = {"small": Network(4, ((8, 5, 2),)), "large": Network(1, ((16, 5, 2), (32, 3, 1), (32, 3, 2)))}


def trained(
    task: Task, batches: Callable[[], Iterable[Any]], step: Callable[..., Any], correct: Callable[[], int]
) -> Probe:
    """Return a probe that trains for an epoch and counts the held-out samples that are classified correctly.

    Parameters
    ----------
    batches : opens the file and returns the batches of this rank.
    step : of the training, of a batch.
    correct : returns how many of this rank's held-out samples are; it is not timed.
    """
    from mpi4py import MPI

    def run() -> dict[str, float]:
        np.ones(TOUCHED_BYTES, np.uint8)
        MPI.COMM_WORLD.Barrier()
        cpu, begin = cpu_seconds(), time.perf_counter()
        steps, computing, iterator = task.samples // task.batch_size, 0.0, iter(batches())
        for _ in range(steps):
            x, y = next(iterator)
            start = time.perf_counter()
            step(x, y)
            computing += time.perf_counter() - start
        seconds = time.perf_counter() - begin  # not until the iterator has ended, for which some wait for seconds
        samples = steps * task.batch_size / MPI.COMM_WORLD.size
        figures = {"samples": samples, "seconds": seconds, "cpu": cpu_seconds() - cpu}
        return figures | {"waiting": seconds - computing, "correct": correct()}

    return run


def held_out() -> tuple[Array, Array]:
    """Return this rank's share of the held-out samples."""
    from mpi4py import MPI

    labels = np.arange(HELD_OUT) % GRATING_CLASSES
    share = slice(MPI.COMM_WORLD.rank, None, MPI.COMM_WORLD.size)
    return grating_images(labels, HELD_OUT_SEED)[share], labels[share]


def ours(task: Task, network: str) -> Probe:
    """Train with matex_data: ``tf_dataset`` and ``training.distribute``."""
    import matex_data as md

    one_thread()
    model, loss, optimizer = _compiled(network)
    step = averaging_step(model, loss, md.training.distribute(optimizer), list)

    def batches() -> Any:
        return matex.opened(task).tf_dataset(task.batch_size, shuffle=True, seed=SEED)

    return trained(task, batches, step, _correct(model))


def one_process(task: Task, network: str, order: str) -> Probe:
    """Train with Keras in one process on all cores; h5py reads for ``from_generator``."""
    model, loss, optimizer = _compiled(network)
    step = averaging_step(model, loss, optimizer, list)
    return trained(task, lambda: as_dataset(task, order), step, _correct(model))


def mirrored(task: Task, network: str, order: str) -> Probe:
    """Train with ``MultiWorkerMirroredStrategy``; h5py reads each worker's share for ``from_generator``."""
    strategy = mirrored_strategy()
    with strategy.scope():
        model, loss, optimizer = _compiled(network)
        step = mirrored_step(strategy, model, loss, optimizer, task.batch_size)

    def dataset(context: Any) -> Any:
        return as_dataset(task, order, context.input_pipeline_id, context.num_input_pipelines)

    return trained(task, lambda: strategy.distribute_datasets_from_function(dataset), step, _correct(model))


def horovod(task: Task, network: str, order: str) -> Probe:
    """Train with Horovod's allreduce; h5py reads each rank's share for ``from_generator``."""
    import horovod.tensorflow as hvd

    hvd.init()
    one_thread()
    model, loss, optimizer = _compiled(network)
    step = averaging_step(model, loss, optimizer, hvd.grouped_allreduce)
    return trained(task, lambda: as_dataset(task, order, hvd.rank(), hvd.size()), step, _correct(model))


def _compiled(network: str) -> tuple[Any, Any, Any]:
    """Return a model, its loss and its optimizer."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(SEED)
    chosen = NETWORKS[network]
    shape = GRATING_SIDE, GRATING_SIDE
    model = keras.Sequential([keras.Input(shape), layers.Reshape((*shape, 1))])
    if chosen.binning > 1:
        model.add(layers.AveragePooling2D(chosen.binning))
    for filters, width, stride in chosen.convolutions:
        model.add(layers.Conv2D(filters, width, stride, activation="relu"))
    model.add(layers.Flatten())
    model.add(layers.Dense(GRATING_CLASSES))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, loss, keras.optimizers.Adam(RATE, epsilon=EPSILON)


def _correct(model: Any) -> Callable[[], int]:
    def correct() -> int:
        images, labels = held_out()
        return int((np.argmax(model(images), axis=1) == labels).sum())

    return correct
