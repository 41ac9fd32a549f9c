"""Gradients that an optimizer adds up over steps: the ranks average their sum, once, before it is clipped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from matex_data.training.average.gradients import GradientAverage
from matex_data.training.exact.variables import inner_optimizer
from matex_data.training.keras_api import ACCUMULATING
from matex_data.training.replacements import Replacements


def accumulates(optimizer: Any) -> bool:
    """Return whether an optimizer adds up the gradients of some steps as Keras's own ones do."""
    inner = inner_optimizer(optimizer)
    keras_own = all(
        getattr(type(inner), name) is getattr(keras.optimizers.Optimizer, name) and name not in vars(inner)
        for name in ACCUMULATING
    )
    known = optimizer is inner or type(optimizer) is keras.optimizers.LossScaleOptimizer
    return bool(getattr(inner, "gradient_accumulation_steps", None)) and known and keras_own


class AccumulatedAverage:
    """Average over the ranks of gradients that an optimizer has added up.

    Each rank adds up its own gradients, times its weight and the number of ranks. So the mean over the ranks of what
    they have added up is, at any time, what one process would have added up.

    Parameters
    ----------
    optimizer : one that ``accumulates``.
    average : over the ranks.
    """

    def __init__(self, optimizer: Any, average: GradientAverage) -> None:
        self._outer, self._inner, self._average = optimizer, inner_optimizer(optimizer), average
        self._reducer, self._size = average.reducer, average.channel.size

    @contextlib.contextmanager
    def before_update(self) -> Iterator[None]:
        """Context manager: the optimizer averages gradients before it clips them. *Collective* in each update.

        With a scaled loss the ranks agree in each step on whether all gradients are finite.
        """
        with Replacements() as replacements:
            clip, check = self._inner._clip_gradients, getattr(self._outer, "check_finite", None)
            replacements.set(self._inner, "_clip_gradients", lambda gradients: clip(self._mean(gradients)))
            if check is not None:
                replacements.set(self._outer, "check_finite", lambda gradients: self._all_finite(check, gradients))
            yield

    def weighed(self, gradients: Sequence[Any]) -> list[Any]:
        """Return this rank's gradients, times its weight and the number of ranks; None stays None."""
        weight = self._average.weight()
        if not tf.is_tensor(weight):  # all ranks weigh equally
            return list(gradients)
        factor = weight * self._size
        return [g if g is None else tf.math.multiply_no_nan(g, tf.cast(factor, g.dtype)) for g in gradients]

    def _mean(self, gradients: Sequence[Any]) -> list[Any]:
        return self._reducer.average(list(gradients), 1 / self._size)

    def _all_finite(self, check: Callable[[Sequence[Any]], Any], gradients: Sequence[Any]) -> Any:
        (finite,) = self._reducer([tf.cast(check(gradients), tf.int32)], None, "min")
        return finite > 0
