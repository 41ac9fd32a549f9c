"""The names and shapes of an optimizer's variables for all weights are those of a real one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest

from matex_data.training.partition.whole import whole_optimizer

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adam": lambda: keras.optimizers.Adam(use_ema=True, amsgrad=True),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adafactor": keras.optimizers.Adafactor,
    "schedule": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 10)),
    "accumulation": lambda: keras.optimizers.Lion(gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(centered=True)),
    "ftrl": keras.optimizers.Ftrl,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_variables_are_those_of_a_real_optimizer(name: str) -> None:
    layers = [keras.layers.Dense(3, name="a"), keras.layers.Dense(2, name="b")]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    optimizer = OPTIMIZERS[name]()
    found = whole_optimizer(optimizer, model.trainable_variables).variables
    optimizer.build(model.trainable_variables)

    def described(variables: list[Any]) -> list[Any]:
        return [(v.path, tuple(v.shape), keras.backend.standardize_dtype(v.dtype)) for v in variables]

    assert described(found) == described(optimizer.variables)
