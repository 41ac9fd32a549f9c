"""Rules: how a layer computes with weights of which each rank holds a part.

A rule replaces ``call`` of one layer. Inputs and outputs are whole, and equal on all ranks of the layer, unless the
layers before and behind allow them to stay cut along the last axis; see ``plan``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from matex_data.training.keras_api import get_keras_mask, set_keras_mask
from matex_data.training.model_parallel.layouts.entropy import cut_logits
from matex_data.training.model_parallel.layouts.ranks import ModelRanks
from matex_data.training.partition.parts import as_whole, hiding_parts
from matex_data.training.replacements import Replacements

running: ContextVar[object] = ContextVar("running", default=None)
"""Functional model whose layers are called at present; None outside of such models."""

_NAMES = """elu exponential gelu hard_sigmoid hard_silu leaky_relu linear mish relu relu6 selu sigmoid silu softplus
softsign tanh"""
ELEMENTWISE = {getattr(keras.activations, name) for name in _NAMES.split()}
"""Activations that compute each element by itself."""


class Rule(ABC):
    """Replacement for ``call`` of a layer. *Collective* among the ranks of the layer.

    Attributes
    ----------
    container : functional model that calls the layer once, within which the next two hold; elsewhere neither does.
    takes_cut, gives_cut : the input comes cut, the output stays cut, along the last axis.
    """

    can_take_cut = can_give_cut = False

    def __init__(self, layer: Any, ranks: ModelRanks) -> None:
        self.layer, self.ranks = layer, ranks
        self.container: object = None
        self.takes_cut = self.gives_cut = False
        self._call: Callable[..., Any] = layer.call
        self._input_spec = layer.input_spec
        self._replacements = Replacements()

    def extra_cuts(self) -> Iterator[tuple[Any, int]]:
        """Yield further variables that have to be cut, and their axes."""
        yield from ()

    def install(self) -> None:
        """Replace ``call`` of the layer."""
        self._replacements.set(self.layer, "call", self)
        if self.takes_cut:  # the spec has the size of the whole
            rank = None if self._input_spec is None else self._input_spec.min_ndim
            self._replacements.set(self.layer, "input_spec", keras.layers.InputSpec(min_ndim=rank))

    def uninstall(self) -> None:
        """Undo ``install``."""
        self._replacements.restore()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with hiding_parts(False):
            return tf.autograph.experimental.do_not_convert(self.compute)(*args, **kwargs)

    @abstractmethod
    def compute(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the layer from its inputs."""

    def _here(self, cut: bool) -> bool:
        return cut and running.get() is self.container

    def _given(self, output: Any, axis: int = -1) -> Any:
        """Return a cut output as the layers behind expect it."""
        return output if self._here(self.gives_cut) else self.ranks.gathered(output, axis)


class Units(Rule):
    """Each rank computes its units of a Dense, EinsumDense or convolution layer.

    Attributes
    ----------
    gives_logits : the output is that of the model, and stays cut where its loss takes it so.
    """

    can_give_cut = True

    def __init__(self, layer: Any, ranks: ModelRanks, axis: int = -1) -> None:
        super().__init__(layer, ranks)
        self._axis = axis
        self.gives_logits = False
        self.can_give_cut = axis == -1 and _is_elementwise(layer.activation)

    def extra_cuts(self) -> Iterator[tuple[Any, int]]:
        if self.layer.bias is not None:
            yield self.layer.bias, self.layer.bias.shape.rank + self._axis

    def compute(self, inputs: Any, **_: Any) -> Any:
        layer = self.layer
        outputs = _linear(layer, self.ranks.copied(inputs))
        if layer.bias is not None:
            outputs = keras.ops.add(outputs, layer.bias)
        if self.gives_logits and cut_logits.get() and self._here(True):
            return outputs
        if _is_elementwise(layer.activation):
            return self._given(_activated(layer, outputs), self._axis)
        return _activated(layer, self._given(outputs, self._axis))


