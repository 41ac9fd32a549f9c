"""The gradients that scripts take are averaged where they are taken, so that all that follows is that of one process.

A script may clip gradients, scale them by their norm, add noise or accumulate them: of averages that gives what one
process has; an average of what each rank has made of its own part would be something else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from matex_data.training.keras_api import is_recording

_TAG = "_matex_averaged"
Average = Callable[[list[Any]], list[Any]]


class GradientPatches:
    """Context in which tapes and ``tf.gradients`` give the average over the ranks for variables.

    Gradients with respect to other tensors, such as those of a penalty, stay as they are; so do those that an outer
    tape may differentiate again, which the optimizer averages.

    Parameters
    ----------
    average : over the ranks. *Collective*.
    wanted : whether the gradients of now are averaged.
    """

    def __init__(self, average: Average, enabled: Callable[[], bool] = lambda: True) -> None:
        self._average = average
        self._enabled = enabled
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> GradientPatches:
        self._wrap(tf.GradientTape, "gradient")
        for owner in (tf, tf.compat.v1):
            self._wrap(owner, "gradients")
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals.clear()

    def _wrap(self, owner: Any, name: str) -> None:
        """Patch a function whose last positional arguments are targets and sources."""
        original = getattr(owner, name)
        self._originals.append((owner, name, original))
        names = ("ys", "xs") if name == "gradients" else ("target", "sources")

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            gradients = original(*args, **kwargs)
            if not self._enabled() or is_recording():
                return gradients
            sources = kwargs[names[1]] if names[1] in kwargs else args[1 if name == "gradients" else 2]
            return self._average_variables(sources, gradients)

        setattr(owner, name, patched)

    def _average_variables(self, sources: Any, gradients: Any) -> Any:
        leaves = tf.nest.flatten(gradients)
        pairs = zip(tf.nest.flatten(sources), leaves, strict=True)
        own = [i for i, (source, gradient) in enumerate(pairs) if hasattr(source, "assign") and gradient is not None]
        for i, average in zip(own, average_untagged([leaves[i] for i in own], self._average), strict=True):
            leaves[i] = average
        return tf.nest.pack_sequence_as(gradients, leaves)


def average_untagged(gradients: Sequence[Any], average: Average) -> list[Any]:
    """Return all of them averaged; tensors that are averages already stay as they are."""
    untagged = [i for i, gradient in enumerate(gradients) if gradient is not None and not hasattr(gradient, _TAG)]
    result = list(gradients)
    for i, gradient in zip(untagged, average([gradients[i] for i in untagged]) if untagged else [], strict=True):
        setattr(gradient, _TAG, True)
        result[i] = gradient
    return result
