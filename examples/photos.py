"""Tell tiles of two photographs apart, read from a folder of JPEG files for each class.

    python sample_data/make.py photos
    mpiexec -n 2 python examples/photos.py --augment

Augmentation is that of Keras: layers that change the images at random, in training alone. Each rank draws its own
random numbers, so that the images of a batch are changed independently of one another, as in one process.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import keras
import numpy as np
from mpi4py import MPI

import matex_data as md

ROOT = Path(__file__).resolve().parent.parent


def network(augment: bool) -> keras.Model:
    """Three convolutions for images of 32 x 32 pixels; ``augment``: after random reflections and shifts."""
    layers = keras.layers
    changes = [layers.RandomFlip("horizontal"), layers.RandomTranslation(0.1, 0.1)] if augment else []
    return keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            layers.Rescaling(1 / 255),
            *changes,
            layers.Conv2D(8, 3, strides=2, activation="tanh"),
            layers.Conv2D(16, 3, strides=2, activation="tanh"),
            layers.Conv2D(32, 3, strides=2, activation="tanh"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2),
        ]
    )


def train(folder: str, epochs: int = 5, batch_size: int = 24, augment: bool = False) -> dict[str, Any]:
    """Train, and return the weights of the network and its logs. *Collective*."""
    keras.utils.set_random_seed(1)
    data = md.open_dataset(folder, inputs="image", targets="label", mode="rgb", size=(32, 32))
    training, held_out = data.split(0.8, 0.2, seed=1)
    model = network(augment)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    history = md.training.fit(
        model,
        training.tf_dataset(batch_size, shuffle=True, seed=1),
        validation_data=held_out.tf_dataset(batch_size, remainder="keep"),
        epochs=epochs,
        verbose=2,
    )
    weights = np.concatenate([np.ravel(weight) for weight in model.trainable_weights])
    return {"weights": weights, "classes": data.schema["label"].attributes["class_names"], **history.history}


def main() -> None:
    """Read the command line, train, and show the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=str(ROOT / "sample_data" / "photos"), help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=24, help="of all ranks together (default: %(default)s)")
    parser.add_argument("--augment", action="store_true", help="reflect and shift the images at random")
    arguments = parser.parse_args()
    result = train(arguments.folder, arguments.epochs, arguments.batch_size, arguments.augment)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{' or '.join(result['classes'])}: held-out accuracy {result['val_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
