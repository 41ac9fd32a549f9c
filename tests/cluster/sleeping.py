"""Train a network whose steps sleep in place of computing, and have gradients of its size; print the seconds of steps.

Arguments: JSON of seconds by rows, units of a hidden layer, rows of a batch, steps.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.cluster.network import FEATURES, network


class _Times(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that notes when steps end."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def main() -> None:
    """Train for an epoch."""
    seconds = {int(rows): value for rows, value in json.loads(sys.argv[1]).items()}
    units, batch, steps = map(int, sys.argv[2:])

    def sleep(rows: Any) -> Any:
        time.sleep(seconds[int(rows)])
        return np.float32(0)

    class Sleeping(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            waited = tf.numpy_function(sleep, [tf.shape(data[0])[0]], tf.float32, stateful=False)
            waited.set_shape(())
            gradients = [tf.fill(v.shape, waited) for v in self.trainable_variables]
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": waited}

    model, times = network(units, Sleeping), _Times()
    rows = batch * steps
    model.fit(np.zeros((rows, FEATURES), "f4"), np.zeros((rows, 1), "f4"), batch, verbose=0, callbacks=[times])
    print(json.dumps({"steps": np.diff(times.ends).tolist()}), flush=True)


if __name__ == "__main__":
    main()
