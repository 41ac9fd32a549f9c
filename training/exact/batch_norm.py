"""Batch normalization over the global batch, and equal moving statistics on all ranks."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.training.comm.channel import Channel
from matex_data.training.exact.digests import content_digest
from matex_data.training.exact.state import step_state
from matex_data.training.exact.variables import row_states
from matex_data.training.reduction.ops import Reducer

ACCUMULATED = "_matex_accumulated"
"""Attribute of a model: a function that returns the gradients that each rank adds up by itself."""


def global_moment_variables(model: Any) -> list[Any]:
    """Return the moving statistics of layers that use the global batch; every batch changes them on every rank."""
    layers = [layer for layer in model._flatten_layers() if isinstance(vars(layer).get("_moments"), GlobalMoments)]
    return [variable for layer in layers for variable in layer.non_trainable_variables]


class GlobalMoments:
    """Replacement for ``layer._moments``: mean and variance over all ranks.

    Each call is *collective*, but for those in a step on whole batches.
    """

    def __init__(self, layer: Any, reducer: Reducer) -> None:
        self._layer = layer
        self._reducer = reducer

    def __call__(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        reducer, axes = self._reducer, self._layer._reduction_axes
        if step_state(reducer.channel).averaged:
            return type(self._layer)._moments(self._layer, inputs, mask)  # type: ignore[no-any-return]
        elements = tf.ones_like(inputs) if mask is None else _broadcast_mask(mask, inputs)
        # A rank with a stand-in row has no samples.
        elements *= tf.cast(step_state(reducer.channel).weight > 0, inputs.dtype)
        total, count = _sum(reducer, tf.reduce_sum(inputs * elements, axes), tf.reduce_sum(elements, axes))
        mean = tf.math.divide_no_nan(total, count)
        shape = [size if axis not in axes else 1 for axis, size in enumerate(inputs.shape)]
        # Deviations from the mean of all ranks: E(x^2) - E(x)^2 would lose the digits of a small variance.
        deviations = tf.square(inputs - tf.reshape(mean, shape)) * elements
        (spread,) = _sum(reducer, tf.reduce_sum(deviations, axes))
        return mean, tf.math.divide_no_nan(spread, count)


def _broadcast_mask(mask: Any, inputs: Any) -> Any:
    return tf.broadcast_to(tf.cast(mask, inputs.dtype)[..., None], tf.shape(inputs))


def _sum(reducer: Reducer, tensor: Any, *constants: Any) -> list[Any]:
    """Return the sums over all ranks of a tensor and of constants, in one message. *Collective*, like its gradient.

    It is differentiable any number of times. Rank s has the weight w[s] in the loss, the sum of w[s] * loss[s]. A sum
    enters the loss of every rank, so its derivative is the sum of w[s] * upstream[s]; that of this rank is later
    multiplied by its own weight.
    """
    weight = step_state(reducer.channel).weight

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def sums(tensor: Any) -> Any:
        def gradient(upstream: Any, *_: Any) -> Any:
            (total,) = _sum(reducer, upstream * tf.cast(weight, upstream.dtype))
            return tf.math.divide_no_nan(total, tf.cast(weight, total.dtype))

        return reducer([tensor, *constants]), gradient

    return list(sums(tensor))


def batch_normalizations(model: Any) -> list[Any]:
    """Return the layers of batch normalization in a model, nested ones, too."""
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.BatchNormalization)]


def local_normalizations(model: Any) -> list[Any]:
    """Return the layers of batch normalization that may use the statistics of this rank's rows alone in training.

    Also those in a part that a functional model calls with ``training=False``: ``fit`` calls it for training.
    """
    return [layer for layer in batch_normalizations(model) if layer.trainable and not layer.synchronized]


def moving_statistics(model: Any) -> list[Any]:
    """Return the weights that are not trained but may change, such as moving means."""
    own = {id(v) for v in row_states(model)}
    return [v for v in model.non_trainable_weights if keras.backend.is_float_dtype(v.dtype) and id(v) not in own]


def average_moving_statistics(model: Any, channel: Channel) -> None:
    """Average the moving statistics, and gradients that ranks add up, where ranks differ. *Collective*.

    Layers and optimizers change them by a linear rule, so it does not matter to later averages how often this happens.
    """
    if channel.size == 1:
        return
    variables = [*moving_statistics(model), *vars(model).get(ACCUMULATED, list)()]
    values = [np.asarray(v.value.numpy()) for v in variables]
    differ = np.flatnonzero(~channel.host.same(np.array([content_digest(value) for value in values], np.int64)))
    if not differ.size:
        return
    total = np.concatenate([values[i].ravel().astype(np.float64) for i in differ])
    channel.host.reduce(total)
    parts = np.split(total / channel.size, np.cumsum([values[i].size for i in differ])[:-1])
    for i, part in zip(differ, parts, strict=True):
        value = part.reshape(values[i].shape).astype(values[i].dtype)
        variables[i].value.assign(value, read_value=False)  # assign of Keras takes twice as long
