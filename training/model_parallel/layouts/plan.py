"""Plan of a model: which variables are cut, by which rule each layer computes, and what stays cut in between."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras

from matex_data.errors import PartitionError
from matex_data.training.model_parallel.graph import Container, called_once, chain
from matex_data.training.model_parallel.layouts import rules
from matex_data.training.model_parallel.layouts.ranks import ModelRanks
from matex_data.training.model_parallel.layouts.reads import read_elsewhere
from matex_data.training.model_parallel.layouts.rules import ELEMENTWISE, Rule
from matex_data.training.model_parallel.mesh import check_divides, check_used, cut_axis
from matex_data.training.partition.parts import AxisPart, part_of, whole_shape
from matex_data.training.zero.optimizer import check_constraint

LARGE = 1 << 20
"""Elements of a kernel from which a Dense layer is cut alone: its output has to be gathered."""


def proposed(layers: Sequence[Any], found: Sequence[Container], once: set[int], parts: int) -> dict[int, int]:
    """Return axes along which to cut variables, by the ids of these.

    Attention is cut by heads, embeddings by vocabulary, pairs of Dense layers by the units between them, so that each
    block needs one sum; large Dense layers without a partner by units.

    Parameters
    ----------
    layers : all layers of the model, nested ones, too.
    found, once : functional models among them, and the ids of the layers that these call once.
    parts : into which a dimension is cut; what it does not divide is not cut.
    """
    axes: dict[int, int] = {}
    for layer in layers:
        if type(layer) is keras.layers.MultiHeadAttention and layer.num_heads % parts == 0:
            kernels = [v for v in layer.trainable_variables if v.name == "kernel"]
            axes |= {id(v): 0 if "attention_output" in v.path else 1 for v in kernels}
        if type(layer) is keras.layers.Embedding and layer.input_dim % parts == 0:
            axes[id(layer.embeddings)] = 0
    for container in found:
        for first, second in _pairs(container, once):
            if first.units % parts == 0:
                axes[id(first.kernel)], axes[id(second.kernel)] = 1, 0
    for layer in layers:
        large = type(layer) is keras.layers.Dense and layer.built and math.prod(layer.kernel.shape) >= LARGE
        if large and layer.units % parts == 0:
            axes.setdefault(id(layer.kernel), 1)
    return axes


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


_NORMALIZING = (keras.layers.LayerNormalization, getattr(keras.layers, "RMSNormalization", None))  # since Keras 3.9
_CONVOLUTIONS = (keras.layers.Conv1D, keras.layers.Conv2D, keras.layers.Conv3D)
_POOLING = ("AveragePooling", "GlobalAveragePooling", "GlobalMaxPooling", "MaxPooling")
_OF_FEATURES = [getattr(keras.layers, f"{pooling}{axes}D") for pooling in _POOLING for axes in (1, 2, 3)]
_OF_FEATURES += [keras.layers.UpSampling2D, keras.layers.ZeroPadding2D]
"""Layers that compute each feature, the last axis, by itself."""


class Plan(NamedTuple):
    """Plan of a model, or of one of its stages.

    Attributes
    ----------
    variables : variables of its layers, each once.
    cuts : variables that are cut, each with its axis.
    containers : functional models within which tensors may stay cut.
    """

    variables: list[Any]
    cuts: list[tuple[Any, int]]
    rules: list[Rule]
    containers: list[Container]


def plans(
    model: Any,
    groups: Sequence[tuple[Sequence[Any], Sequence[Container]]],
    layouts: Any,
    ranks: ModelRanks,
    element_spec: Any,
) -> list[Plan]:
    """Return the plans of the stages of a built model, or of the whole.

    Parameters
    ----------
    groups : for each stage its layers, nested ones, too, and the functional models among them.

    Raises
    ------
    PartitionError : a layout does not fit its variable, or fits none; or nothing would be cut.
    """
    once = called_once([container for _, found in groups for container in found])
    proposals: dict[int, int] = {}
    if layouts.proposes:
        for layers, found in groups:
            proposals |= proposed(layers, found, once, ranks.size)
        whole = read_elsewhere(model, element_spec, proposals, ranks.mesh.world.rank == 0)
        proposals = {key: axis for key, axis in proposals.items() if key not in whole}
    axes = _axes(model, layouts, proposals, ranks)
    made = [_planned(layers, found, once, axes, ranks) for layers, found in groups]
    if not any(plan.cuts for plan in made):
        raise PartitionError(
            "no layout cuts a variable of this model",
            expected="a layout map that fits the paths of its variables",
            found=f"{len(layouts)} layouts, {'and nothing to propose' if layouts.proposes else 'none is proposed'}",
            remedy="give layouts; or train with comm=..., without a mesh or --model, on the rows of each rank",
        )
    return made


def _planned(
    layers: Sequence[Any], found: Sequence[Container], once: set[int], axes: dict[int, int], ranks: ModelRanks
) -> Plan:
    """Return the plan of layers whose variables are cut along these axes.

    Parameters
    ----------
    once : ids of the layers that are called once by all of the model.
    axes : by the ids of variables.
    """
    made: dict[int, Rule] = {}
    inner: set[int] = set()
    for layer in layers:
        if id(layer) in inner:
            continue
        own = [*layer._trainable_variables, *layer._non_trainable_variables]
        cut = [(v, axes[id(v)]) for v in own if id(v) in axes]
        attention = _attention(layer, axes, ranks)
        inner |= set() if attention is None else {id(x) for x in attention.inner}
        rule = attention or _rule(layer, cut, ranks)
        if isinstance(rule, rules.Gathered):
            _check_gathered(cut)
        if rule is not None:
            made[id(layer)] = rule
    for container in found:
        _keep_cut(container, {key: rule for key, rule in made.items() if key in once})
    variables = {id(v): v for layer in layers for v in layer.variables}
    cuts = {key: (v, axes[key]) for key, v in variables.items() if key in axes}
    for rule in made.values():
        for variable, axis in rule.extra_cuts():
            check_divides(variable.path, whole_shape(variable), axis, ranks.size)
            cuts.setdefault(id(variable), (variable, axis))
    for variable, axis in cuts.values():
        check_constraint(variable, axis)
    return Plan(list(variables.values()), list(cuts.values()), list(made.values()), list(found))


def _axes(model: Any, layouts: Any, proposals: dict[int, int], ranks: ModelRanks) -> dict[int, int]:
    """Return the axes along which layouts cut variables, by the ids of these."""
    check_used(layouts, [variable.path for variable in model.variables])
    axes = {}
    for variable in model.variables:
        part, path = part_of(variable), variable.path
        axis = part.axis if isinstance(part, AxisPart) else cut_axis(layouts, path, whole_shape(variable))
        if axis is None and layouts[path] is None:
            axis = proposals.get(id(variable))
        if axis is not None:
            check_divides(path, whole_shape(variable), axis, ranks.size)
            axes[id(variable)] = axis
    return axes


def _attention(layer: Any, axes: dict[int, int], ranks: ModelRanks) -> rules.Heads | None:
    """Return the rule of an attention layer that is cut by heads."""
    if type(layer) is not keras.layers.MultiHeadAttention or not layer.built:
        return None
    rule = rules.Heads(layer, ranks)
    by_head = [(x.kernel, 1) for x in rule.projections] + [(layer.output_dense.kernel, 0)]
    return rule if all(axes.get(id(kernel)) == axis for kernel, axis in by_head) else None


def _rule(layer: Any, cut: list[tuple[Any, int]], ranks: ModelRanks) -> Rule | None:
    """Return the rule of a layer with these variables cut; None: it computes as ever."""
    kind = type(layer)
    if not cut:
        return _rule_without_weights(layer, ranks)
    axes = {variable.name: axis for variable, axis in cut}
    plain = not (getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None))
    if plain and kind in (keras.layers.Dense, *_CONVOLUTIONS) and _features_last(layer):
        rank = len(whole_shape(layer.kernel))
        if axes.get("kernel") == rank - 1:
            return rules.Units(layer, ranks)
        if axes == {"kernel": rank - 2}:
            return rules.Inputs(layer, ranks)
    if plain and kind is keras.layers.EinsumDense and "kernel" in axes:
        return _einsum_rule(layer, axes, ranks) or rules.Gathered(layer, ranks, cut)
    if plain and kind is keras.layers.Embedding and axes == {"embeddings": 0}:
        return rules.Vocabulary(layer, ranks)
    return rules.Gathered(layer, ranks, cut)


def _features_last(layer: Any) -> bool:
    return getattr(layer, "data_format", "channels_last") == "channels_last" and getattr(layer, "groups", 1) == 1


def _rule_without_weights(layer: Any, ranks: ModelRanks) -> Rule | None:
    kind = type(layer)
    if kind is keras.layers.Dropout:
        return rules.Draws(layer, ranks)
    if is_elementwise(layer) or (kind in _OF_FEATURES and _features_last(layer)):
        return rules.Elementwise(layer, ranks)
    if kind is keras.layers.BatchNormalization and layer.built and layer.axis in (-1, layer.input_spec.ndim - 1):
        return rules.Normalized(layer, ranks)
    if kind in _NORMALIZING and layer.built and _last_axis(layer) and not getattr(layer, "rms_scaling", False):
        return rules.NormalizedFeatures(layer, ranks)
    return None


def _last_axis(layer: Any) -> bool:
    """Return whether a layer normalizes one axis, and this is given as the last one."""
    axis = layer.axis if isinstance(layer.axis, list | tuple) else [layer.axis]
    return list(axis) == [-1]


def _einsum_rule(layer: Any, axes: dict[str, int], ranks: ModelRanks) -> Rule | None:
    """Return the rule of an EinsumDense layer: its kernel is cut along outputs or along inputs."""
    inputs, _, rest = layer.equation.replace(" ", "").partition(",")
    kernel, _, outputs = rest.partition("->")
    letter = kernel[axes["kernel"]] if "." not in kernel else ""
    if letter and letter in outputs and letter not in inputs:
        return rules.Units(layer, ranks, outputs.index(letter) - len(outputs))
    if letter and letter in inputs and letter not in outputs and axes.keys() == {"kernel"}:
        return rules.Inputs(layer, ranks, inputs.index(letter) - len(inputs))
    return None


def _check_gathered(cut: Sequence[tuple[Any, int]]) -> None:
    for variable, _ in cut:
        if not variable.trainable and isinstance(variable, keras.Variable):
            raise PartitionError(
                "a layer without a rule cannot keep parts of a variable that it may change itself",
                field=variable.path,
                expected="layouts of trainable variables",
                found="a variable that is not trainable",
                remedy="give this variable no layout",
            )


def _keep_cut(container: Container, once: dict[int, Rule]) -> None:
    """Let tensors stay cut between layers of a functional model whose rules allow it.

    Parameters
    ----------
    once : rules of layers that are called once, by the ids of the layers.
    """

    def rule_of(position: int) -> Rule | None:
        return once.get(id(container.calls[position].operation)) if position >= 0 else None

    def may_take_cut(position: int) -> bool:
        rule = rule_of(position)
        return rule is not None and rule.can_take_cut and len(container.calls[position].sources) == 1

    for position, call in enumerate(container.calls):
        rule = rule_of(position)
        if rule is None:
            continue
        before = rule_of(call.sources[0]) if may_take_cut(position) else None
        rule.container, rule.takes_cut = container.owner, before is not None and before.gives_cut
        rule.gives_cut = (
            (rule.takes_cut or isinstance(rule, rules.Units))
            and rule.can_give_cut
            and call.operation.activity_regularizer is None
            and all(map(may_take_cut, call.users))
        )
