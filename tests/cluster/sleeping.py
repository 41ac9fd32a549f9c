"""Train a network whose steps sleep in place of computing, and have gradients of its size; print the seconds of steps.

Arguments: seconds of a sleep, units of a hidden layer, rows of a batch, steps.
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


def main() -> None:
    """Train for an epoch."""
    seconds, units, batch, steps = float(sys.argv[1]), *map(int, sys.argv[2:])
    begins: list[float] = []

    def sleep() -> Any:
        begins.append(time.perf_counter())
        time.sleep(seconds)
        return np.float32(0)

    class Sleeping(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            waited = tf.numpy_function(sleep, [], tf.float32)  # with a state, or it runs but once
            waited.set_shape(())
            gradients = [tf.fill(v.shape, waited) for v in self.trainable_variables]
            self.optimizer.apply(gradients, self.trainable_variables)
            return {"loss": waited}

    rows = batch * steps
    network(units, Sleeping).fit(np.zeros((rows, FEATURES), "f4"), np.zeros((rows, 1), "f4"), batch, verbose=0)
    print(json.dumps({"steps": np.diff(begins).tolist()}), flush=True)


if __name__ == "__main__":
    main()
