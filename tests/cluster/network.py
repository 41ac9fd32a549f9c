"""Network of two hidden layers, as a script trains it, and as ``sleeping.py`` does without computing."""

from __future__ import annotations

import sys
from typing import Any

import keras
import numpy as np

FEATURES = 784


def network(units: int, kind: Any = keras.Sequential) -> Any:
    """Return the compiled network, with its hidden layers of so many units."""
    keras.utils.set_random_seed(0)
    hidden = [keras.layers.Dense(units, "relu") for _ in range(2)]
    model = kind([keras.Input((FEATURES,)), *hidden, keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


if __name__ == "__main__":
    batch = int(sys.argv[2])
    rng = np.random.default_rng(0)
    data = rng.normal(size=(20 * batch, FEATURES)).astype("f4"), rng.integers(0, 10, 20 * batch)
    network(int(sys.argv[1])).fit(*data, batch)