class Inputs(Rule):
    """Each rank computes with its section of the input of a Dense, EinsumDense or convolution layer."""

    def __init__(self, layer: Any, ranks: ModelRanks, axis: int = -1, cut: bool = False) -> None:
        super().__init__(layer, ranks)
        self._axis, self._cut = axis, cut
        self.takes_cut = cut
        self.can_take_cut = axis == -1

    def compute(self, inputs: Any, **_: Any) -> Any:
        layer = self.layer
        cut = self._cut or self._here(self.takes_cut)
        outputs = self.ranks.summed(_linear(layer, inputs if cut else self.ranks.section(inputs, self._axis)))
        if layer.bias is not None:
            outputs = keras.ops.add(outputs, layer.bias)
        return _activated(layer, outputs)


class Vocabulary(Rule):
    """Each rank looks up the rows of an Embedding that it holds."""

    def compute(self, inputs: Any, **_: Any) -> Any:
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        position, here = self.ranks.own_positions(ids, self.layer.embeddings.shape[0])
        found = keras.ops.take(self.layer.embeddings, position, axis=0)
        found = tf.cast(found, self.layer.compute_dtype)
        return self.ranks.summed(tf.where(here[..., None], found, tf.zeros_like(found)))


class Heads(Rule):
    """Each rank computes its heads of a MultiHeadAttention layer.

    Attributes
    ----------
    projections : layers within it that compute queries, keys and values.
    inner : all layers within it that compute on heads.
    """

    def __init__(self, layer: Any, ranks: ModelRanks) -> None:
        super().__init__(layer, ranks)
        self.projections = [layer.query_dense, layer.key_dense, layer.value_dense]
        if getattr(layer, "_use_gate", False):
            self.projections.append(layer._gate_dense)
        self._parts = [Inputs(layer.output_dense, ranks, cut=True), Draws(layer._dropout_layer, ranks, 1, cut=True)]
        self.inner = [*self.projections, *(part.layer for part in self._parts)]

    def extra_cuts(self) -> Iterator[tuple[Any, int]]:
        for projection in self.projections:
            if projection.bias is not None:
                yield projection.bias, 0

    def install(self) -> None:
        super().install()
        for part in self._parts:
            part.install()

    def uninstall(self) -> None:
        for part in self._parts:
            part.uninstall()
        super().uninstall()

    def compute(self, query: Any, value: Any, key: Any = None, **options: Any) -> Any:
        copies: dict[int, Any] = {}  # self-attention needs one sum in its backward pass, not three
        for tensor in (query, value, key):
            if tensor is not None and id(tensor) not in copies:
                copies[id(tensor)] = self.ranks.copied(tensor)
                set_keras_mask(copies[id(tensor)], get_keras_mask(tensor))
        found = self._call(copies[id(query)], copies[id(value)], copies.get(id(key)), **options)
        if options.get("return_attention_scores"):
            output, scores = found
            return output, self.ranks.gathered(scores, 1)
        return found


