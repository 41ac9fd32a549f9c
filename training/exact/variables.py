"""Variables of a model: creation, broadcast, and which of them are equal on all ranks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.errors import ArgumentError, PartitionError
from matex_data.mpi.library import MPI
from matex_data.training.arguments import open_checked
from matex_data.training.comm.channel import Channel, check_root
from matex_data.training.exact.attributes import kept_by_calls
from matex_data.training.exact.digests import content_digest
from matex_data.training.partition.parts import broadcast_in
from matex_data.training.replacements import Replacements, replaced

SEED_STEP = 0x9E3779B9
"""Difference of the seeds of neighbouring ranks: 2**32 over the golden ratio, which keeps all ranks far apart."""
DRIFT = 1e-5
"""Largest difference of a weight between ranks, relative to its norm: processors may round differently."""


def broadcast(variables: Iterable[Any], root: int = 0, *, comm: MPI.Intracomm | None = None) -> None:
    """Broadcast the values of variables from rank ``root``. *Collective*.

    Parameters
    ----------
    variables : Keras or TensorFlow variables, of the same number, shapes and dtypes on every rank.
    root : rank whose values all ranks get.
    comm : communicator; None: all ranks of the job.

    Raises
    ------
    ArgumentError : ``variables`` are none.
    PartitionError : there is no rank ``root``.
    RuntimeError : on all ranks, if the ranks have different variables.

    Examples
    --------
    >>> import keras, matex_data as md
    >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    >>> md.training.broadcast(model.variables)  # all ranks now start from the weights of rank 0
    """
    listed: list[Any] = []

    def check() -> None:
        listed.extend(variables)
        others = [type(one).__name__ for one in listed if not hasattr(one, "assign")]
        if others:
            raise ArgumentError("training.broadcast() takes variables alone", expected="variables", found=others[0])

    channel = open_checked("training.broadcast", broadcast, locals(), check)
    check_root(channel, root)
    broadcast_in(channel, listed, root)


def build(model: Any, element_spec: Any) -> None:
    """Create the variables of a compiled model, its metrics and its optimizer, without reading any data."""
    with kept_by_calls(model):
        try:
            _build_layers(model, element_spec)
            model._symbolic_build(data_batch=element_spec)
            is_built = all(optimizer.built for optimizer in optimizers(model) if optimizer is not model.optimizer)
        except Exception:  # some models work in their own train_step alone, and fail with any error elsewhere
            is_built = False
            if model.run_eagerly:
                _build_without_functions(model, element_spec)
        if not is_built and not model.run_eagerly:  # further optimizers know their variables in a step alone
            tf.function(model.train_step, autograph=False).get_concrete_function(element_spec)
    if model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def build_losses(model: Any, data: Any) -> None:
    """Create the losses and metrics of a compiled model that is evaluated before it is trained, where Keras can."""
    with tf.init_scope(), contextlib.suppress(Exception):  # of any kind: a test_step of the model's own may do anything
        spec = tf.nest.map_structure(lambda leaf: tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype), data)
        with replaced(model, optimizer=None), kept_by_calls(model):
            _build_layers(model, spec)
            model._symbolic_build(data_batch=spec)


def build_without_optimizer(model: Any, element_spec: Any) -> None:
    """Create the variables of a compiled model, unless they exist; like ``build``, but not those of its optimizer."""
    with kept_by_calls(model):
        _build_layers(model, element_spec)


def _build_layers(model: Any, element_spec: Any) -> None:
    """Create the variables of layers, unless they exist, by a trace of a call, as one process does.

    Keras's symbolic build creates no variable from a value, neither ``tf.Variable(tf.ones(4))`` nor
    ``keras.Variable(array)``, and leaves layers that have run half of their ``build``.
    """

    def call(batch: Any) -> Any:
        return model(keras.utils.unpack_x_y_sample_weight(batch)[0], training=True)

    if not all(layer.built for layer in model._flatten_layers()):
        tf.function(call, autograph=False).get_concrete_function(element_spec)


@contextlib.contextmanager
def assignments_of_build(optimizer: Any) -> Iterator[list[str]]:
    """Context manager: list the variables to which ``build`` of an optimizer assigns values.

    In one process Keras builds it while it traces the first step, and what is assigned there never runs.
    """
    assigned: list[str] = []
    original = keras.Variable.assign

    def assign(variable: Any, value: Any) -> Any:
        assigned.append(variable.path)
        return original(variable, value)

    def assign_of_optimizer(variable: Any, value: Any) -> None:
        assigned.append(getattr(variable, "path", variable.name))
        type(optimizer).assign(optimizer, variable, value)

    def build(variables: Any) -> None:
        with replaced(keras.Variable, assign=assign), replaced(optimizer, assign=assign_of_optimizer):
            type(optimizer).build(optimizer, variables)

    with contextlib.nullcontext() if optimizer is None else replaced(optimizer, build=build):
        yield assigned


def _build_without_functions(model: Any, element_spec: Any) -> None:
    """Create variables without a call of losses and metrics, whose functions may work on NumPy arrays alone."""
    symbolic = tf.nest.map_structure(lambda spec: keras.KerasTensor(spec.shape, spec.dtype.name), element_spec)
    x, y, _ = keras.utils.unpack_x_y_sample_weight(symbolic)
    predicted = model(x, training=False)
    for part in (model._compile_metrics, model._compile_loss):
        if part is not None and not part.built:
            part.build(y, predicted)


def optimizers(model: Any) -> list[Any]:
    """Return the optimizer that a model is compiled with, and those among its attributes, also within containers."""
    own = {id(x): x for x in _within(list(vars(model).values())) if hasattr(x, "apply_gradients")}
    own.pop(id(model.optimizer), None)
    return [optimizer for optimizer in [model.optimizer, *own.values()] if optimizer is not None]


def optimizer_variables(model: Any) -> list[Any]:
    """Return the variables of all optimizers of a model."""
    return [variable for optimizer in optimizers(model) for variable in optimizer.variables]


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer that updates the weights: that within a ``LossScaleOptimizer``."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def learning_rate(optimizer: Any) -> Any:
    """Return the variable of the learning rate; None if it follows a schedule, or there is no optimizer."""
    rate = getattr(inner_optimizer(optimizer), "_learning_rate", None)
    return rate if isinstance(rate, keras.Variable) else None


def _within(value: Any) -> Iterator[Any]:
    """Yield a value, or what a dict, list or tuple holds, at any depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _within(item)
    else:
        yield value


