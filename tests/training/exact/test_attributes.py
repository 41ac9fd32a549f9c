"""Attributes of layers that Python code changes are found, and restored."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.training.exact.attributes import Attributes, kept_by_calls


class Counting(keras.layers.Layer):
    """Layer with state in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.seen, self.started = 0, [1], False
        self.latest: Any = None
        self.table = np.zeros(2)

    def build(self, shape: Any) -> None:
        """Set what the shape of the input determines."""
        self.features = shape[-1]

    def call(self, x: Any) -> Any:
        """Change all of it."""
        self.calls += 1
        self.seen.append(self.calls)
        self.table[0] += 1
        self.started, self.latest = True, x
        return x


def _model() -> Any:
    layer = Counting()
    return layer, keras.Sequential([layer])


def test_changes_are_found_and_restored() -> None:
    layer, model = _model()
    model.build((None, 3))
    before = layer.calls, list(layer.seen), layer.table.copy(), layer.seen
    attributes = Attributes(model)
    assert not attributes.changed()
    model(np.ones((2, 3), np.float32))
    assert {change.partition(".")[2] for change in attributes.changed()} == {"calls", "seen", "table"} | (
        set() if layer.started else {"started"}
    )
    attributes.restore()
    assert (layer.calls, list(layer.seen)) == before[:2]
    assert layer.table[0] == before[2][0]
    assert not attributes.changed()


def test_what_build_sets_stays() -> None:
    layer, model = _model()
    with kept_by_calls(model):
        layer(tf.ones((2, 3)))
    assert layer.features == 3
    assert (layer.calls, layer.started, layer.latest, list(layer.seen)) == (0, False, None, [1])
