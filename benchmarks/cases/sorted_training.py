"""Training on files that are sorted by class, in the order of their shuffled batches, beside a random order.

The order is all that a file gives to training: so images of ten classes are made in memory and trained on in the orders
that files of the sizes of ``shuffling.FILES`` have. One epoch, from the same initial weights for each order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.cases.reading import Goal, Measured, Setup
from benchmarks.cases.shuffling import CLASSES, FILES, SMALL, SequenceCounter, Sorted, before, by_default

SEEDS = 5
SIDE = 12  # pixels
HELD_OUT = 4000
NOISE = 2.5  # standard deviation, where patterns of the classes have 1
FILE, RANDOM, DEFAULT = "the file's order", "a random order", "matex_data, shuffle=True"

Images = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def training(setup: Setup) -> Measured:
    """Train in each order with several seeds."""
    file = FILES[3]
    samples = file.samples // (SMALL if setup.quick else 1)
    images = _images(np.arange(samples) * CLASSES // samples, seed=0)
    held_out = _images(np.arange(HELD_OUT) % CLASSES, seed=1)
    small = Sorted(file.text, samples, file.shape, file.dtype, file.chunk, file.batch_size, file.limit)
    orders: dict[str, Callable[[int], SequenceCounter]] = {
        RANDOM: lambda seed: lambda number: _random(samples, file.batch_size, seed),
        DEFAULT: lambda seed: by_default(small, seed=seed),
        "before": lambda seed: before(small, seed=seed),
        FILE: lambda seed: lambda number: _in_order(samples, file.batch_size),
    }
    losses = {
        name: np.array([_trained(images, held_out, order(seed)(0), seed) for seed in range(SEEDS)])
        for name, order in orders.items()
    }
    rows = [
        [name, f"{loss[:, 0].mean():.4f}", f"{_error(loss[:, 0]):.4f}", f"{loss[:, 1].mean():.4f}"]
        for name, loss in losses.items()
    ]
    difference = losses[DEFAULT][:, 0] - losses[RANDOM][:, 0]
    error = float(np.hypot(_error(losses[DEFAULT][:, 0]), _error(losses[RANDOM][:, 0])))
    goals = [
        Goal(
            "loss, shuffle=True less a random order, in standard errors",
            abs(float(difference.mean())) / error,
            1,
            most=True,
            unit="",
        )
    ]
    title = f"One epoch over {samples:,} images sorted by class, a small CNN, batch {file.batch_size}, {SEEDS} seeds"
    columns = ["order", "loss on held-out images", "standard error", "accuracy"]
    return Measured(title, goals=goals, columns=columns, rows=rows)


def _random(samples: int, batch_size: int, seed: int) -> Any:
    order = np.random.default_rng(1000 + seed).permutation(samples)
    return order[: samples // batch_size * batch_size].reshape(-1, batch_size)


def _in_order(samples: int, batch_size: int) -> Any:
    return np.arange(samples // batch_size * batch_size).reshape(-1, batch_size)


def _error(found: np.ndarray[Any, Any]) -> float:
    return float(found.std(ddof=1) / np.sqrt(len(found)))


def _images(classes: np.ndarray[Any, Any], seed: int) -> Images:
    patterns = np.random.default_rng(7).normal(size=(CLASSES, SIDE, SIDE, 1)).astype("f4")
    noise = np.random.default_rng(seed).normal(size=(len(classes), SIDE, SIDE, 1)).astype("f4")
    return patterns[classes] + np.float32(NOISE) * noise, classes


def _trained(images: Images, held_out: Images, batches: Any, seed: int) -> tuple[float, float]:
    """Return the loss and the accuracy on held-out images after one epoch of these batches."""
    import keras

    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((SIDE, SIDE, 1)),
            layers.Conv2D(8, 3, strides=2, activation="relu"),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(CLASSES),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.02, momentum=0.9), loss, metrics=["accuracy"])
    order = batches.reshape(-1)
    model.fit(images[0][order], images[1][order], batch_size=batches.shape[1], shuffle=False, verbose=0)
    found = model.evaluate(*held_out, batch_size=500, verbose=0)
    return float(found[0]), float(found[1])


CASES: dict[str, list[Callable[[Setup], Measured]]] = {"sorted": [training]}
