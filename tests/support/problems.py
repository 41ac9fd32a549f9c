"""Small training problems: data, models, and the reference computed by plain Keras in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
FEATURES = 6


def table(samples: int, seed: int = 0) -> tuple[Array, Array]:
    """Return inputs, float32[samples, 6], and class labels, int64[samples]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(samples, FEATURES)).astype(np.float32)
    return x, (np.abs(x[:, 0] + x[:, 1] * x[:, 2]) * 2).astype(np.int64) % 3


def block(rows: int, rank: int, size: int) -> slice:
    """Return the contiguous block of ``rows`` rows that belongs to ``rank``."""
    return slice(rows * rank // size, rows * (rank + 1) // size)


def shard(arrays: tuple[Array, ...], batch: int, rank: int, size: int) -> Any:
    """Return a dataset of this rank's block of each global batch of ``batch`` rows; the last batch may be smaller."""
    import tensorflow as tf

    def generate() -> Any:
        for start in range(0, len(arrays[0]), batch):
            rows = [array[start : start + batch] for array in arrays]
            yield tuple(array[block(len(rows[0]), rank, size)] for array in rows)

    even = len(arrays[0]) % batch == 0 and batch % size == 0
    local = batch // size if even else None
    spec = tuple(tf.TensorSpec((local, *array.shape[1:]), array.dtype) for array in arrays)
    steps = -(-len(arrays[0]) // batch)
    dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)
    return dataset.apply(tf.data.experimental.assert_cardinality(steps))


def perceptron(seed: int = 1) -> Any:
    """Return a classifier of two dense layers and three classes."""
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((FEATURES,)), *layers])


def compiled(model: Any, optimizer: Any, **options: Any) -> Any:
    """Compile the model with a classification loss and metrics, and return it."""
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)], **options)
    return model


def one_process(model: Any, arrays: tuple[Array, ...], batch: int, epochs: int, **options: Any) -> Any:
    """Train with plain Keras on the same global batches, in one process, and return the history."""
    return model.fit(shard(arrays, batch, 0, 1), epochs=epochs, verbose=0, **options)


def weights(model: Any) -> list[Array]:
    """Return all weights as arrays."""
    return [np.array(w) for w in model.get_weights()]


def assert_same_weights(results: list[list[Array]], expected: list[Array], rtol: float = 1e-5) -> None:
    """Check that all ranks have bitwise equal weights, and that these are the expected ones to rounding."""
    for others in results[1:]:
        for found, first in zip(others, results[0], strict=True):
            assert found.tobytes() == first.tobytes()
    for found, reference in zip(results[0], expected, strict=True):
        scale = np.abs(reference).max()
        np.testing.assert_allclose(found, reference, rtol=rtol, atol=rtol * scale)


Make = Callable[[], Any]
