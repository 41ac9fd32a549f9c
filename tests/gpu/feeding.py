"""Feed a small convolutional network from gzip chunks of HDF5, beside the same images in memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

import matex_data as md
from tests.gpu.training import BATCH, SHAPES, network


def main(folder: str, steps: str) -> None:
    """Print the images that train in a second."""
    rows = BATCH * int(steps)
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 16, (rows, *SHAPES["cnn"])).astype("float32"), rng.integers(0, 10, rows)
    path = Path(folder) / "images.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, chunks=(BATCH, *SHAPES["cnn"]), compression="gzip")
        file.create_dataset("y", data=y)
    data = md.open_dataset(str(path), inputs="x", targets="y")
    _measure("images in memory", tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH))
    _measure("gzip chunks of HDF5", data.tf_dataset(BATCH, seed=0))


def _measure(name: str, dataset: Any) -> None:
    net = network("cnn", 128)
    net.fit(dataset, verbose=0)
    begin, epochs = time.perf_counter(), 3
    net.fit(dataset, epochs=epochs, verbose=0)
    rows = epochs * BATCH * int(dataset.cardinality())
    print(f"RESULT {name}: {rows / (time.perf_counter() - begin):,.0f} images/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
