"""The gradients that scripts take: they are averaged before the script clips them, and the user hears if nobody does.

One process clips the gradient of the global batch. A mean of gradients that each rank has clipped is another one.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from matex_data.training.channel import Channel
from matex_data.training.marks import are_own, mark_averaged, mark_own

log = logging.getLogger("matex_data.training")

CLIPPING = ("clip_by_global_norm", "clip_by_norm", "clip_by_value")


class GradientPatches:
    """Within this context tapes, ``tf.gradients`` and clipping are patched. What clips is *collective* then.

    Parameters
    ----------
    average : over the ranks.

    Attributes
    ----------
    taken : whether gradients have been taken.
    """

    def __init__(self, average: Callable[[list[Any]], list[Any]]) -> None:
        self.taken = False
        self._average = average
        self._hidden: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> GradientPatches:
        self._wrap(tf.GradientTape, "gradient", self._gradient)
        for owner in (tf, tf.compat.v1):
            self._wrap(owner, "gradients", self._gradients)
            for name in CLIPPING:
                self._wrap(owner, name, self._clip)
        return self

    def __exit__(self, *_: object) -> None:
        for owner, name, original in reversed(self._hidden):
            setattr(owner, name, original)
        self._hidden.clear()

    def _wrap(self, owner: Any, name: str, method: Any) -> None:
        original = getattr(owner, name)
        self._hidden.append((owner, name, original))

        @functools.wraps(original)
        def patched(*args: Any, **kwargs: Any) -> Any:
            return method(original, *args, **kwargs)

        setattr(owner, name, patched)

    def _gradient(self, original: Any, tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        return self._noted(sources, original(tape, target, sources, *args, **kwargs))

    def _gradients(self, original: Any, ys: Any, xs: Any, *args: Any, **kwargs: Any) -> Any:
        return self._noted(xs, original(ys, xs, *args, **kwargs))

    def _noted(self, sources: Any, gradients: Any) -> Any:
        """Those of variables are for training; others, such as those of a penalty, are left alone."""
        self.taken = True
        pairs = zip(_leaves(sources), _leaves(gradients), strict=True)
        mark_own([gradient for source, gradient in pairs if hasattr(source, "assign")])
        return gradients

    def _clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(original).bind(*args, **kwargs)
        name, tensors = next(iter(given.arguments.items()))
        several = isinstance(tensors, (list, tuple))
        gradients = list(tensors) if several else [tensors]
        if not are_own(gradients):
            return original(*args, **kwargs)
        averages = self._average(gradients)
        given.arguments[name] = averages if several else averages[0]
        given.arguments.pop("use_norm", None)  # that of this rank's gradients
        clipped = original(*given.args, **given.kwargs)
        mark_averaged(clipped[0] if several else [clipped])
        return clipped


def tell(patches: GradientPatches, opened: Channel) -> None:
    """At the end of a script: whether gradients were taken that nobody averaged."""
    if patches.taken and not opened.sums and opened.rank == 0:
        log.warning(
            "this script took gradients, but none was averaged: every rank trained on the same data, for itself\n"
            "  remedy: update weights by an optimizer of Keras 3 or tf.compat.v1 (not tf_keras, not by hand), "
            "or average gradients by matex_data.training.allreduce"
        )


def _leaves(structure: Any) -> list[Any]:
    """Tensors, slices and variables in order; None is one, too."""
    return list(tf.nest.flatten(structure))
