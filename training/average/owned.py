"""An optimizer whose state is cut over the ranks of data-parallel training (ZeRO, stage 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.average.gradients import GradientAverage
from matex_data.training.keras_api import note_variables
from matex_data.training.partition.optimizer import PartOptimizer, inner_optimizer
from matex_data.training.partition.parts import cut, hold, hold_alike, restore, slots, whole_on_all
from matex_data.training.partition.values import broadcast_in
from matex_data.training.reduction.owners import Flat, gathered_wholes, summed_sections


class OwnedOptimizer:
    """Context manager: each rank updates its section of every weight, and has the state of these sections alone.

    The optimizer is built for variables with the sections. A step sets them to those of the weights, updates them, and
    sets the weights to what all ranks have; so callbacks may change the weights as ever. Entering and leaving are
    *collective*, and so is ``apply`` in between. Afterwards all ranks have the whole state, as a saved model needs it.

    Parameters
    ----------
    model : compiled Keras model with variables.
    average : average of its gradients over the ranks.
    gradients_are_local : the model's own step hands over gradients of its rows, not averages.

    Raises
    ------
    PartitionError : the optimizer does not update each element by itself, or a constraint changes the weights.
    """

    def __init__(self, model: Any, average: GradientAverage) -> None:
        self._model, self._average = model, average
        self._optimizer = model.optimizer
        self._inner = inner_optimizer(model.optimizer)
        self._weights = list(model.trainable_variables)
        for weight in self._weights:
            _check(weight)
        self._forms = [Flat(average.channel, tuple(weight.shape)) for weight in self._weights]
        self._clipping = PartOptimizer(model.optimizer, lambda tensor, op="sum": average.reducer([tensor], None, op)[0])

    def __enter__(self) -> OwnedOptimizer:
        self._sections = [_section(w, form) for w, form in zip(self._weights, self._forms, strict=True)]
        self._positions = {id(weight): i for i, weight in enumerate(self._weights)}
        self._slots = self._built_slots() if self._optimizer.built else self._new_slots()
        self._clipping.__enter__()
        self._apply = self._optimizer.apply
        object.__setattr__(self._optimizer, "apply", self._apply_sections)
        self._finalize = self._optimizer.finalize_variable_values
        object.__setattr__(self._optimizer, "finalize_variable_values", self._finalize_sections)
        return self

    def __exit__(self, *_: object) -> None:
        for name in ("apply", "finalize_variable_values"):
            vars(self._optimizer).pop(name, None)
        self._clipping.__exit__()
        for slot in self._slots:
            restore(slot, whole_on_all(slot))
        note_variables(self._optimizer, self._weights)

    def _new_slots(self) -> list[Any]:
        """Build the optimizer for the sections; return its state of them."""
        self._optimizer.build(self._sections)
        found = [(slot, s) for slot, s in slots(self._optimizer, self._sections) if slot.shape == s.shape]
        for slot, section in found:
            hold_alike(slot, section)
        return [slot for slot, _ in found]

    def _built_slots(self) -> list[Any]:
        """Cut the state of an optimizer that was built for whole weights; return it. *Collective*."""
        note_variables(self._optimizer, self._sections)
        found = [(slot, w) for slot, w in slots(self._optimizer, self._weights) if slot.shape == w.shape]
        for slot, weight in found:
            broadcast_in(self._average.channel, [slot])
            cut(slot, self._forms[self._positions[id(weight)]])
        return [slot for slot, _ in found]

    def _apply_sections(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Update the sections from the gradients of all ranks. *Collective*."""
        update = tf.autograph.experimental.do_not_convert(self._update)
        return update(list(grads), self._weights if trainable_variables is None else list(trainable_variables))

    def _update(self, gradients: list[Any], weights: list[Any]) -> Any:
        pairs = [(g, self._positions[id(w)]) for g, w in zip(gradients, weights, strict=True) if g is not None]
        numbers = [i for _, i in pairs]
        own = self._own([g for g, _ in pairs], numbers)
        for i in numbers:
            self._sections[i].assign(self._forms[i].rows(self._weights[i].value)[self._average.channel.rank])
        self._apply(own, [self._sections[i] for i in numbers])
        self._publish(numbers)

    def _own(self, gradients: list[Any], numbers: list[int]) -> list[Any]:
        """Return this rank's sections of the averages of gradients. *Collective*."""
        state, found = self._average.state, dict[int, Any]()
        dense = [tf.convert_to_tensor(g) for g in gradients]
        averaged = [state.averaged or state.is_average(g) for g in gradients]
        local = [k for k, done in enumerate(averaged) if not done]
        if local:
            forms = [self._forms[numbers[k]] for k in local]
            summed = summed_sections(forms, [dense[k] for k in local], self._average.weight())
            found.update(zip(local, summed, strict=True))
        rank = self._average.channel.rank
        return [found[k] if k in found else self._forms[i].rows(dense[k])[rank] for k, i in enumerate(numbers)]

    def _publish(self, numbers: list[int]) -> None:
        """Set weights to the sections of all ranks. *Collective*."""
        wholes = gathered_wholes([self._forms[i] for i in numbers], [self._sections[i].value for i in numbers])
        for i, whole in zip(numbers, wholes, strict=True):
            self._weights[i].assign(whole)

    def _finalize_sections(self, variables: Sequence[Any]) -> None:
        """Set the weights to their moving averages, if the optimizer keeps these. *Collective* then."""
        if self._inner.use_ema:
            self._finalize(self._sections)
            self._publish(list(range(len(self._weights))))


def _section(weight: Any, form: Flat) -> Any:
    """Return a variable with this rank's section of a weight, under the name of the weight."""
    section = keras.Variable(lambda *_, **__: form.own(weight.value.numpy()), (form.elements,), weight.dtype, name=weight.name)
    object.__setattr__(section, "_path", weight.path)
    section.constraint = weight.constraint
    hold(section, form, lambda: section.value.numpy())
    return section


def _check(weight: Any) -> None:
    """Raise an error if a constraint of a weight may need the other sections.

    Raises
    ------
    PartitionError : it may.
    """
    if weight.constraint is not None and type(weight.constraint) is not keras.constraints.NonNeg:
        raise PartitionError(
            "a constraint of a weight may depend on elements that another rank has",
            field=weight.path,
            expected="no constraint, or NonNeg",
            found=type(weight.constraint).__name__,
            remedy="train without shard_optimizer",
        )