class Elementwise(Rule):
    """A layer without weights computes its section of the features by itself."""

    can_take_cut = can_give_cut = True

    def compute(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._here(self.takes_cut):
            return self._call(inputs, *args, **kwargs)
        return self._given(self._call(inputs, *args, **kwargs))


class Draws(Rule):
    """Dropout of a section: all ranks draw for the whole, as one process does."""

    can_take_cut = can_give_cut = True

    def __init__(self, layer: Any, ranks: ModelRanks, axis: int = -1, cut: bool = False) -> None:
        super().__init__(layer, ranks)
        self._axis, self._cut = axis, cut

    def compute(self, inputs: Any, training: bool = False) -> Any:
        if not (self._cut or self._here(self.takes_cut)):
            return self._call(inputs, training=training)
        layer = self.layer
        if training and layer.rate > 0:
            axis = self._axis % inputs.shape.rank
            factors = tf.one_hot(axis, inputs.shape.rank, self.ranks.size, 1, dtype=tf.int32)
            ones = tf.ones(tf.shape(inputs) * factors, inputs.dtype)
            ones.set_shape([n if n is None or i != axis else n * self.ranks.size for i, n in enumerate(inputs.shape)])
            kept = keras.random.dropout(ones, layer.rate, noise_shape=layer.noise_shape, seed=layer.seed_generator)
            inputs = inputs * self.ranks.section(kept, axis)
        return inputs if self._cut else self._given(inputs)


class Normalized(Rule):
    """A normalization layer of features that are cut: batch normalization, whose features do not meet."""

    can_take_cut = can_give_cut = True

    def extra_cuts(self) -> Iterator[tuple[Any, int]]:
        if self.takes_cut:
            layer = self.layer
            names = ("gamma", "beta", "moving_mean", "moving_variance", "scale")
            found = [getattr(layer, name, None) for name in names]
            yield from ((variable, 0) for variable in found if isinstance(variable, keras.Variable))

    def compute(self, inputs: Any, **kwargs: Any) -> Any:
        if not self.takes_cut:
            return self._call(inputs, **kwargs)
        if not self._here(True):  # the layer is called elsewhere, with a whole input
            return self.ranks.gathered(self._normalized(self.ranks.section(inputs), **kwargs))
        return self._given(self._normalized(inputs, **kwargs))

    def _normalized(self, inputs: Any, **kwargs: Any) -> Any:
        return self._call(inputs, **kwargs)


class NormalizedFeatures(Normalized):
    """Layer normalization, or that by the root mean square, of features that are cut."""

    def _normalized(self, inputs: Any, **_: Any) -> Any:
        layer, x = self.layer, inputs
        wide = tf.float32 if x.dtype in (tf.float16, tf.bfloat16) else x.dtype
        x = tf.cast(x, wide)
        if isinstance(layer, keras.layers.LayerNormalization):
            x -= self._mean(x)
        x *= tf.math.rsqrt(self._mean(tf.square(x)) + layer.epsilon)
        for factor in (getattr(layer, "gamma", None), getattr(layer, "scale", None)):
            if isinstance(factor, keras.Variable):
                x *= tf.cast(factor, wide)
        if isinstance(getattr(layer, "beta", None), keras.Variable):
            x += tf.cast(layer.beta, wide)
        return tf.cast(x, layer.compute_dtype)

    def _mean(self, x: Any) -> Any:
        total = self.ranks.copied(self.ranks.summed(tf.reduce_sum(x, -1, keepdims=True)))
        return total / (x.shape[-1] * self.ranks.size)


class Gathered(Rule):
    """A layer without a rule computes with whole weights, which are gathered whenever it is called."""

    def __init__(self, layer: Any, ranks: ModelRanks, cut: list[tuple[Any, int]]) -> None:
        super().__init__(layer, ranks)
        self._cut = cut

    def compute(self, *args: Any, **kwargs: Any) -> Any:
        wholes = [(v, self.ranks.gathered(tf.convert_to_tensor(v.value), axis)) for v, axis in self._cut]
        with as_whole([(v, partial(tf.identity, whole)) for v, whole in wholes]):
            return self._call(*args, **kwargs)


def _linear(layer: Any, inputs: Any) -> Any:
    """Return the product of the inputs and the kernel of a layer."""
    if isinstance(layer, keras.layers.EinsumDense):
        return keras.ops.einsum(layer.equation, inputs, layer.kernel)
    if isinstance(layer, keras.layers.Dense):
        return keras.ops.matmul(inputs, layer.kernel)
    return layer.convolution_op(inputs, layer.kernel)


def _activated(layer: Any, outputs: Any) -> Any:
    return outputs if layer.activation is None else layer.activation(outputs)


def _is_elementwise(activation: Any) -> bool:
    return activation is None or activation in ELEMENTWISE
