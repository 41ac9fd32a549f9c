"""Train a small network as a script for one process does: ``training.py MODEL STEPS WIDTH [FILE of the weights]``."""

from __future__ import annotations

import sys
import time
from typing import Any

import keras
import numpy as np

BATCH, WARM = 64, 5
SHAPES = {"mlp": (64,), "cnn": (16, 16, 3)}


def network(model: str, width: int) -> Any:
    """Return a network of three dense layers, or of convolutions, with ten classes."""
    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    if model == "mlp":
        layers = [dense(width, "relu"), dense(width, "relu")]
    else:
        layers = [keras.layers.Conv2D(16, 3, activation="relu"), keras.layers.Flatten(), dense(width, "relu")]
    net = keras.Sequential([keras.Input(SHAPES[model]), *layers, dense(10)])
    net.compile(keras.optimizers.SGD(0.02, momentum=0.9), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return net


class Clock(keras.callbacks.Callback):  # type: ignore[misc]
    """Time of each step behind the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Note the time."""
        self.times.append(time.perf_counter())


def main(model: str, steps: str, width: str, *file: str) -> None:
    """Train, print the milliseconds of a step, and write the weights to a file if one is named."""
    rng = np.random.default_rng(0)
    count = BATCH * (int(steps) + WARM)
    x, y = rng.normal(size=(count, *SHAPES[model])).astype("float32"), rng.integers(0, 10, count)
    net, clock = network(model, int(width)), Clock()
    net.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[clock])
    print(f"RESULT {1e3 * (clock.times[-1] - clock.times[WARM - 1]) / int(steps):.2f} ms a step")
    if file:
        np.savez(file[0], *net.get_weights())


if __name__ == "__main__":
    main(*sys.argv[1:])
