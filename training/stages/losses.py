"""Losses and metrics of batches that are divided into micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from matex_data.errors import PartitionError
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.losses import DistributedLoss
from matex_data.training.exact.metrics import custom_metrics
from matex_data.training.reduction.ops import Reducer

Replacement = tuple[Any, str, Any]
"""Object, name of an attribute, and its new value."""


def replaced_metrics(model: Any) -> Iterator[Replacement]:
    """Yield replacements for metric functions, which raise an error where they return one number for a batch.

    Raises
    ------
    PartitionError : a metric is of a class of the user's, whose state may depend on whole batches.
    """
    for metric, function in custom_metrics(model):
        if function is None:
            raise _batch_metric(metric.name)
        yield metric, "_fn", functools.partial(_per_sample, metric.name, function)


def replaced_losses(model: Any, reducer: Reducer, divided: bool) -> Iterator[Replacement]:
    """Yield the replacement for losses that are sums, or whose divisors are not the numbers of rows.

    Parameters
    ----------
    reducer : sums over the replicas.
    divided : batches are divided into micro-batches.
    """
    compiled = model._compile_loss
    if compiled is not None and compiled._flat_losses:
        divisors: Any = _UnknownDivisors(reducer.channel) if divided else reducer
        losses = [entry._replace(loss=DistributedLoss(entry.loss, divisors)) for entry in compiled._flat_losses]
        yield compiled, "_flat_losses", losses


def _per_sample(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a metric function returns.

    Raises
    ------
    PartitionError : it is one number.
    """
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
    """Reducer for losses whose divisors over all micro-batches are not known before the last of them.

    Parameters
    ----------
    channel : replicas.
    """

    def __init__(self, channel: Channel) -> None:
        self.channel = channel

    def __call__(self, tensors: Sequence[Any]) -> Any:
        raise PartitionError(
            "the divisor of this loss is known after the last micro-batch only",
            expected="a mean over all samples, or a sum",
            found="a mean over the samples of a mask, or over sample weights",
            remedy="compile the loss with reduction='sum' or 'sum_over_batch_size', without a mask",
        )
