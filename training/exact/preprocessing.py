"""Preprocessing layers, which have to be adapted to the same samples on all ranks: their states are compared."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data.epochs.tfdata import is_feature_space
from matex_data.errors import PartitionError
from matex_data.paths import is_library
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.rows import is_sharded


def check_preprocessing(user: Any, channel: Channel) -> None:
    """Raise ``PartitionError`` on all ranks unless they have the same state of each adapted layer. *Collective*.

    Parameters
    ----------
    user : of the layers: a model, or data, in which the functions of a ``tf.data`` pipeline with this rank's rows call
        them. All other data has none.
    """
    if channel.size == 1:
        return
    if hasattr(user, "_flatten_layers"):
        found: Iterable[Any] = user._flatten_layers()
    else:
        found = _layers_of(user) if isinstance(user, tf.data.Dataset) and is_sharded(user) else ()
    layers = list({id(layer): layer for layer in found if hasattr(layer, "adapt")}.values())
    if not layers:
        return
    by_rank = channel.host.allgather_object([(layer.name, _digest(layer)) for layer in layers])
    for rank, states in enumerate(by_rank):
        differ = [name for (name, state), (_, first) in zip(states, by_rank[0], strict=False) if state != first]
        if differ:
            raise PartitionError(
                f"the preprocessing layer {differ[0]!r} has another state on rank {rank} than on rank 0",
                expected="a layer that all ranks have adapted to the same samples",
                found="states that differ, as after layer.adapt() of a rank's own rows",
                remedy="adapt it to the samples of all ranks: data.adapt(layer)",
            )


def _layers_of(dataset: tf.data.Dataset) -> Iterator[Any]:
    """Yield the layers that the functions of a pipeline call, each maybe more than once."""
    for function in dataset._functions():
        yield from _layers_within(function._func, set())
    for source in dataset._inputs():
        yield from _layers_of(source)


def _layers_within(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the layers that a function calls, or other functions of the program that it calls."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if is_feature_space(value):
        yield from value.preprocessors.values()
    elif hasattr(value, "_flatten_layers"):
        yield from value._flatten_layers()
    else:
        for used in _used_by(value):
            yield from _layers_within(used, seen)


def _used_by(value: Any) -> Iterable[Any]:
    """Return what a container holds, or a function, method or call with given arguments refers to."""
    if isinstance(value, FunctionType):
        return () if is_library(value.__code__.co_filename) else _used_by_function(value)
    if isinstance(value, MethodType) and hasattr(value.__self__, "__dict__"):
        return value.__func__, *vars(value.__self__).values()
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _used_by_function(function: FunctionType) -> Iterator[Any]:
    """Yield the objects that a function refers to by the names of its code."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a variable without a value yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield from (function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global names of a function's code, and of functions within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _digest(layer: Any) -> str:
    """Return a text that identifies the weights, the vocabulary and the borders of bins of a layer."""
    digest = hashlib.blake2b(digest_size=16)
    for value in layer.get_weights():
        digest.update(np.ascontiguousarray(value).data)
    if hasattr(layer, "get_vocabulary"):
        digest.update(repr([str(token) for token in layer.get_vocabulary()]).encode("utf-8", "surrogateescape"))
    digest.update(repr(np.asarray(getattr(layer, "bin_boundaries", None)).tolist()).encode())
    return digest.hexdigest()