def changing_variables(layer: Any) -> list[Any]:
    """Return the variables that a call of a layer may change: seeds, moving statistics, states; not frozen weights."""
    frozen = {id(v) for inner in layer._flatten_layers() for v in inner._trainable_variables}
    return [v for v in layer.non_trainable_variables if id(v) not in frozen]


def row_states(model: Any) -> list[Any]:
    """Return the states of stateful recurrent layers, which have one row for each row of this rank's batch."""
    layers = [layer for layer in model._flatten_layers() if getattr(layer, "stateful", False)]
    return [v for layer in layers for v in keras.tree.flatten(getattr(layer, "states", None)) if v is not None]


def replicated_weights(model: Any) -> list[Any]:
    """Return the weights of a model that are equal on all ranks."""
    own = {id(v) for v in row_states(model)}
    return [v for v in model.weights if id(v) not in own]


def replicated_variables(model: Any) -> list[Any]:
    """Return the variables that are equal on all ranks: weights and optimizer state, neither seeds nor metrics."""
    return [*replicated_weights(model), *optimizer_variables(model)]


def seeds(model: Any) -> list[Any]:
    """Return the states of the random layers of a model, which are equal on all ranks; see ``separate_draws``."""
    return [v for v in model.non_trainable_variables if "seed_generator" in v.path]


def check_equal_weights(model: Any, channel: Channel) -> None:
    """Raise ``PartitionError`` on all ranks unless their trained weights are equal, up to rounding. *Collective*."""
    weights = model.trainable_variables if channel.size > 1 else []
    values = [np.asarray(v.value.numpy()) for v in weights]
    digests = np.array([content_digest(value) for value in values], np.int64)
    for i in np.flatnonzero(~channel.host.same(digests)) if weights else ():
        of_root = values[i].astype(np.float64)
        channel.host.broadcast(of_root.reshape(-1))
        norms = [float(np.linalg.norm(array)) for array in (values[i] - of_root, of_root)]
        difference = np.array([norms[0] / max(norms[1], 1e-300)])
        channel.host.reduce(difference, "max")
        if not difference[0] <= DRIFT:
            raise PartitionError(
                "the ranks have different weights: this rank's gradients were applied as they are",
                field=weights[i].path,
                expected="the same weights on all ranks",
                found=f"a difference of {difference[0]:.2g} of its size",
                remedy="apply gradients by an optimizer that is an attribute of the model, or make it by "
                "md.training.distribute; draw no random numbers that change the weights",
            )


def _placed(op: Any) -> str:
    """Return the device of an operation as it is: a function of the user's own is traced again where this places it."""
    return str(op.device)


@contextlib.contextmanager
def separate_draws(rank: int) -> Iterator[None]:
    """Context manager: random layers, and functions such as ``tf.random.normal``, draw other numbers on each rank.

    That holds for this thread, also for graphs that it traces within. Rank 0 draws those of one process. States of
    seeds are the same on all ranks, so that what a script draws elsewhere is so, too.
    """
    graph, shift, thread = tf.compat.v1.get_default_graph(), rank * SEED_STEP % 2**32, threading.get_ident()
    following = keras.random.SeedGenerator.next

    def drawn(generator: Any, ordered: bool = True) -> Any:
        seed = following(generator, ordered)
        return seed + tf.cast([shift, 0], seed.dtype) if threading.get_ident() == thread else seed

    tracing = not tf.executing_eagerly()
    with Replacements() as replacements, graph.device(_placed) if tracing else contextlib.nullcontext():
        if rank:
            replacements.set(keras.random.SeedGenerator, "next", drawn)
            if not tf.executing_eagerly() and graph.seed is not None:
                replacements.set(graph, "seed", (graph.seed + shift) % 2**32)
        yield
