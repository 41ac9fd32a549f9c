"""Models for tests of graphs and stages: a chain, skips, shared layers, nested models, several inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras


def chain() -> Any:
    """Return a ``Sequential`` model."""
    layers = [keras.layers.Dense(units, activation="tanh", name=f"dense{i}") for i, units in enumerate((16, 12, 8))]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1, name="head")], name="chain")


def skips() -> Any:
    """Return a model whose input and first layer are used by its last ones."""
    x = keras.Input((6,))
    first = keras.layers.Dense(8, activation="tanh", name="first")(x)
    second = keras.layers.Dense(8, activation="tanh", name="second")(first)
    third = keras.layers.Dense(8, activation="tanh", name="third")(second) * 2.0
    added = keras.layers.Add(name="add")([first, third])
    joined = keras.layers.Concatenate(name="join")([added, second, x])
    return keras.Model(x, keras.layers.Dense(1, name="head")(joined), name="skips")


def shared() -> Any:
    """Return a model that calls one layer three times."""
    x = keras.Input((6,))
    layer = keras.layers.Dense(6, activation="tanh", name="shared")
    y = layer(x)
    y = layer(keras.layers.Dense(6, activation="tanh", name="between")(y))
    y = keras.layers.Dense(6, activation="tanh", name="behind")(y)
    return keras.Model(x, keras.layers.Dense(1, name="head")(layer(y)), name="shared_model")


def nested() -> Any:
    """Return a model that calls a functional model, which contains a ``Sequential`` one, twice."""
    inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(6, "tanh", name="inmost")], name="inner")
    x = keras.Input((6,))
    block = keras.Model(x, keras.layers.Dense(6, "tanh", name="inside")(inner(x)) + x, name="block")
    x = keras.Input((6,))
    y = block(keras.layers.Dense(6, "tanh", name="before")(x))
    y = keras.layers.Dense(6, "tanh", name="middle")(y)
    return keras.Model(x, keras.layers.Dense(1, name="head")(y), name="nested")


def several() -> Any:
    """Return a model with two inputs, of which the second is used late, and two outputs, the first of them early."""
    a, b = keras.Input((6,), name="a"), keras.Input((3,), name="b")
    y = keras.layers.Dense(8, "tanh", name="first")(a)
    early = keras.layers.Dense(1, name="early")(y)
    y = keras.layers.Dense(8, "tanh", name="second")(y)
    y = keras.layers.Concatenate(name="join")([y, b])
    y = keras.layers.Dense(8, "tanh", name="third")(y)
    late = keras.layers.Dense(2, name="late")(y)
    return keras.Model({"a": a, "b": b}, {"early": early, "late": late}, name="several")


MODELS: dict[str, Callable[[], Any]] = {f.__name__: f for f in (chain, skips, shared, nested, several)}
