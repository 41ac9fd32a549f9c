"""Find the cells in images of a microscope with a small U-Net, from mirrored images and masks, and draw what it finds.

python sample_data/make.py cells
mpiexec -n 2 python examples/cells.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import matplotlib.pyplot as plt
import numpy as np

import matex_data as md

FOLDER = Path(__file__).resolve().parent.parent / "sample_data" / "cells"


def network(normalization: keras.layers.Layer) -> keras.Model:
    """U-Net of two levels (arXiv:1505.04597): contract, expand, and join the features of equal resolution."""
    layers = keras.layers
    image = keras.Input((64, 64, 1))
    fine = _convolutions(normalization(image), 8)
    coarse = _convolutions(layers.AveragePooling2D(2)(fine), 16)
    joined = _convolutions(layers.Concatenate()([fine, layers.Conv2DTranspose(8, 2, strides=2)(coarse)]), 8)
    return keras.Model(image, layers.Conv2D(1, 1, activation="sigmoid")(joined))


def _convolutions(x: Any, filters: int) -> Any:
    for _ in range(2):
        x = keras.layers.Conv2D(filters, 3, padding="same", activation="silu")(x)
    return x


def train(folder: str, epochs: int = 5, batch_size: int = 12, picture: str | None = None) -> dict[str, Any]:
    """Train, and return the weights of the network and its logs. *Collective*."""
    keras.utils.set_random_seed(1)
    options: dict[str, Any] = {"inputs": "image", "targets": "mask", "mode": "gray"}
    whole = md.open_dataset(folder, **options)
    drawn = md.open_dataset(folder, **options, random_flip="horizontal_and_vertical")  # image and mask alike
    training, held_out = drawn.split(0.75, 0.25, seed=1)[0], whole.split(0.75, 0.25, seed=1)[1]
    model = network(training.normalization("image", axis=None))
    model.compile(keras.optimizers.Adam(0.005), "bce", metrics=["accuracy"])
    sets = training.tf_dataset(batch_size, shuffle=True, seed=1), held_out.tf_dataset(batch_size, remainder="keep")
    history = md.training.fit(model, sets[0], validation_data=sets[1], epochs=epochs, verbose=2)
    if picture and md.training.world().rank == 0:
        image, mask = held_out[0]
        found = model.predict(image[None], verbose=0)[0] > 0.5
        plt.imshow(np.concatenate([image[..., 0] / image.max(), mask, found[..., 0]], axis=1), cmap="gray")
        plt.savefig(picture)
    return {"weights": np.concatenate([np.ravel(weight) for weight in model.get_weights()]), **history.history}


if __name__ == "__main__":
    result = train(str(FOLDER), picture="cells.png")
    if md.training.world().rank == 0:
        print(f"pixels on the right side: {result['val_accuracy'][-1]:.3f}, see cells.png")
