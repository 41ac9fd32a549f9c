"""Average of gradients over the ranks, each of them once.

A script may clip averages, scale, sum or keep them before an optimizer gets them. Nothing in these tensors shows where
they come from. So the ranks compare them: what is equal on all ranks, bit by bit, is its own average and is not sent;
everything else is averaged. Weights therefore stay equal on all ranks, whatever a script computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from matex_data.training.compat import in_session_graph, note_steps, session_weight
from matex_data.training.exact.batch_weights import batch_weights
from matex_data.training.exact.state import step_state
from matex_data.training.keras_api import is_recording
from matex_data.training.reduction.ops import Reducer
from matex_data.training.reduction.payloads import WHOLE
from matex_data.training.replacements import Replacements


class GradientAverage:
    """Weighted average of gradients over the ranks of a channel.

    Parameters
    ----------
    reducer : sums gradients over the ranks.

    Attributes
    ----------
    state : state of the step that these ranks run.
    """

    def __init__(self, reducer: Reducer) -> None:
        self.reducer = reducer
        self.channel = reducer.channel
        self.state = step_state(reducer.channel)

    def computed(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the averages of gradients that were computed from the rows of this rank. *Collective*.

        Parameters
        ----------
        gradients : dense tensors or ``tf.IndexedSlices``; None stays None.
        """
        self.state.returned = True
        return self._average(gradients, unless_equal=False)

    def applied(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the averages of gradients that an optimizer is about to apply. *Collective*.

        Averages stay as they are. If the step has computed averages before, gradients that are equal on all ranks stay,
        too: they were computed from these averages.
        """
        return self._average(gradients, unless_equal=self.state.returned)

    def _average(self, gradients: Sequence[Any], unless_equal: bool) -> list[Any]:
        result = list(gradients)
        local = [i for i, g in enumerate(result) if g is not None and not self.state.is_average(g)]
        if not local:
            return result
        averages = self.reducer.average([result[i] for i in local], self.weight(), unless_equal)
        if in_session_graph():
            note_steps(averages)
        for i, average in zip(local, averages, strict=True):
            result[i] = average
        self.state.note(averages)
        return result

    def weight(self) -> Any:
        """Return the weight of this rank: of the step, of the batches that a loop took, or that a session feeds."""
        if self.state.running:
            return self.state.weight
        if in_session_graph():
            return session_weight(WHOLE)
        return batch_weights(self.channel.communicator).next_step_weight()


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
