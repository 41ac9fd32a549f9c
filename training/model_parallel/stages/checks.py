"""Models, losses, metrics and options that cannot be trained in stages, or not on micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.errors import PartitionError
from matex_data.training.average.optimizer import is_distributed
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.batch_norm import batch_normalizations
from matex_data.training.exact.listed import own_method
from matex_data.training.exact.losses import DistributedLoss, distributed_losses
from matex_data.training.exact.metrics import custom_metrics
from matex_data.training.exact.variables import changing_variables, inner_optimizer
from matex_data.training.model_parallel.graph import check_graph
from matex_data.training.model_parallel.stages.cut import StagePlan
from matex_data.training.reduction.ops import Reducer
from matex_data.training.replacements import Replacements

_OWN_METHODS = ("train_step", "test_step", "predict_step", "compute_loss", "compute_metrics", "make_train_function")
"""Methods of a model that decide what a step computes, beside its layers."""
SAME = 1e-4
"""Difference of two losses up to which they are equal, relative to their size: sums in float32 are rounded."""


def check_model(model: Any, sync_batch_norm: bool, divided: bool) -> None:
    """Raise ``PartitionError`` if a model computes its steps by code of its own, or needs whole batches.

    Parameters
    ----------
    divided : batches are divided into micro-batches.
    """
    check_graph(model)
    own = [name for name in _OWN_METHODS if own_method(model, name) is not None]
    if own:
        raise PartitionError(
            f"the model {model.name} cannot be trained in stages: it has a {own[0]} of its own",
            expected="the steps of Keras: compile() with loss and metrics, fit()",
            found=f"{type(model).__name__}.{own[0]}",
            remedy="give loss and metrics to compile(), or train without stages",
        )
    if is_distributed(model.optimizer):
        raise PartitionError(
            "the optimizer averages gradients over all ranks, of which each stage has others",
            expected="the optimizer as it is",
            found="an optimizer from training.distribute",
            remedy="leave out training.distribute: fit(mesh=...) averages over the replicas",
        )
    stateful = [x for x in model._flatten_layers() if getattr(x, "stateful", False)]
    if divided and stateful:
        raise PartitionError(
            f"the layer {stateful[0].name} keeps a state of each row of a batch, which micro-batches do not have",
            expected="layers without stateful=True, or micro_batches=1",
            found=f"{type(stateful[0]).__name__}(stateful=True)",
            remedy="give micro_batches=1, or leave out stateful=True",
        )
    if sync_batch_norm or any(layer.synchronized for layer in batch_normalizations(model)):
        raise PartitionError(
            "batches are divided into micro-batches, which pass BatchNormalization one after the other",
            expected="normalization by the micro-batches of each replica",
            found="sync_batch_norm=True" if sync_batch_norm else "BatchNormalization(synchronized=True)",
            remedy="leave it out, use LayerNormalization or GroupNormalization, or train without stages",
        )


def check_stages(model: Any, plans: Sequence[StagePlan]) -> None:
    """Raise ``PartitionError`` if layers cannot be shared by stages, or an optimizer cannot agree with a stage."""
    stages: dict[int, tuple[Any, list[int]]] = {}
    for plan in plans:
        for layer in layers_of(plan):
            stages.setdefault(id(layer), (layer, []))[1].append(plan.number)
    for layer, numbers in stages.values():
        changing = [v.path for v in changing_variables(layer)]
        if len(numbers) > 1 and changing:
            raise PartitionError(
                f"the layer {layer.name} is called in several stages, and each of its calls changes a state",
                expected="layers that stages share without seeds, moving statistics and states",
                found=f"{changing[:3]} in stages {numbers}",
                remedy="name layers in split_after so that all of its calls are in one stage",
            )
    early = {id(v) for plan in plans[:-1] for layer in layers_of(plan) for v in layer.metrics_variables}
    unknown = [v.path for v in model.metrics_variables if id(v) in early]
    if unknown:
        raise PartitionError(
            "a layer has a metric that the last stage, which computes all metrics, does not know",
            expected="metrics of layers of the last stage, or metrics given to compile()",
            found=f"{unknown[:3]} in earlier stages",
            remedy="leave the metric out of the layer, or name layers in split_after so that it is in the last stage",
        )
    untrained = [plan.number for plan in plans if plan.number not in trained_stages(plans)]
    if untrained and hasattr(model.optimizer, "inner_optimizer"):
        raise PartitionError(
            f"stage {untrained[0]} has no weights to train, so that it does not know the scale of the loss",
            expected="trainable weights in every stage, for loss scaling",
            found=f"only frozen layers, or layers without weights, in stages {untrained}",
            remedy="name layers in split_after so that each stage trains some",
        )


def trained_stages(plans: Sequence[StagePlan]) -> list[int]:
    """Return the numbers of the stages that have weights to train."""
    return [plan.number for plan in plans if any(layer.trainable_variables for layer in layers_of(plan))]


def check_optimizer(optimizer: Any, variables: Sequence[Any]) -> None:
    """Raise ``PartitionError`` if an optimizer was built for other variables than those of this stage."""
    inner = inner_optimizer(optimizer)
    if optimizer.built and {id(v) for v in inner._trainable_variables} != {id(v) for v in variables}:
        raise PartitionError(
            "the optimizer has state for other weights than those of this stage",
            expected=f"an optimizer without state, or for {len(variables)} variables of one stage",
            found=f"state for {len(inner._trainable_variables)} variables",
            remedy="compile the model again; to go on with a run, give its checkpoint to fit(checkpoint=...)",
        )


def layers_of(plan: StagePlan) -> list[Any]:
    """Return the layers that a stage calls, each once."""
    layers = {id(call.operation): call.operation for call in plan.calls}
    return [layer for layer in layers.values() if isinstance(layer, keras.layers.Layer)]


def variable_holders(plans: Sequence[StagePlan]) -> Mapping[int, Sequence[int]]:
    """Return the stages that hold a variable, in order, by id of the variable."""
    found: dict[int, list[int]] = {}
    for plan in plans:
        for key in {id(variable) for layer in layers_of(plan) for variable in layer.variables}:
            found.setdefault(key, []).append(plan.number)
    return found


def replace_metrics(model: Any, replacements: Replacements) -> None:
    """Let metric functions raise an error where they return one number for a batch.

    Raises
    ------
    PartitionError : a metric is of a class of the user's, whose state may depend on whole batches.
    """
    for metric, function in custom_metrics(model):
        if function is None:
            raise _batch_metric(metric.name)
        replacements.set(metric, "_fn", functools.partial(_per_sample, metric.name, function))


def replace_losses(model: Any, replacements: Replacements, reducer: Reducer, divided: bool) -> None:
    """Replace losses that are sums, or whose divisors are not the numbers of rows; ``divided`` as of `check_model`."""
    losses = distributed_losses(model, _UnknownDivisors(reducer.channel) if divided else reducer)
    if losses:
        replacements.set(model._compile_loss, "_flat_losses", losses)


def find_sums(losses: Sequence[DistributedLoss], rows: int, weighted: bool) -> None:
    """Find out which losses that are one number for a batch are sums, and which means.

    That of rows, and the sum of the sizes of its derivatives, is the sum, or the mean, of those of their halves. A
    single row is taken twice. Where all of them are zero, nothing depends on it: a later micro-batch may tell.

    Parameters
    ----------
    losses : of which it is not known, called eagerly for a micro-batch.
    rows : of this micro-batch.

    Raises
    ------
    PartitionError : a loss is neither, or weights multiply the number of a whole batch.
    """
    every = np.arange(max(rows, 2)) % rows
    half = len(every) // 2
    share = half / len(every)
    for loss in losses:
        whole, first, second = (_sizes(loss, chosen) for chosen in (every, every[:half], every[half:]))
        limit = SAME * np.maximum(np.abs(first), np.abs(second))
        candidates = first + second, share * first + (1 - share) * second
        no_sum, no_mean = (not (np.abs(whole - other) <= limit).all() for other in candidates)
        if (no_sum and no_mean) or weighted:
            raise PartitionError(
                f"the loss {loss.name} is one number for a batch, which those of its micro-batches do not give",
                expected="a sum or a mean over the samples, without sample weights; or a number for each sample",
                found="sample weights"
                if weighted
                else f"{whole[0]:.6g} for rows of which one half has {first[0]:.6g} and the other {second[0]:.6g}",
                remedy="return a number for each sample, or train one replica with micro_batches=1",
            )
        if no_sum or no_mean:
            loss.sums, loss.given = no_mean, None


def _sizes(loss: DistributedLoss, rows: Array) -> Array:
    """Return the number that a loss is for some rows, and the sum of the sizes of its derivatives; float64[2]."""
    y_true, y_pred = (tf.gather(x, rows) for x in loss.given or ())
    with tf.GradientTape() as tape:
        tape.watch(y_pred)
        number = loss.loss(y_true, y_pred)
    slopes = tape.gradient(number, y_pred, unconnected_gradients="zero")
    return np.array([float(number), float(tf.reduce_sum(tf.abs(tf.cast(slopes, tf.float32))))])


def _per_sample(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a metric function returns; raise ``PartitionError`` if that is one number."""
    values = function(*args, **kwargs)
    if len(keras.ops.shape(values)) == 0:
        raise _batch_metric(name)
    return values


def _batch_metric(name: str) -> PartitionError:
    return PartitionError(
        f"the metric {name} depends on whole batches, which are divided into micro-batches and over replicas",
        expected="metrics of Keras, or functions that return a number for each sample",
        found="a metric class of the user's, or a function that returns one number",
        remedy="return a number for each sample, or train one replica with micro_batches=1",
    )


class _UnknownDivisors:
    """Reducer for losses whose divisors over all micro-batches are not known before the last of them."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def __call__(self, tensors: Sequence[Any]) -> Any:
        raise PartitionError(
            "the divisor of this loss is known after the last micro-batch only",
            expected="a mean over all samples, or a sum",
            found="a mean over the samples of a mask, or over sample weights",
            remedy="compile the loss with reduction='sum' or 'sum_over_batch_size', without a mask",
        )
