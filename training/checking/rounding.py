"""Effect of rounding on a step, measured: weights and inputs that differ in their last bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.training.checking.probe import Effects, Probe, resources
from matex_data.training.checking.state import kept_variables

REPETITIONS = 3
"""Measurements, of which the largest counts: the change of a single number is near zero by chance now and then."""


def epsilon(model: Any) -> float:
    """Return the distance from 1 to the next number of the dtype in which a model computes."""
    kinds = {layer.compute_dtype for layer in model._flatten_layers()} | {model.compute_dtype}
    kinds = {kind for kind in kinds if kind and keras.backend.is_float_dtype(kind)}
    return max(float(np.spacing(tf.as_dtype(kind).as_numpy_dtype(1))) for kind in kinds or {"float32"})


def other_roundings(probe: Probe, model: Any, batch: Any) -> Iterator[Effects]:
    """Yield effects of a step on a whole batch whose weights and inputs differ in their last bits.

    Parameters
    ----------
    probe : step on whole batches.
    """
    weights = [v for v in resources(model.weights) if v.dtype.is_floating]
    signs, unit = np.random.default_rng(0), epsilon(model)
    for _ in range(REPETITIONS):
        with kept_variables(weights) as before:
            for variable, value in zip(weights, before, strict=True):
                variable.assign(_changed(value, signs, unit), read_value=False)
            yield probe.run(tf.nest.map_structure(lambda leaf: _changed(leaf, signs, unit), batch))


def _changed(value: Any, signs: Any, unit: float) -> Any:
    """Return a tensor with its last bits changed; integers and texts as they are."""
    if not isinstance(value, tf.Tensor) or not value.dtype.is_floating:
        return value
    array = np.asarray(value)
    sign = signs.integers(0, 2, array.shape, np.int8) * 2 - 1
    return tf.convert_to_tensor((array + array * (sign * unit)).astype(array.dtype))
