"""Comparison of what a step does on shards with what it does on their union, up to rounding as measured.

Two computations of a gradient differ by rounding. By how much depends on the network: a deep one may amplify it until
it changes a gradient altogether. So where a difference shows, the step on the union is repeated with weights that
differ in their last bits; what this changes is rounding. Inputs stay: a mask may compare them with a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.training.checking.probe import GRADIENTS, METRICS, Effects, Probe, resources
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
"""Measurements, of which the largest counts: the change of a single number is near zero by chance now and then."""


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

    def measure(self, whole: Effects, changed: Iterable[Effects]) -> None:
        """Record the largest changes between a step and the same one with other last bits."""
        for other in changed:
            others = other.named()
            for name, array in whole.named().items():
                change = _norm(_difference(array, others.get(name)))
                self.changes[name] = max(self.changes.get(name, 0.0), change)

    def explains(self, name: str, norm: float, largest: float) -> float:
        """Return the norm of a difference that rounding explains.

        Parameters
        ----------
        norm : norm of the array.
        largest : largest norm of all arrays.
        """
        units = min(LAST_BITS * self.epsilon, LARGEST_UNMEASURED)
        noise = MARGIN * self.changes.get(name, 0.0)
        if name.startswith(GRADIENTS) and norm > FLOOR * largest:
            noise = min(noise, COMPARABLE * norm)  # a larger difference is another gradient, whatever rounding changes
        return max(units * norm, noise, self.epsilon * largest * 4, TINY)


def compare(whole: Effects, sharded: Effects, rounding: Rounding) -> Verdict:
    """Return the verdict of this rank on the effects of shards and of their union.

    Parameters
    ----------
    whole : effects for the union of the shards.
    sharded : effects for the shards, with averaged gradients.
    """
    if _shapes(whole) != _shapes(sharded):
        return Verdict(np.inf, np.inf, _first_other(whole, sharded))
    pairs = {name: (a, sharded.arrays[name]) for name, a in whole.arrays.items() if a is not None and a.size}
    norms = {name: _norm(a) for name, (a, _) in pairs.items()}
    largest = max((n for name, n in norms.items() if name.startswith(GRADIENTS)), default=0.0)
    worst = Verdict()
    for name, (a, b) in pairs.items():
        if b is None or not np.array_equal(np.isfinite(a), np.isfinite(b)):
            return Verdict(np.inf, np.inf, name)
        difference = _norm(_difference(a, b))
        rounded = max(rounding.explains(name, norms[name], largest), MARGIN * whole.resolutions.get(name, 0.0))
        excess = difference / rounded
        rank = (excess > 1 and not name.startswith(METRICS), excess)  # metrics are named where they alone differ
        if rank > (worst.excess > 1 and not worst.name.startswith(METRICS), worst.excess):
            worst = Verdict(excess, difference / max(norms[name], _norm(b), TINY), name)
    if worst.excess <= 1:
        noises = (rounding.changes[k] / n for k, n in norms.items() if n > FLOOR * largest and k in rounding.changes)
        noise = max(noises, default=None)
        hidden = bool(rounding.changes) and not any(
            MARGIN * rounding.changes.get(name, 0.0) < COMPARABLE * n for name, n in norms.items() if n
        )
        return Verdict(worst.excess, worst.difference, worst.name, None, noise, hidden and any(norms.values()))
    gradients = [pair for name, pair in pairs.items() if name.startswith(GRADIENTS)]
    return Verdict(worst.excess, worst.difference, worst.name, _ratio(gradients))


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


def _shapes(effects: Effects) -> dict[str, tuple[int, ...] | None]:
    return {name: None if a is None else a.shape for name, a in effects.arrays.items()}


def _first_other(whole: Effects, sharded: Effects) -> str:
    a, b = _shapes(whole), _shapes(sharded)
    return next(name for name in [*a, *b] if a.get(name, ()) != b.get(name, ()) or (name in a) != (name in b))


def _ratio(pairs: Sequence[tuple[Any, Any]]) -> float | None:
    """Return the ratio of the second arrays to the first, if they are a multiple of them other than one."""
    if not pairs:
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


def other_roundings(probe: Probe, model: Any, batch: Any) -> Iterator[Effects]:
    """Yield effects of a step on a whole batch, with weights that differ in their last bits.

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
            yield probe.run(batch)


def _changed(value: Any, signs: Any, unit: float) -> Any:
    """Return a tensor with its last bits changed."""
    array = np.asarray(value)
    sign = signs.integers(0, 2, array.shape, np.int8) * 2 - 1
    return tf.convert_to_tensor((array + array * (sign * unit)).astype(array.dtype))
