"""Plain Keras script that prints the time at which its first training step ends, and the CPU seconds until then."""

from __future__ import annotations

import sys
import time
from typing import Any

import keras
import numpy as np


class FirstStep(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that prints the times at the end of the first step."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Print the times."""
        if batch == 0:
            sys.stdout.write(f"FIRST STEP {time.time()} {time.process_time()}\n")


x = np.random.default_rng(0).normal(size=(320, 32)).astype("float32")
model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
model.fit(x, x[:, :1], batch_size=64, verbose=0, callbacks=[FirstStep()])
