"""Graph of the forward pass and the losses of a model, traced without a trace left in the model."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.training.keras_api import CHANGED_BY_CALLS, get_keras_mask
from matex_data.training.proof.axes import Reason
from matex_data.training.proof.propagate import NORMALIZED, STATISTICS


@dataclass
class LossValue:
    """Loss of one output before it is reduced to a number.

    Parameters
    ----------
    name : name of the loss.
    reduction : how Keras reduces it.
    values : tensor of the losses, weighted by sample weights and masks.
    masked : the losses have a mask.
    weighted : the losses have sample weights.
    own_call : the class of the loss calls and reduces it in a way of its own.
    """

    name: str
    reduction: str | None
    values: Any
    masked: bool
    weighted: bool
    own_call: bool = False


@dataclass
class Traced:
    """Graph with what a training step computes before anything is reduced.

    Parameters
    ----------
    graph : ``FuncGraph``; its inputs are the leaves of inputs, targets and sample weights, then what it has captured.
    outputs : numbers of outputs of the graph: predictions, masks of the predictions, losses, added losses, in order.
    """

    graph: Any = None
    predictions: int = 0
    losses: list[LossValue] = field(default_factory=list)
    added: int = 0
    changes: list[Reason] = field(default_factory=list)


def trace(model: Any, x: Any, y: Any, sample_weight: Any) -> Traced:
    """Return the graph of a model's forward pass in training and of its losses.

    Parameters
    ----------
    model : built Keras model.
    x, y, sample_weight : nested ``tf.TensorSpec``; the sizes of axes of samples are None.
    """
    traced = Traced()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # as Keras does
    def forward(x: Any, y: Any, sample_weight: Any) -> list[Any]:
        with tf.GradientTape():
            outputs = model(x, training=True) if model._call_has_training_arg else model(x)
            predictions = [leaf for leaf in tf.nest.flatten(outputs) if leaf is not None]
            masks = [mask for mask in map(get_keras_mask, predictions) if mask is not None]
            if getattr(model, "_compile_loss", None) is not None:
                with recorded_losses(model._compile_loss, traced.losses):
                    model._compile_loss(y, outputs, sample_weight)
            added = list(model.losses)
        traced.predictions, traced.added = len(predictions) + len(masks), len(added)
        return [*predictions, *masks, *(loss.values for loss in traced.losses), *added]

    with unchanged(model, traced.changes), _marked_statistics(model):
        traced.graph = tf.function(forward).get_concrete_function(x, y, sample_weight).graph
    return traced


@contextlib.contextmanager
def recorded_losses(compiled: Any, losses: list[LossValue]) -> Iterator[None]:
    """Context manager: the losses that a model is compiled with are recorded before they are reduced."""
    original = compiled._flat_losses
    compiled._flat_losses = [entry._replace(loss=_Recorded(_plain(entry.loss), losses)) for entry in original or ()]
    try:
        yield
    finally:
        compiled._flat_losses = original


def _plain(loss: Any) -> Any:
    """Return the loss that a wrapper of this package holds."""
    return vars(loss).get("loss", loss) if type(loss).__module__.startswith("matex_data.") else loss


_CALL = keras.losses.Loss.__call__


class _Recorded:
    """Loss that records its values and returns zero."""

    def __init__(self, loss: Any, losses: list[LossValue]) -> None:
        self._loss = loss
        self._losses = losses

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        if not isinstance(self._loss, keras.losses.Loss):  # a function: Keras adds what it returns
            reduction, values, masked = "sum", self._loss(y_true, y_pred, sample_weight), False
        else:
            each = object.__new__(type(self._loss))  # `copy` would serialize the loss
            vars(each).update(vars(self._loss), reduction="none")
            values = each(y_true, y_pred, sample_weight)
            masked = get_keras_mask(y_pred) is not None
            reduction = self._loss.reduction
        name = getattr(self._loss, "name", type(self._loss).__name__)
        own_call = isinstance(self._loss, keras.losses.Loss) and type(self._loss).__call__ is not _CALL
        self._losses.append(LossValue(name, reduction, values, masked, sample_weight is not None, own_call))
        return tf.zeros([], values.dtype)


@contextlib.contextmanager
def _marked_statistics(model: Any) -> Iterator[None]:
    """Context manager: operations that return batch statistics of ``BatchNormalization`` carry a name."""
    layers = [x for x in model._flatten_layers() if isinstance(x, keras.layers.BatchNormalization)]
    layers = [x for x in layers if type(x)._moments is keras.layers.BatchNormalization._moments]
    originals = [vars(layer).get("_moments") for layer in layers]
    for layer in layers:
        object.__setattr__(layer, "_moments", _Marked(layer))
    try:
        yield
    finally:
        for layer, original in zip(layers, originals, strict=True):
            if original is None:
                object.__delattr__(layer, "_moments")
            else:
                object.__setattr__(layer, "_moments", original)


class _Marked:
    """Mean and variance of a ``BatchNormalization`` layer, as operations with a name."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        inputs, mask = (None if x is None else tf.identity(x, name=NORMALIZED) for x in (inputs, mask))
        mean, variance = type(self._layer)._moments(self._layer, inputs, mask)
        return tf.identity(mean, name=STATISTICS), tf.identity(variance, name=STATISTICS)


