"""Variables that an optimizer would have for the weights of all stages: their names and shapes, without memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from matex_data.training.partition.parts import whole_shape


def whole_optimizer_variables(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return the variables of a new optimizer of this kind, built for these variables, in its order.

    They are in a graph of their own that never runs, so that they have paths, shapes and dtypes, but no memory.

    Parameters
    ----------
    optimizer : Keras optimizer.
    variables : Keras variables, of which some may have no values.

    Examples
    --------
    >>> import keras
    >>> kernel = keras.Variable(1.0, name="kernel")
    >>> [v.path for v in whole_optimizer_variables(keras.optimizers.SGD(momentum=0.9), [kernel])]
    ['sgd/iteration', 'sgd/learning_rate', 'sgd/kernel_momentum']
    """
    config = optimizer.get_config()
    with tf.Graph().as_default():
        twin = type(optimizer).from_config(config)
        twin.build([_twin(variable) for variable in variables])
        return list(twin.variables)


def _twin(variable: Any) -> Any:
    """Return a variable of the same path, whole shape and dtype in the default graph."""
    *scopes, name = variable.path.split("/")
    with contextlib.ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        return keras.Variable("zeros", shape=whole_shape(variable), dtype=variable.dtype, name=name)
