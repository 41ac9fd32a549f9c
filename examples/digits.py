"""Train a small network on handwritten digits. On two ranks: mpiexec -n 2 python examples/digits.py

Only the four lines with ``md`` differ from a Keras script for one process.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import keras
import numpy as np
from mpi4py import MPI

import matex_data as md
from matex_data.io.counters import process_profile

ROOT = Path(__file__).resolve().parent.parent


def network() -> keras.Model:
    """Two convolutions and a dense layer: 10,000 weights are enough for 8 x 8 pixels."""
    layers = keras.layers
    # Smooth everywhere: at the kink of a ReLU, or between equals of a maximum, rounding alone decides which way the
    # gradient goes, and two runs of the same training would part.
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Rescaling(1 / 16),
            layers.Conv2D(16, 3, padding="same", activation="tanh"),
            layers.Conv2D(32, 3, padding="same", activation="tanh", strides=2),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


class Meter(keras.callbacks.Callback):  # type: ignore[misc]
    """Seconds, and bytes this rank reads, of each epoch's pass over the training samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self.bytes: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self._begin = time.perf_counter(), process_profile().bytes

    def on_test_begin(self, logs: object = None) -> None:
        """Note the end of an epoch over the training samples."""
        self.seconds.append(time.perf_counter() - self._begin[0])
        self.bytes.append(process_profile().bytes - self._begin[1])


def train(files: str, epochs: int, batch_size: int) -> dict[str, np.ndarray]:
    """Train, and return what there is to say about it: the same on all ranks. *Collective*."""
    keras.utils.set_random_seed(1)
    data = md.open_dataset(files, inputs="image", targets="label")
    training, held_out = data.split(0.8, 0.2, seed=1)
    model, meter = network(), Meter()
    history = md.training.fit(
        model,
        training.tf_dataset(batch_size=batch_size, shuffle=True, seed=1),
        validation_data=held_out.tf_dataset(batch_size=batch_size, remainder="keep"),
        epochs=epochs,
        callbacks=[meter],
    )
    comm = MPI.COMM_WORLD
    mine = held_out.load()
    guess = np.argmax(model(mine["image"], training=False), axis=-1)
    right = comm.allreduce(int(np.sum(guess == mine["label"])))
    return {
        "accuracy": np.array(right / len(held_out)),
        "samples_per_second": len(training) // batch_size * batch_size / np.array(meter.seconds),
        "bytes_read": np.array(comm.allgather(meter.bytes)),
        "image": np.concatenate(comm.allgather(mine["image"])),
        "label": np.concatenate(comm.allgather(mine["label"])),
        "guess": np.concatenate(comm.allgather(guess)),
        **{f"history/{name}": np.array(values) for name, values in history.history.items()},
        **{f"weights/{weight.path}": weight.numpy() for weight in model.trainable_weights},
    }


def main() -> None:
    """Read the command line, train, and leave the result in a file if asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", default=str(ROOT / "sample_data" / "digits" / "*.h5"), help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=48, help="of all ranks together (default: %(default)s)")
    parser.add_argument("--result", type=Path, help="an .npz file to write")
    arguments = parser.parse_args()
    result = train(arguments.files, arguments.epochs, arguments.batch_size)
    if MPI.COMM_WORLD.rank == 0:
        print(f"held-out accuracy: {result['accuracy']:.4f}")
        if arguments.result:
            np.savez(arguments.result, **result)


if __name__ == "__main__":
    main()
