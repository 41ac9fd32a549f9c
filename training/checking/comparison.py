"""Comparison of what a step does on shards with what it does on their union, up to rounding as measured.

Two computations of a gradient differ by rounding. By how much depends on the network: a deep one may amplify it until
it changes a gradient altogether. So where a difference shows, the step on the union is repeated with weights that
differ in their last bits; what this changes is rounding. Inputs stay: a mask may compare them with a number.
A kink (of a ReLU at zero, say) that rounding decides changes a gradient at some weights and not at others, by more
than most last bits do. So the step on shards is repeated as well, and of each array the smallest difference counts:
rows that are combined make one at all weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.training.checking.probe import GRADIENTS, METRICS, Effects, resources
from matex_data.training.exact.attributes import kept_variables

LAST_BITS = 64
"""Differences below so many units in the last place of a gradient's norm count as rounding without a measurement."""
LARGEST_UNMEASURED = 1e-3
"""The same, relative, at most: 64 units of 16-bit numbers would be 6 %."""
MARGIN = 10
"""Largest difference due to rounding, in multiples of the one that changed last bits make."""
COMPARABLE = 0.3
"""Largest difference from rounding, relative to a gradient's norm, beside which a wrong gradient would be noticed."""
FLOOR = 1e-3
"""Gradients below this fraction of the largest norm are rounding errors, as of a bias before BatchNormalization."""
TINY = 1e-300
"""In place of zero in denominators."""
REPETITIONS = 3
"""Measurements, of which the largest change counts: that of a single number is near zero by chance now and then."""


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison.

    Parameters
    ----------
    excess : difference of the array that differs most, in multiples of what rounding explains.
    difference : the same difference, relative to the norm of that array.
    name : name of that array.
    ratio : ratio of the shards' gradients to those of the union, if one is a multiple of the other; else None.
    noise : largest change by rounding, relative to the norm of an array; None if it was not measured.
    hidden : rounding may change every gradient so much that a wrong one would not be noticed.
    """

    excess: float = 0.0
    difference: float = 0.0
    name: str = ""
    ratio: float | None = None
    noise: float | None = None
    hidden: bool = False

    @property
    def agree(self) -> bool:
        """Return whether nothing differs but by rounding."""
        return self.excess <= 1 and not self.hidden


class Rounding:
    """Changes of a step's effects by rounding.

    Parameters
    ----------
    epsilon : distance from 1 to the next number of the dtype in which the model computes.
    """

    def __init__(self, epsilon: float) -> None:
        self.epsilon = epsilon
        self.changes: dict[str, float] = {}

    def measure(self, whole: Effects, other: Effects) -> None:
        """Record the changes between a step and the same one with other last bits, if larger than those before."""
        others = other.named()
        for name, array in whole.named().items():
            change = _norm(_difference(array, others.get(name)))
            self.changes[name] = max(self.changes.get(name, 0.0), change)

    def explains(self, name: str, norm: float, largest: float) -> float:
        """Return the norm of a difference that rounding explains."""
        units = min(LAST_BITS * self.epsilon, LARGEST_UNMEASURED)
        noise = MARGIN * self.changes.get(name, 0.0)
        if name.startswith(GRADIENTS) and norm > FLOOR * largest:
            noise = min(noise, COMPARABLE * norm)  # a larger difference is another gradient, whatever rounding changes
        return max(units * norm, noise, self.epsilon * largest * 4, TINY)


def distances(whole: Effects, sharded: Effects) -> dict[str, float]:
    """Return the norm of the difference of each array of two effects.

    It is infinite where one of them has no such array, another shape, or other elements that are not finite.
    """
    found = {}
    for name in {**whole.arrays, **sharded.arrays}:
        a, b = whole.arrays.get(name), sharded.arrays.get(name)
        absent = name not in whole.arrays or name not in sharded.arrays
        if absent or a is None or b is None:
            found[name] = np.inf if absent or a is not b else 0.0
        elif a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
            found[name] = np.inf
        else:
            found[name] = _norm(_difference(a, b))
    return found


def judge(whole: Effects, sharded: Effects, differences: Mapping[str, float], rounding: Rounding) -> Verdict:
    """Return the verdict of this rank on the effects of shards and of their union.

    Parameters
    ----------
    whole : effects for the union of the shards.
    sharded : effects for the shards, with averaged gradients.
    differences : ``distances`` of their arrays; of each the smallest one, if it was compared more than once.
    """
    norms = {name: _norm(a) for name, a in whole.arrays.items()}
    largest = max((n for name, n in norms.items() if name.startswith(GRADIENTS)), default=0.0)
    worst = Verdict()
    for name, difference in differences.items():
        norm = norms.get(name, 0.0)
        rounded = max(rounding.explains(name, norm, largest), MARGIN * whole.resolutions.get(name, 0.0))
        excess = difference / rounded
        rank = (excess > 1 and not name.startswith(METRICS), excess)  # metrics are named where they alone differ
        if rank > (worst.excess > 1 and not worst.name.startswith(METRICS), worst.excess):
            relative = difference / max(norm, _norm(sharded.arrays.get(name)), TINY)
            worst = Verdict(excess, relative, name)
    if worst.excess <= 1:
        noises = (rounding.changes[k] / n for k, n in norms.items() if n > FLOOR * largest and k in rounding.changes)
        noise = max(noises, default=None)
        hidden = bool(rounding.changes) and not any(
            MARGIN * rounding.changes.get(name, 0.0) < COMPARABLE * n for name, n in norms.items() if n
        )
        return Verdict(worst.excess, worst.difference, worst.name, None, noise, hidden and any(norms.values()))
    return Verdict(worst.excess, worst.difference, worst.name, _ratio(whole, sharded))


def finite(effects: Effects) -> bool:
    """Return whether some gradient is finite, or none is there."""
    arrays = [a for name, a in effects.arrays.items() if a is not None and name.startswith(GRADIENTS)]
    return not arrays or any(np.isfinite(a).all() for a in arrays)


def _difference(a: Array | None, b: Array | None) -> Array | None:
    if a is None or b is None or a.shape != b.shape:
        return None
    if a.dtype.kind in "iub":
        return np.asarray(a != b, np.float64)
    with np.errstate(invalid="ignore"):
        return np.subtract(a, b, dtype=np.float64)


def _norm(array: Any) -> float:
    """Return the norm of an array; 0 for None. Elements that are not finite do not count."""
    if array is None:
        return 0.0
    squares = np.square(array, dtype=np.float64)
    return float(np.sqrt(np.sum(squares if np.isfinite(squares).all() else squares[np.isfinite(squares)])))


def _ratio(whole: Effects, sharded: Effects) -> float | None:
    """Return the ratio of the gradients of shards to those of their union, if they are a multiple other than one."""
    gradients = {name: a for name, a in whole.arrays.items() if name.startswith(GRADIENTS) and a is not None}
    pairs = [(a, b) for name, a in gradients.items() if (b := sharded.arrays.get(name)) is not None]
    if not pairs or len(pairs) < len(gradients) or any(a.shape != b.shape for a, b in pairs):
        return None
    a, b = (np.concatenate([np.asarray(x, np.float64).ravel() for x in side]) for side in zip(*pairs, strict=True))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    ratio = float(a @ b) / max(float(a @ a), TINY)
    multiple = float(np.linalg.norm(b - ratio * a)) <= 0.01 * float(np.linalg.norm(b))
    return ratio if multiple and abs(ratio - 1) > 0.05 else None


def epsilon(model: Any) -> float:
    """Return the distance from 1 to the next number of the dtype in which a model computes."""
    kinds = {layer.compute_dtype for layer in model._flatten_layers()} | {model.compute_dtype}
    kinds = {kind for kind in kinds if kind and keras.backend.is_float_dtype(kind)}
    return max(float(np.spacing(tf.as_dtype(kind).as_numpy_dtype(1))) for kind in kinds or {"float32"})


@contextlib.contextmanager
def other_last_bits(model: Any, number: int) -> Iterator[None]:
    """Context manager: the weights of a model differ in their last bits, in another way for each number."""
    weights = [v for v in resources(model.weights) if v.dtype.is_floating]
    signs, unit = np.random.default_rng(number), epsilon(model)
    with kept_variables(weights) as before:
        for variable, value in zip(weights, before, strict=True):
            variable.assign(_changed(value, signs, unit), read_value=False)
        yield


def _changed(value: Any, signs: Any, unit: float) -> Any:
    """Return a tensor with its last bits changed."""
    array = np.asarray(value)
    sign = signs.integers(0, 2, array.shape, np.int8) * 2 - 1
    return tf.convert_to_tensor((array + array * (sign * unit)).astype(array.dtype))
