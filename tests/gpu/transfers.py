"""Measure copies between the memories of host and device, and to Python and back."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

NUMBERS = 25_000_000


def main(_: str, steps: str) -> None:
    """Print the GB/s of copies of 100 MB."""
    device = "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"
    host = np.ones(NUMBERS, np.float32)
    with tf.device(device):
        there = tf.constant(host)

        @tf.function
        def through_python(tensor: Any) -> Any:
            return tf.numpy_function(lambda array: array, [tensor], tf.float32)

        with_name: dict[str, Callable[[], Any]] = {
            f"host to {device}": lambda: tf.identity(host)[0].numpy(),
            f"{device} to host": lambda: there.numpy(),
            "numpy_function there and back": lambda: through_python(there)[0].numpy(),
        }
        for name, copy in with_name.items():
            copy()
            begin, count = time.perf_counter(), max(1, int(steps) // 10)
            for _ in range(count):
                copy()
            seconds = (time.perf_counter() - begin) / count
            print(f"RESULT {name}: {1e3 * seconds:.1f} ms, {host.nbytes / 1e9 / seconds:.1f} GB/s")


if __name__ == "__main__":
    main(*sys.argv[1:])
