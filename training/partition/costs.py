"""Cost of each call of a model, by its weights and the shapes of its tensors."""

from __future__ import annotations

import math

import keras

from matex_data.training.partition.graph import Call, ModelGraph, Spec

UNKNOWN_LENGTH = 32
"""Length that is assumed of an axis of any length, such as that of a text."""
COST_OF_ELEMENT = 32
"""Multiplications in whose time an element of a result is written and read again, forward and back."""
NORMALIZED = 4
"""Results in whose time a normalization reads and writes one: it takes moments, applies them, and the same back.

Both are those of ResNet-20, -29 (bottlenecks), -50, MobileNetV2, InceptionV3 and DenseNet121 on one core. Of ResNet-20,
convolutions, normalizations and activations are 0.52, 0.35 and 0.08 of the time, and 0.58, 0.31 and 0.07 of the cost.
"""
NORMALIZATIONS = (keras.layers.BatchNormalization, keras.layers.GroupNormalization, keras.layers.LayerNormalization)


def estimated_costs(graph: ModelGraph) -> list[float]:
    """Return the cost of each call for a sample, in multiplications.

    Examples
    --------
    >>> import keras
    >>> from matex_data.training.partition.graph import model_graph
    >>> layers = [keras.Input((8,)), keras.layers.Dense(4, use_bias=False), keras.layers.ReLU()]
    >>> estimated_costs(model_graph(keras.Sequential(layers)))
    [160.0, 128.0]
    """
    return [
        _cost(call, [graph.specs[i] for i in call.inputs], [graph.specs[i] for i in call.outputs])
        for call in graph.calls
    ]


def elements(spec: Spec) -> int:
    """Return the number of elements of a tensor for a sample."""
    return math.prod(UNKNOWN_LENGTH if size is None else size for size in spec.shape[1:])


def _cost(call: Call, inputs: list[Spec], outputs: list[Spec]) -> float:
    operation = call.operation
    written = COST_OF_ELEMENT * sum(map(elements, outputs))
    if not isinstance(operation, keras.layers.Layer) or isinstance(operation, keras.layers.Embedding):
        return float(written)
    if isinstance(operation, NORMALIZATIONS):
        return float(NORMALIZED * written)
    matrices = sum(math.prod(weight.shape) for weight in operation.weights if len(weight.shape) > 1)
    positions = max(map(_positions, inputs if isinstance(operation, keras.layers.RNN) else outputs), default=1)
    products = 0
    if isinstance(operation, keras.layers.MultiHeadAttention | keras.layers.Attention):
        products = 2 * positions * max(map(elements, outputs), default=0)
    return float(written + matrices * positions + products)


def _positions(spec: Spec) -> int:
    """Return the number of vectors of a sample to which a kernel is applied: all elements over the channels."""
    return elements(spec) // max(1, spec.shape[-1] or UNKNOWN_LENGTH) if len(spec.shape) > 2 else 1
