"""Optimizer for the weights of all stages: names and shapes of its variables, without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from matex_data.training.partition.parts import whole_shape


def whole_optimizer(optimizer: Any, variables: Sequence[Any]) -> Any:
    """Return a new optimizer of this kind, built for these variables.

    Its variables are in a graph that never runs, so that they have paths, shapes and dtypes, but no memory.

    Parameters
    ----------
    optimizer : Keras optimizer.
    variables : Keras variables, of which some may have no values.

    Examples
    --------
    >>> import keras
    >>> kernel = keras.Variable(1.0, name="kernel")
    >>> [v.path for v in whole_optimizer(keras.optimizers.SGD(momentum=0.9), [kernel]).variables]
    ['sgd/iteration', 'sgd/learning_rate', 'sgd/kernel_momentum']
    """
    config = optimizer.get_config()
    with tf.Graph().as_default():
        twin = type(optimizer).from_config(config)
        twin.build([_twin(variable) for variable in variables])
        return twin


def _twin(variable: Any) -> Any:
    """Return a variable of the same path, whole shape and dtype in the default graph."""
    *scopes, name = variable.path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable("zeros", shape=whole_shape(variable), dtype=variable.dtype, name=name)
