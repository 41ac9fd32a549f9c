"""Optimizers of parts of weights: norms over all parts, equal decisions of their ranks, and a section on each rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.average.optimizer import GradientAverage
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.variables import inner_optimizer
from matex_data.training.keras_api import held_value, note_variables
from matex_data.training.partition.parts import (
    Nested,
    Part,
    all_leave,
    broadcast_in,
    channels_of,
    hold,
    hold_alike,
    join_variable,
    part_of,
    slots,
    whole_shape,
)
from matex_data.training.replacements import Replacements, left_on_error
from matex_data.training.zero.sections import FlatSection, gathered_wholes, summed_sections

_NAMES = "Adadelta Adagrad Adam AdamW Adamax Ftrl Lion Nadam RMSprop SGD"
ELEMENTWISE = [getattr(keras.optimizers, name) for name in _NAMES.split()]
"""Optimizers that update each element of a weight from its own gradient and state alone."""


def check_elementwise(optimizer: Any) -> None:
    """Raise ``PartitionError`` unless an optimizer is known to update parts of weights as within the whole."""
    inner = inner_optimizer(optimizer)
    if type(inner) not in ELEMENTWISE:
        raise PartitionError(
            "this optimizer may update an element of a weight depending on others, which another rank has",
            field=type(inner).__name__,
            expected=f"one of {', '.join(_NAMES.split())}",
            found=type(inner).__module__,
            remedy="take one of these, or train without a mesh and without shard_optimizer",
        )


def check_constraint(variable: Any, axis: int | None = None) -> None:
    """Raise ``PartitionError`` if the constraint of a variable may depend on elements that another rank has.

    Parameters
    ----------
    axis : along which the variable is cut; None: each rank has a section of its elements.
    """
    constraint = variable.constraint
    if constraint is None or type(constraint) is keras.constraints.NonNeg:
        return
    norms = (keras.constraints.MaxNorm, keras.constraints.UnitNorm, keras.constraints.MinMaxNorm)
    of_norm = constraint.axis if axis is not None and type(constraint) in norms else None
    axes = [of_norm] if isinstance(of_norm, int) else of_norm
    if axes is None or axis in [i % len(whole_shape(variable)) for i in axes]:
        raise PartitionError(
            "a constraint of a variable may depend on elements that another rank has",
            field=variable.path,
            expected="no constraint, or NonNeg" if axis is None else f"a norm along axes other than {axis}, or NonNeg",
            found=type(constraint).__name__,
            remedy="leave it out; or cut the variable along another axis, and train without shard_optimizer",
        )


Totals = Sequence[tuple[Channel, Callable[..., Any]]]
"""Channels of ranks that hold parts, each with a sum, or another reduction, of a tensor over them. *Collective*."""


class PartOptimizer:
    """Context manager: an optimizer clips by norms over all parts, and scales losses alike on all ranks that hold them.

    Parameters
    ----------
    totals : over the ranks that hold parts of variables; those of nested parts from the innermost one on.
    others : the same reduction over ranks that hold other variables, such as other stages; None: there are none.
    elsewhere : paths of the variables that one of these ranks counts in the norm of all gradients.
    """

    def __init__(
        self,
        optimizer: Any,
        totals: Totals,
        others: Callable[..., Any] | None = None,
        elsewhere: Collection[str] = (),
    ) -> None:
        self._outer, self._inner = optimizer, inner_optimizer(optimizer)
        unconverted = tf.autograph.experimental.do_not_convert
        self._totals = [(channel, unconverted(total)) for channel, total in totals if channel.size > 1]
        self._others = None if others is None else unconverted(others)
        self._elsewhere = set(elsewhere)
        self._variables: Sequence[Any] = ()
        self._replacements = Replacements()

    @left_on_error
    def __enter__(self) -> PartOptimizer:
        self._update = self._inner._backend_apply_gradients
        self._replacements.set(self._inner, "_backend_apply_gradients", self._apply)
        of_all = self._inner.global_clipnorm is not None and (self._totals or self._others is not None)
        if of_all or (self._inner.clipnorm is not None and self._totals):
            self._replacements.set(self._inner, "_clip_gradients", self._clipped)
        if self._outer is not self._inner:
            self._check_finite = self._outer.check_finite
            self._replacements.set(self._outer, "check_finite", self._all_finite)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self._replacements.restore()

    def _apply(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Update the variables, and note them for ``_clipped``, which gets gradients alone."""
        self._variables = list(variables)
        return self._update(gradients, variables)

    def _all_finite(self, gradients: Sequence[Any]) -> Any:
        """Return whether the gradients of all parts are finite. *Collective*."""
        finite = tf.cast(self._check_finite(gradients), tf.int32)
        for _, total in self._totals:
            finite = total(finite, "min")
        return (finite if self._others is None else self._others(finite, "min")) > 0

    def _clipped(self, gradients: Sequence[Any]) -> list[Any]:
        """Return the gradients clipped by their norms over all parts. *Collective*.

        One reduction adds up the squared norms; variables that are whole count once.
        """
        wide = [tf.float64 if g.dtype == tf.float64 else tf.float32 for g in gradients]
        wide = wide if len(set(wide)) == 1 else [tf.float64] * len(wide)
        # Of sparse ones as Keras does, whose rows may occur twice.
        values = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        squares = tf.stack([tf.reduce_sum(tf.square(tf.cast(v, d))) for v, d in zip(values, wide, strict=True)])
        for channel, total in self._totals:
            cut = [channel in channels_of(variable) for variable in self._variables]
            squares = tf.where(cut, total(squares), squares)
        if self._inner.clipnorm is not None:
            limit, norms = self._inner.clipnorm, tf.unstack(tf.sqrt(squares))
            return [scaled(g, limit / tf.maximum(norm, limit)) for g, norm in zip(gradients, norms, strict=True)]
        counted = [variable.path not in self._elsewhere for variable in self._variables]
        square = tf.reduce_sum(tf.where(counted, squares, tf.zeros_like(squares)))
        limit, norm = self._inner.global_clipnorm, tf.sqrt(square if self._others is None else self._others(square))
        scale = limit / tf.maximum(norm, limit) + (norm - norm)  # as in Keras NaN for all, if the norm is infinite
        return [scaled(g, scale) for g in gradients]