@contextlib.contextmanager
def unchanged(model: Any, changes: list[Reason]) -> Iterator[None]:
    """Context manager: afterwards attributes of the model and Python's random numbers are as before.

    Parameters
    ----------
    changes : receives a reason for every attribute that has changed.
    """
    objects = [model, *(x for x in model._flatten_layers() if x is not model), *_losses(model)]
    before = [(owner, dict(vars(owner)), _contents(owner)) for owner in objects]
    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for owner, attributes, contents in before:
            changes += _restore(owner, attributes, contents)
        if random.getstate() != states[0] or not _equal(np.random.get_state(), states[1]):
            changes.append(Reason(model.name, "call", "draws random numbers of Python or NumPy while it is traced"))
        random.setstate(states[0])
        np.random.set_state(states[1])


def _losses(model: Any) -> list[Any]:
    compiled = getattr(model, "_compile_loss", None)
    return [] if compiled is None else [_plain(entry.loss) for entry in compiled._flat_losses or ()]


def _equal(first: Any, second: Any) -> bool:
    return bool(first[0] == second[0] and first[2:] == second[2:] and np.array_equal(first[1], second[1]))


def _contents(owner: Any) -> dict[str, Any]:
    """Return copies of the containers among the attributes."""
    containers = {name: value for name, value in vars(owner).items() if isinstance(value, list | dict | set)}
    return {name: _plain_copy(value) for name, value in containers.items()}


def _plain_copy(container: Any) -> Any:
    return next(kind(container) for kind in (list, dict, set) if isinstance(container, kind))


def _restore(owner: Any, attributes: dict[str, Any], contents: dict[str, Any]) -> list[Reason]:
    """Restore attributes of an object; return one reason for each that the model's own code has changed."""
    now = vars(owner)
    changed = [n for n in {*attributes, *now} if n not in now or n not in attributes or now[n] is not attributes[n]]
    changed += [name for name, old in contents.items() if not _same_items(attributes[name], old)]
    for name in set(changed) - set(attributes):
        now.pop(name)
    for name in changed:
        if name in attributes:
            now[name] = attributes[name]
    for name, old in contents.items():
        _refill(attributes[name], old)
    if type(owner).__module__.startswith("keras."):
        return []  # what Keras's layers change, as dropout masks of cells, is no state
    name = getattr(owner, "name", type(owner).__name__)
    own = sorted(set(changed) - set(CHANGED_BY_CALLS))
    return [Reason(name, attribute, "is an attribute that changes when the model is called") for attribute in own]


def _same_items(now: Any, old: Any) -> bool:
    if isinstance(now, dict):
        return list(now) == list(old) and all(now[key] is old[key] for key in old)
    return now == old if isinstance(now, set) else len(now) == len(old) and all(
        a is b for a, b in zip(now, old, strict=True))  # fmt: skip


def _refill(container: Any, old: Any) -> None:
    """Restore the items of a list, dict or set, past the tracking of Keras."""
    kind: Any = next(kind for kind in (list, dict, set) if isinstance(container, kind))
    if not _same_items(container, old):
        kind.clear(container)
        (kind.extend if kind is list else kind.update)(container, old)
