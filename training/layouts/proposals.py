"""Layouts that are proposed for weights that no key of a layout map fits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import keras

from matex_data.training.layouts.containers import Container, chain
from matex_data.training.layouts.rules import ELEMENTWISE

LARGE = 1 << 20
"""Elements of a kernel from which a Dense layer is cut alone: its output has to be gathered."""


def proposed(layers: Sequence[Any], found: Sequence[Container], once: set[int], shards: int) -> dict[int, int]:
    """Return axes along which to cut variables, by the ids of these.

    Attention is cut by heads, embeddings by vocabulary, pairs of Dense layers by the units between them, so that each
    block needs one sum; large Dense layers without a partner by units.

    Parameters
    ----------
    layers : all layers of the model, nested ones, too.
    found, once : functional models among them, and the ids of the layers that these call once.
    shards : number of shards; what it does not divide is not cut.
    """
    axes: dict[int, int] = {}
    for layer in layers:
        if type(layer) is keras.layers.MultiHeadAttention and layer.num_heads % shards == 0:
            axes.update({id(v): 0 if "attention_output" in v.path else 1 for v in _kernels(layer)})
        if type(layer) is keras.layers.Embedding and layer.input_dim % shards == 0:
            axes[id(layer.embeddings)] = 0
    for container in found:
        for first, second in _pairs(container, once):
            if first.units % shards == 0:
                axes[id(first.kernel)], axes[id(second.kernel)] = 1, 0
    for layer in layers:
        if type(layer) is keras.layers.Dense and layer.built and id(layer.kernel) not in axes:
            if math.prod(layer.kernel.shape) >= LARGE and layer.units % shards == 0:
                axes[id(layer.kernel)] = 1
    return axes


def _kernels(attention: Any) -> list[Any]:
    return [v for v in attention.trainable_variables if v.name == "kernel"]


def _pairs(container: Container, once: set[int]) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of Dense layers with nothing but elementwise layers between them; no layer is in two pairs."""
    taken: set[int] = set()
    for position, call in enumerate(container.calls):
        first = call.operation
        if type(first) is not keras.layers.Dense or id(first) not in once or id(first) in taken:
            continue
        if first.activation is not None and first.activation not in ELEMENTWISE:
            continue
        for behind in chain(container, position):
            second = container.calls[behind].operation
            if type(second) is keras.layers.Dense and id(second) in once:
                taken |= {id(first), id(second)}
                yield first, second
                break
            if not is_elementwise(second):
                break


def is_elementwise(layer: Any) -> bool:
    """Return whether a layer computes each element of the features by itself."""
    if type(layer) is keras.layers.Activation:
        return layer.activation in ELEMENTWISE
    return type(layer) in (keras.layers.Dropout, keras.layers.ReLU, keras.layers.LeakyReLU, keras.layers.ELU)
