"""``deferred``: models that are built without allocating them whole."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras

from matex_data.errors import ArgumentError, PartitionError
from matex_data.training import keras_api
from matex_data.training.comm.channel import open_channel
from matex_data.training.keras_api import keras_state
from matex_data.training.model_parallel.mesh import RankLayoutMap, check_used, cut_axis
from matex_data.training.partition.parts import AxisPart, hold
from matex_data.training.replacements import Replacements


class AbsentVariable(keras.Variable):  # type: ignore[misc]  # Keras has no types
    """Keras variable without values on this rank: another rank has them, or ``fit`` initializes them.

    Its shape, dtype and initializer are known, so that layers can be connected.
    """

    @property
    def value(self) -> Any:
        """Return initial values while Keras computes shapes; raise ``PartitionError`` otherwise."""
        if keras_api.in_stateless_scope():
            return super().value
        if "_matex_whole" in vars(self):  # fetched from the rank that has it, while the model is saved
            return vars(self)["_matex_whole"]()
        raise PartitionError(
            "this rank has no values of a variable",
            field=self.path,
            expected="a variable of this rank's part of the model",
            found="one that another rank has, or of a deferred model that is not trained yet",
            remedy="train it with training.fit(..., mesh=mesh); write the whole model with training.save(model, path)",
        )


@contextlib.contextmanager
def deferred(layouts: Any = None) -> Iterator[None]:
    """Context manager: build Keras models of which each rank allocates only its part. *Collective*.

    The initial values are those that one process would have: all ranks draw the seeds of rank 0. Where a layout cuts a
    variable, each rank computes the whole initial value of this one variable and keeps its part. Metrics and optimizers
    that are made within have their values at once.

    Parameters
    ----------
    layouts : ``mesh.layout_map()``, which says what is cut over the ranks of a mesh. None, a map that proposes
        layouts itself, or one of a mesh with stages: the variables get their values in ``fit(..., mesh=mesh)``, and
        cannot be read before.

    Raises
    ------
    ArgumentError : ``layouts`` is none of a mesh.
    PartitionError : on all ranks, if a layout does not fit its variable, or fits none.

    Examples
    --------
    >>> import keras, matex_data as md
    >>> layouts = md.training.Mesh(model=1).layout_map()
    >>> layouts["up/kernel"] = (None, "model")
    >>> with md.training.deferred(layouts):
    ...     inputs = keras.Input((3,))
    ...     model = keras.Model(inputs, keras.layers.Dense(4, name="up")(inputs))
    >>> model.weights[0].numpy().shape  # with model=2: (3, 2)
    (3, 4)
    """
    if layouts is not None and not isinstance(layouts, RankLayoutMap):
        raise ArgumentError(
            "training.deferred() takes no layouts= of this kind",
            expected="mesh.layout_map() of a training.Mesh, or None",
            found=repr(layouts),
        )
    channel = open_channel(None if layouts is None else layouts.mesh.world)
    random.setstate(channel.communicator.broadcast(random.getstate()))  # from which Keras draws seeds
    before = keras_api.take_uninitialized()
    try:
        with keras.StatelessScope(initialize_variables=False) as scope, Replacements() as replacements:
            for owner, name in ((keras.metrics.Metric, "add_variable"), (keras.optimizers.Optimizer, "__init__")):
                replacements.set(owner, name, _outside_of_scopes(getattr(owner, name)))
            yield
    finally:
        created = keras_api.take_uninitialized()
        keras_state.set_global_attribute(keras_api.UNINITIALIZED, before)
    pending = layouts is None or layouts.proposes or layouts.mesh.shape[1] > 1
    if layouts is not None and not layouts.proposes:
        check_used(layouts, [variable.path for variable in created])
    for variable in created:
        object.__setattr__(variable, "_matex_deferred", True)
        given = scope.get_current_value(variable)  # the script has assigned values within the block
        if given is not None:
            value = given.numpy()
            object.__setattr__(variable, keras_api.INITIALIZER, lambda *_, value=value, **__: value)
        if pending and keras.backend.is_float_dtype(variable.dtype):
            variable.__class__ = AbsentVariable
        else:
            initialize(variable, None if pending else layouts)


def _outside_of_scopes(create: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that creates variables outside of any stateless scope, so that they have values."""

    @functools.wraps(create)
    def created(*args: Any, **kwargs: Any) -> Any:
        scope = keras_state.get_global_attribute(keras_api.STATELESS)
        keras_state.set_global_attribute(keras_api.STATELESS, None)
        try:
            return create(*args, **kwargs)
        finally:
            keras_state.set_global_attribute(keras_api.STATELESS, scope)

    return created


def initialize(variable: Any, layouts: Any = None) -> None:
    """Give a deferred variable its initial values, or this rank's part of them.

    Parameters
    ----------
    layouts : those of a mesh; None: the variable stays whole.
    """
    variable.__class__ = keras.Variable
    whole = tuple(variable.shape)
    axis = None if layouts is None else cut_axis(layouts, variable.path, whole)
    if axis is None:
        keras_api.set_value(variable, keras_api.initial_value(variable))
        return
    part = AxisPart(open_channel(layouts.mesh.model), whole, axis)
    hold(variable, part, part.own(keras_api.initial_value(variable)))


def initialize_absent(variables: Iterable[Any]) -> None:
    """Give those variables of a deferred model that have no values their initial values."""
    for variable in variables:
        if is_absent(variable):
            initialize(variable)


def leave_to_others(variables: Iterable[Any]) -> None:
    """Free the values of variables, which other ranks have from now on."""
    for variable in variables:
        variable.__class__ = AbsentVariable
        object.__setattr__(variable, "_value", None)


def is_deferred(variable: Any) -> bool:
    """Return whether a variable was created within ``deferred``."""
    return "_matex_deferred" in vars(variable)


def is_absent(variable: Any) -> bool:
    """Return whether this rank has no values of a variable."""
    return isinstance(variable, AbsentVariable)
