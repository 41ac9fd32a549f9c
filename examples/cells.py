"""Find the cells in images of a microscope with a small U-Net, from a folder of images and a folder of masks.

python sample_data/make.py cells
mpiexec -n 2 python examples/cells.py
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


def network(normalization: keras.layers.Layer) -> keras.Model:
    """U-Net of two levels (arXiv:1505.04597): contract, expand, and join the features of equal resolution."""
    layers = keras.layers
    image = keras.Input((64, 64, 1))
    fine = _convolutions(normalization(image), 8)
    coarse = _convolutions(layers.AveragePooling2D(2)(fine), 16)
    expanded = layers.Conv2DTranspose(8, 2, strides=2)(coarse)
    joined = _convolutions(layers.Concatenate()([fine, expanded]), 8)
    return keras.Model(image, layers.Conv2D(1, 1)(joined))


def _convolutions(x: Any, filters: int) -> Any:
    for _ in range(2):
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="silu")(x)
    return x


def train(folder: str, epochs: int = 5, batch_size: int = 12) -> dict[str, Any]:
    """Train, and return the weights of the network and its logs. *Collective*."""
    keras.utils.set_random_seed(1)
    data = md.open_dataset(folder, inputs="image", targets="mask", mode="gray")
    training, held_out = data.split(0.75, 0.25, seed=1)
    model = network(training.normalization("image", axis=None))
    model.compile(
        keras.optimizers.Adam(0.005),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
    )
    history = md.training.fit(
        model,
        training.tf_dataset(batch_size, shuffle=True, seed=1),
        validation_data=held_out.tf_dataset(batch_size, remainder="keep"),
        epochs=epochs,
        verbose=2,
    )
    return {"weights": np.concatenate([np.ravel(weight) for weight in model.get_weights()]), **history.history}


def main() -> None:
    """Read the command line, train, and show the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default=str(ROOT / "sample_data" / "cells"), help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=12, help="of all ranks together (default: %(default)s)")
    arguments = parser.parse_args()
    result = train(arguments.folder, arguments.epochs, arguments.batch_size)
    if MPI.COMM_WORLD.rank == 0:
        print(f"pixels on the right side, of held-out images: {result['val_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
