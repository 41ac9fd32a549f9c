"""Optimizers of parts of weights: norms over all parts, and equal decisions on all ranks that hold them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import keras
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.comm.channel import Channel
from matex_data.training.partition.parts import channels_of
from matex_data.training.replacements import Replacements

ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Adadelta,
    keras.optimizers.Adagrad,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
)
"""Optimizers that update each element of a weight from its own gradient and state alone."""


def check_elementwise(optimizer: Any) -> None:
    """Raise an error unless an optimizer updates parts of weights as it would update them within the whole.

    Raises
    ------
    PartitionError : it does not, as far as is known.
    """
    inner = inner_optimizer(optimizer)
    if type(inner) not in ELEMENTWISE:
        raise PartitionError(
            "this optimizer may update an element of a weight depending on others, which another rank has",
            field=type(inner).__name__,
            expected=f"one of {', '.join(sorted(kind.__name__ for kind in ELEMENTWISE))}",
            found=type(inner).__module__,
            remedy="take one of these, or train without a mesh and without shard_optimizer",
        )


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that updates the weights: that within a ``LossScaleOptimizer``."""
    return getattr(optimizer, "inner_optimizer", optimizer)


Totals = Sequence[tuple[Channel, Callable[..., Any]]]
"""Channels of ranks that hold parts, each with a sum, or another reduction, of a tensor over them. *Collective*."""


class PartOptimizer:
    """Context manager: an optimizer clips by norms over all parts, and scales losses alike on all ranks that hold them.

    Parameters
    ----------
    optimizer : Keras optimizer.
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

    def __exit__(self, *_: object) -> None:
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
        squares = tf.stack(
            [tf.reduce_sum(tf.square(tf.cast(values(g), d))) for g, d in zip(gradients, wide, strict=True)]
        )
        for channel, total in self._totals:
            cut = [channel in channels_of(variable) for variable in self._variables]
            squares = tf.where(cut, total(squares), squares)
        if self._inner.clipnorm is not None:
            limit, norms = self._inner.clipnorm, tf.unstack(tf.sqrt(squares))
            return [scaled(g, limit / tf.maximum(norm, limit)) for g, norm in zip(gradients, norms, strict=True)]
        counted = [variable.path not in self._elsewhere for variable in self._variables]
        square = tf.reduce_sum(tf.where(counted, squares, tf.zeros_like(squares)))
        limit, norm = self._inner.global_clipnorm, tf.sqrt(square if self._others is None else self._others(square))
        return [scaled(g, limit / tf.maximum(norm, limit)) for g in gradients]


def values(gradient: Any) -> Any:
    """Return the values of a gradient, dense or sparse."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)  # rows may occur twice
    return gradient


def scaled(gradient: Any, factor: Any) -> Any:
    """Return the product of a gradient, dense or sparse, and a number."""
    if isinstance(gradient, tf.IndexedSlices):
        product = gradient.values * tf.cast(factor, gradient.values.dtype)
        return tf.IndexedSlices(product, gradient.indices, gradient.dense_shape)
    return gradient * tf.cast(factor, gradient.dtype)
