"""Reads of variables by other code than that of their layer, as tied embeddings have them."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Collection, Iterator
from typing import Any

import keras
import tensorflow as tf

from matex_data.training.exact.attributes import kept_by_calls
from matex_data.training.replacements import Replacements

log = logging.getLogger("matex_data.training")
_READ_ELSEWHERE = "_matex_read_elsewhere"
"""Attribute of a model: ids of the variables that have been found."""


def read_elsewhere(model: Any, element_spec: Any, proposals: Collection[int], says: bool) -> set[int]:
    """Return the ids of variables that code outside of their layer reads, which would take a part for the whole.

    Parameters
    ----------
    model : built Keras model, of which one call is traced.
    proposals : ids of the variables to look at.
    says : name what is found in a message.
    """
    known: set[int] | None = vars(model).get(_READ_ELSEWHERE)  # later, ranks may lack values
    if known is None:
        owners = {id(v): (v, layer) for layer in model._flatten_layers() for v in layer._trainable_variables}
        known = set(_traced(model, element_spec, owners))
        object.__setattr__(model, _READ_ELSEWHERE, known)
        if says and not known.isdisjoint(proposals):
            paths = ", ".join(owners[key][0].path for key in known.intersection(proposals))
            log.warning("other code than their layers reads these weights, which stay whole on every rank: %s", paths)
    return known.intersection(proposals)


def _traced(model: Any, element_spec: Any, owners: dict[int, Any]) -> Iterator[int]:
    """Yield the ids of variables that a call of a model reads outside of the layers that own them."""
    running: list[int] = []
    read: list[int] = []
    value = keras.Variable.value.fget

    def noted(variable: Any) -> Any:
        read.extend(key for key in [id(variable)] if key in owners and id(owners[key][1]) not in running)
        return value(variable)

    def called(layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        running.append(id(layer))
        try:
            return call(*args, **kwargs)
        finally:
            running.pop()

    def call(batch: Any) -> Any:
        with keras.StatelessScope(initialize_variables=False):  # variables may have no values
            return model(keras.utils.unpack_x_y_sample_weight(batch)[0], training=True)

    with Replacements() as replacements, kept_by_calls(model):
        for layer in {id(layer): layer for _, layer in owners.values()}.values():
            wrapped = functools.wraps(layer.call)(functools.partial(called, layer, layer.call))
            replacements.set(layer, "call", wrapped)
        replacements.set(keras.Variable, "value", property(noted))
        with contextlib.suppress(Exception):  # of any kind, which the step raises again
            tf.function(call, autograph=False).get_concrete_function(element_spec)
            yield from dict.fromkeys(read)
