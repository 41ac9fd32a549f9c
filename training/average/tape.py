"""Average gradients where a script computes them.

A script may clip gradients, scale them by their norm, add noise or accumulate them. Applied to averages, this gives
the result of one process; an average of clipped gradients is another number.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from matex_data.training.average.gradients import GradientAverage
from matex_data.training.keras_api import is_recording
from matex_data.training.replacements import Replacements


class GradientPatches:
    """Context manager: ``GradientTape.gradient`` and ``tf.gradients`` return averages over the ranks.

    Gradients with respect to variables are averaged. Gradients with respect to other tensors, as in a gradient
    penalty, stay local, and so do gradients that an outer tape may differentiate again; the optimizer averages those.

    Parameters
    ----------
    average : of the gradients over the ranks. *Collective*.
    enabled : function that returns whether to average now.
    """

    def __init__(self, average: GradientAverage, enabled: Callable[[], bool] = lambda: True) -> None:
        self._average = average
        self._enabled = enabled
        self._replacements = Replacements()

    def __enter__(self) -> GradientPatches:
        self._patch(tf.GradientTape, "gradient")
        for owner in (tf, tf.compat.v1):
            self._patch(owner, "gradients")
        return self

    def __exit__(self, *_: object) -> None:
        self._replacements.restore()

    def _patch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)
        keyword, position = ("xs", 1) if name == "gradients" else ("sources", 2)

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            gradients = original(*args, **kwargs)
            if not self._enabled() or is_recording():
                return gradients
            return self._average_variables(kwargs[keyword] if keyword in kwargs else args[position], gradients)

        self._replacements.set(owner, name, patched)

    def _average_variables(self, sources: Any, gradients: Any) -> Any:
        """Average the gradients whose sources are variables."""
        leaves = tf.nest.flatten(gradients)
        pairs = enumerate(zip(tf.nest.flatten(sources), leaves, strict=True))
        selected = [i for i, (source, leaf) in pairs if hasattr(source, "assign") and leaf is not None]
        for i, average in zip(selected, self._average.computed([leaves[i] for i in selected]), strict=True):
            leaves[i] = average
        return tf.nest.pack_sequence_as(gradients, leaves)