def scaled(gradient: Any, factor: Any) -> Any:
    """Return the product of a gradient, dense or sparse, and a number."""
    if isinstance(gradient, tf.IndexedSlices):
        product = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(product, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)


class OwnedOptimizer(PartOptimizer):
    """Context manager: each rank updates its section of every weight, and has the state of these sections alone.

    The optimizer is built for variables with the sections. A step sets them to those of the weights, updates them, and
    sets the weights to what all ranks have; so callbacks may change the weights as ever. Entering and leaving are
    *collective*, and so is ``apply`` in between. Afterwards all ranks have the whole state, as a saved model needs it.

    Parameters
    ----------
    weights : variables that it trains, of which this rank may have parts alone.
    clipping : reductions over other ranks that take part in clipping and in scaling losses; see ``PartOptimizer``.

    Raises
    ------
    PartitionError : the optimizer does not update each element by itself, or a constraint changes the weights.
    """

    def __init__(
        self, optimizer: Any, weights: Sequence[Any], average: GradientAverage, totals: Totals = (), **clipping: Any
    ) -> None:
        check_elementwise(optimizer)
        super().__init__(optimizer, [(average.channel, average.reducer.total), *totals], **clipping)
        self._average, self._weights = average, list(weights)
        for weight in self._weights:
            check_constraint(weight)
        self._forms = [FlatSection(average.channel, tuple(weight.shape)) for weight in self._weights]

    @left_on_error
    def __enter__(self) -> OwnedOptimizer:
        self._sections = [_section(w, form) for w, form in zip(self._weights, self._forms, strict=True)]
        self._positions = {id(weight): i for i, weight in enumerate(self._weights)}
        self._take_state()
        super().__enter__()
        self._apply_whole = type(self._outer).apply.__get__(self._outer)
        self._decays = self._inner._use_weight_decay
        self._finalize = self._outer.finalize_variable_values
        self._replacements.set(self._outer, "apply", self._apply_sections)
        self._replacements.set(self._outer, "finalize_variable_values", self._finalize_sections)
        self._replacements.set(self._inner, "_use_weight_decay", self._section_decays)
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        super().__exit__()
        for slot in self._outer.variables if all_leave(self._average.channel, kind) else ():
            if self._average.channel in channels_of(slot):
                join_variable(slot)
        note_variables(self._outer, self._weights)

    def _take_state(self) -> None:
        """Build the optimizer for the sections; or cut its state, if it was built for the weights. *Collective*."""
        if not self._outer.built:
            self._outer.build(self._sections)
            for slot, section in slots(self._outer, self._sections):
                if slot.shape == section.shape:
                    hold_alike(slot, section)
            return
        note_variables(self._outer, self._sections)
        for slot, weight in slots(self._outer, self._weights):
            if slot.shape == weight.shape:
                broadcast_in(self._average.channel, [slot])
                form = self._forms[self._positions[id(weight)]]
                hold(slot, _within(form, weight), form.own(held_value(slot)))

    def _apply_sections(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> Any:
        """Update the sections from the gradients of all ranks. *Collective*."""
        update = tf.autograph.experimental.do_not_convert(self._update_sections)
        return update(list(grads), self._weights if trainable_variables is None else list(trainable_variables))

    def _update_sections(self, gradients: list[Any], weights: list[Any]) -> Any:
        pairs = [(g, self._positions[id(w)]) for g, w in zip(gradients, weights, strict=True) if g is not None]
        numbers = [i for _, i in pairs]
        own = self._own([g for g, _ in pairs], numbers)
        for i in numbers:
            self._sections[i].assign(self._forms[i].section(self._weights[i].value))
        with self._average.state.only_averages():
            self._apply_whole(own, [self._sections[i] for i in numbers])
        self._publish(numbers)

    def _own(self, gradients: list[Any], numbers: list[int]) -> list[Any]:
        """Return this rank's sections of the averages of gradients. *Collective*."""
        state, reducer, found = self._average.state, self._average.reducer, dict[int, Any]()
        local = [k for k, g in enumerate(gradients) if not (state.averaged or state.is_average(g))]
        slices = [k for k in local if isinstance(gradients[k], tf.IndexedSlices)]
        dense = [k for k in local if k not in slices]
        weight = self._average.weight() if local else None
        if dense:
            forms = [self._forms[numbers[k]] for k in dense]
            summed = summed_sections(forms, [gradients[k] for k in dense], weight, reducer.wire_dtype)
            found.update(zip(dense, summed, strict=True))
        averages = dict(zip(slices, reducer.average([gradients[k] for k in slices], weight), strict=True))
        return [
            found[k] if k in found else self._forms[i].section(averages.get(k, gradients[k]))
            for k, i in enumerate(numbers)
        ]

    def _publish(self, numbers: list[int]) -> None:
        """Set weights to the sections of all ranks. *Collective*."""
        wholes = gathered_wholes([self._forms[i] for i in numbers], [self._sections[i].value for i in numbers])
        for i, whole in zip(numbers, wholes, strict=True):
            self._weights[i].assign(whole)

    def _section_decays(self, section: Any) -> Any:
        """Return whether the weight of a section decays, which ``exclude_from_weight_decay`` says by its identity."""
        own = (
            weight
            for weight, part in zip(self._weights, self._sections, strict=True)
            if section is part or section is part.value
        )
        return self._decays(next(own, section))

    def _finalize_sections(self, variables: Sequence[Any]) -> None:
        """Set the weights to their moving averages, if the optimizer keeps these. *Collective* then."""
        if self._inner.use_ema:
            self._finalize(self._sections)
            self._publish(list(range(len(self._weights))))


def _section(weight: Any, form: FlatSection) -> Any:
    """Return a variable with this rank's section of a weight, under the name of the weight."""
    section = keras.Variable(
        lambda *_, **__: form.own(weight.value.numpy()), (form.elements,), weight.dtype, name=weight.name
    )
    object.__setattr__(section, "_path", weight.path)
    section.constraint = weight.constraint
    hold(section, _within(form, weight), section.value.numpy())
    return section


def _within(form: FlatSection, weight: Any) -> Part:
    """Return the form of a section of a weight, of which this rank may have a part alone."""
    part = part_of(weight)
    return form if part is None else Nested(form, part)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raise ``PartitionError`` if a callback takes moving averages of weights from an optimizer that has sections."""
    if any(isinstance(callback, keras.callbacks.SwapEMAWeights) for callback in callbacks):
        raise PartitionError(
            "SwapEMAWeights needs whole moving averages of the weights on every rank",
            expected="callbacks that leave the optimizer's state alone",
            found="SwapEMAWeights with shard_optimizer",
            remedy="leave out one of them; without it, fit ends with the moving averages",
        )
