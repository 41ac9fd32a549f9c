"""Metrics over all ranks: combine their states, not their results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.logs import LogReduction, combined_numbers, flat, remaining_reductions
from matex_data.training.exact.state import step_state
from matex_data.training.keras_api import CompileMetrics, MetricsList, get_keras_mask, set_keras_mask
from matex_data.training.reduction.graphs import eager_variable
from matex_data.training.reduction.ops import gather_rows
from matex_data.training.replacements import Replacements

OF_BATCH = ("circle", "dice", "tversky")
"""Functions of ``keras.losses`` whose values depend on all rows of a batch, as a test finds."""
ALWAYS = "_matex_gathers"
"""Attribute of a metric: its function combines rows, as a check has found, so that it gets the rows of all ranks."""
COMBINED = "_matex_combined"
"""Attribute of a model: metric variables and the values that each rank has of all ranks, by the variables' identity."""


def combined_logs(
    model: Any,
    channel: Channel,
    logs: Any,
    kinds: Mapping[str, tuple[LogReduction | None, set[LogReduction] | None]],
    of_batch: bool = False,
    own: Callable[[list[str]], None] = lambda keys: None,
) -> Any:
    """Return the logs of an epoch, or of a batch, over all ranks. *Collective*.

    A value that equals the result of a metric of the model on this rank, under any key, becomes the result of this
    metric over all ranks. Other numbers combine as their kinds say; those of no known kind are rank 0's own. Nested
    dicts are flattened, as Keras does it.

    Parameters
    ----------
    logs : logs of this rank's last step; empty if it had no batch.
    kinds : how numbers combine, as this rank has found; see ``RankStep.kinds``; absent: it does not know.
    of_batch : Keras returns the logs of a batch as they are; those of an epoch, if they have the names of the metrics,
        are the results of these.
    own : called with the keys of rank 0's own numbers, if there are any.
    """
    rows = _take_rows(model)
    before = _results(model)
    combine_metrics(channel, model)
    note_combined(model)
    result = model.get_metrics_result()
    if not isinstance(logs, dict):
        return result
    found = None
    if logs and rows != 0:
        values = {key: _number(value) for key, value in flat(logs).items()}
        sources = {key: _equal_results(key, value, before) for key, value in values.items()}
        is_result = set(logs) == set(result) and (not of_batch or all(sources.values()))
        found = (is_result, values, sources, rows, kinds)
    by_rank = [logs_of_rank for logs_of_rank in channel.host.allgather_object(found) if logs_of_rank is not None]
    if not by_rank:
        return logs
    if all(is_result for is_result, *_ in by_rank):
        return result
    after = _results(model)
    _, first, candidates, *_ = by_rank[0]
    out, of_rank_0 = {}, []
    for key in first:
        common = [i for i in candidates[key] if all(i in rank[2][key] for rank in by_rank)]
        if common:
            out[key] = after[common[0]][1]
            continue
        numbers = [(rank[1][key], rank[3]) for rank in by_rank]
        of_ranks = [rank[4][key] for rank in by_rank if key in rank[4]]  # each rank has checked other rows, or none
        out[key], is_own = combined_numbers(numbers, remaining_reductions(of_ranks))
        of_rank_0 += [key] * is_own
    if of_rank_0:
        own(of_rank_0)
    return out


def _results(model: Any) -> list[tuple[str, Any]]:
    """Return names and results of the model's metrics, with one entry for each key of a result that is a dict."""
    pairs: list[tuple[str, Any]] = []
    for metric in model.metrics:
        result = metric.result()
        pairs += result.items() if isinstance(result, dict) else [(metric.name, result)]
    return [(name, _number(value)) for name, value in pairs]


def _number(value: Any) -> Any:
    """Return tensors and numbers as arrays, and any other value unchanged."""
    if not isinstance(value, (str, bytes)) and hasattr(value, "numpy"):
        value = value.numpy()
    array = np.asarray(value)
    return array if array.dtype.kind in "biuf" or array.dtype.name == "bfloat16" else value


def _equal_results(key: str, value: Any, results: list[tuple[str, Any]]) -> list[int]:
    """Return the positions of the results that equal a value, those under its own key first.

    The tolerance is for rounding, which differs between graphs and eager code.
    """
    if not isinstance(value, np.ndarray):
        return []
    number = value.astype(np.float64)
    equal = [
        i
        for i, (_, result) in enumerate(results)
        if isinstance(result, np.ndarray)
        and result.shape == number.shape
        and np.allclose(result.astype(np.float64), number, rtol=1e-6, atol=0, equal_nan=True)
    ]
    return sorted(equal, key=lambda i: results[i][0] != key)


def own_numbers(model: Any, logs: dict[str, Any], computed: Collection[str]) -> dict[str, Any]:
    """Return the values of logs that are no results of the model's metrics.

    Parameters
    ----------
    computed : keys of those that are computed from states of metrics; others may equal a result by chance.
    """
    results = _results(model) if computed else []
    own = [key for key in logs if key not in computed or not _equal_results(key, _number(logs[key]), results)]
    return {key: logs[key] for key in own}


def record_rows(model: Any, count: Any) -> None:
    """Record the number of rows of this rank's batch until logs are combined."""
    if "_matex_rows" not in vars(model):
        object.__setattr__(model, "_matex_rows", eager_variable(-1, tf.int64))
    model._matex_rows.assign(count)


def _take_rows(model: Any) -> int | None:
    """Return the recorded number of rows and clear it; None: all ranks have equal numbers."""
    noted = vars(model).get("_matex_rows")
    if noted is None:
        return None
    rows = int(noted.numpy())
    noted.assign(-1)
    return None if rows < 0 else rows


@contextlib.contextmanager
def weighted_means(model: Any, weight: Any) -> Iterator[None]:
    """Context manager: scalars that update a ``Mean`` count with the weight of this rank.

    Such scalars are the loss of a batch and the losses of its outputs. The weights of all ranks sum to one, so the
    states of the ranks sum to the state of one process.
    """
    means = {id(m): m for m in model.metrics if type(m).update_state is keras.metrics.Mean.update_state}
    with Replacements() as replacements:
        for metric in means.values():  # a model may list one twice
            replacements.set(metric, "update_state", _weighted_update(metric.update_state, weight))
        yield


def _weighted_update(original: Any, weight: Any) -> Any:
    def update_state(values: Any, sample_weight: Any = None) -> Any:
        scalar = sample_weight is None and len(keras.ops.shape(values)) == 0
        return original(values, weight if scalar else sample_weight)

    return update_state


def replace_custom_metrics(model: Any, channel: Channel, replace: Callable[[Any, str, Any], None]) -> None:
    """Make metrics that Keras does not define see the global batch on every rank, in distributed steps.

    Their state may be anything, such as a maximum or a mean over batches, which the states of the ranks do not give.
    A metric function is replaced if it returns one number for a batch, or after ``gather_functions``.
    """
    for metric, function in custom_metrics(model):
        replace(metric, "update_state", _GatheredUpdate(metric, channel, function))


def custom_metrics(model: Any) -> list[tuple[Any, Any]]:
    """Return the metrics that Keras does not define; each with the function that it wraps, or None."""
    found = []
    for metric in flat_metrics(model.metrics):
        custom = not type(metric).update_state.__module__.startswith("keras.")
        function = getattr(metric, "_fn", None)
        wraps = isinstance(metric, keras.metrics.MeanMetricWrapper)
        along_rows = wraps and (getattr(function, "__name__", "") in OF_BATCH or is_along_rows(metric))
        of_batch = along_rows and _of_keras(function)
        if custom or of_batch or (wraps and not _of_keras(function)):
            found.append((metric, None if custom or of_batch else function))
    return found


def is_along_rows(computed: Any) -> bool:
    """Return whether a loss or metric of Keras computes along an axis that is, or may be, that of the rows."""
    axes = keras.tree.flatten(getattr(computed, "_fn_kwargs", {}).get("axis", ()))
    return any(isinstance(axis, int) and (axis == 0 or axis < -1) for axis in axes)


def gather_functions(model: Any) -> list[str]:
    """Give all metric functions that are not Keras's own the rows of all ranks from now on; return their names."""
    waiting = [metric for metric, update in _gathering(model) if update.may_combine]
    for metric in waiting:
        object.__setattr__(metric, ALWAYS, True)
    return [metric.name for metric in waiting]


def _gathering(model: Any) -> list[tuple[Any, _GatheredUpdate]]:
    """Return the metrics that may see global batches, and what updates them."""
    updates = [(m, vars(m).get("update_state")) for m in flat_metrics(model.metrics)]
    return [(metric, update) for metric, update in updates if isinstance(update, _GatheredUpdate)]


def gathered_variables(model: Any) -> list[Any]:
    """Return the variables of metrics that see global batches in the most recently traced step."""
    return [variable for metric, update in _gathering(model) if update.in_graph for variable in metric.variables]


def _equal_variables(model: Any) -> set[int]:
    """Return the ids of variables of metrics that have seen global batches, so that they are equal on all ranks."""
    return {id(v) for metric, update in _gathering(model) if bool(update.gathered.numpy()) for v in metric.variables}


def gathering_flags(model: Any) -> list[Any]:
    """Return the variables of TensorFlow that say of which metrics the latest step has gathered the rows."""
    return [update.gathered for _, update in _gathering(model)]


def numeric_states(model: Any) -> list[Any]:
    """Return the metric variables of numbers, which checks compare, and name by their positions in this list."""
    return [v for v in model.metrics_variables if v.dtype not in ("string", "bool")]


def change_rules(model: Any) -> list[str]:
    """Return how the changes of each of the ``numeric_states`` combine over the ranks, by the step traced last.

    "equal": each rank has seen the global batch; "sum"; otherwise not from the changes alone.
    """
    equal = {id(v) for v in gathered_variables(model)}
    return ["equal" if id(v) in equal else _rule(v) for v in numeric_states(model)]


def flat_metrics(metrics: list[Any]) -> list[Any]:
    """Return the metrics, with the containers of ``compile`` replaced by their contents."""
    containers = (CompileMetrics, MetricsList)
    return [one for m in metrics for one in (flat_metrics(m.metrics) if isinstance(m, containers) else [m])]


def _of_keras(function: Any) -> bool:
    module = getattr(function, "__module__", None) or type(function).__module__
    return bool(module.startswith("keras."))


class _GatheredUpdate:
    """``update_state`` of a metric with the gathered rows of all ranks. *Collective* in distributed steps.

    Parameters
    ----------
    function : function that the metric wraps; rows are gathered if it returns a single number, or if a check has found
        that it combines rows. None: always.

    Attributes
    ----------
    in_graph : the most recently traced step gathers the rows.
    gathered : variable; True if the most recent step has gathered them, so that the state is equal on all ranks.
    """

    def __init__(self, metric: Any, channel: Channel, function: Any) -> None:
        self._metric = metric
        self._original = metric.update_state
        self._channel = channel
        self._function = function
        self.in_graph = False
        self.gathered = eager_variable(False, tf.bool)

    @property
    def may_combine(self) -> bool:
        """Return whether the rows of this rank alone are given to a function that may combine rows."""
        return self._function is not None and ALWAYS not in vars(self._metric)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.in_graph = step_state(self._channel).running and self._needs_whole_batch(args, kwargs)
        self.gathered.assign(self.in_graph)
        if not self.in_graph:
            return self._original(*args, **kwargs)
        leaves = tf.nest.flatten([args, kwargs])
        masks = [get_keras_mask(leaf) for leaf in leaves]
        has_samples = tf.cast(step_state(self._channel).weight > 0, tf.int32)  # 0 for a rank with a stand-in row
        own = [leaf[: has_samples * tf.shape(leaf)[0]] for leaf in (*leaves, *masks) if leaf is not None]
        rows = iter(gather_rows(self._channel, own))
        gathered_leaves = [None if leaf is None else next(rows) for leaf in leaves]
        gathered_masks = [None if mask is None else next(rows) for mask in masks]
        for leaf, mask in zip(gathered_leaves, gathered_masks, strict=True):
            if leaf is not None and mask is not None:
                set_keras_mask(leaf, mask)
        args, kwargs = tf.nest.pack_sequence_as([args, kwargs], gathered_leaves)
        return self._original(*args, **kwargs)

    def _needs_whole_batch(self, args: Any, kwargs: Any) -> bool:
        """Return whether the arguments have rows, and the function, if any, returns one number for them."""
        leaves = [leaf for leaf in tf.nest.flatten([args, kwargs]) if leaf is not None]
        if not leaves or any(not isinstance(leaf, tf.Tensor) or leaf.shape.rank in (None, 0) for leaf in leaves):
            return False
        if not self.may_combine:
            return True
        values = self._function(*args[:2], **self._metric._fn_kwargs)
        return len(keras.ops.shape(values)) == 0


def combine_states(channel: Channel, variables: list[Any]) -> None:
    """Combine metric variables of which each rank has counted its own rows alone. *Collective*."""
    if channel.size > 1:
        for variable, value in zip(variables, _combined(channel, variables, {}), strict=True):
            variable.assign(value)


def combine_metrics(channel: Channel, model: Any) -> None:
    """Combine the metric variables of a model over all ranks, which then have equal ones. *Collective*."""
    for variable, value in zip(model.metrics_variables, combined_values(channel, model), strict=True):
        variable.assign(value)


def combined_values(channel: Channel, model: Any) -> list[Array]:
    """Return the values of a model's metric variables over all ranks, which keep theirs. *Collective*."""
    variables = model.metrics_variables
    own = [np.array(variable.value.numpy()) for variable in variables]
    if channel.size == 1 or _is_whole(model):
        return own
    equal, common = _equal_variables(model), vars(model).get(COMBINED, {})
    differ = [i for i, variable in enumerate(variables) if id(variable) not in equal]
    for i, value in zip(differ, _combined(channel, [variables[i] for i in differ], common), strict=True):
        own[i] = value
    return own


def _is_whole(model: Any) -> bool:
    """Return whether all ranks train on whole batches, so that their metrics are equal."""
    return bool(getattr(vars(model).get("train_step"), "whole", False))


def results_of_all(channel: Channel, model: Any) -> dict[str, Any]:
    """Return the results of a model's metrics over all ranks; the states stay those of this rank. *Collective*."""
    states = zip(model.metrics_variables, map(tf.constant, combined_values(channel, model)), strict=True)
    with keras.StatelessScope(state_mapping=list(states)):
        return {key: _number(value) for key, value in flat(model.get_metrics_result()).items()}


def note_combined(model: Any) -> None:
    """Note that each rank has the states of all: these count once, and what the ranks add to them is added up."""
    values = {id(v): (v, np.array(v.value.numpy())) for v in model.metrics_variables if _rule(v) == "sum"}
    object.__setattr__(model, COMBINED, values)


@contextlib.contextmanager
def counting_once(model: Any) -> Iterator[bool]:
    """Context manager: each rank adds the same rows to the metrics of a model, which count once.

    The states are those of all ranks meanwhile, so that what is added is rounded alike; what this rank has counted of
    its own rows comes back afterwards, unless the metrics begin anew. It gives whether this rank has counted any.
    """
    if _is_whole(model):
        yield False
        return
    common, kept = vars(model).get(COMBINED, {}), list[tuple[Any, Array]]()
    flags = [(flag, flag.numpy()) for flag in gathering_flags(model)]
    gathered = {id(v) for metric, update in _gathering(model) if not update.may_combine for v in metric.variables}
    equal = gathered | _equal_variables(model)
    for variable in model.metrics_variables:
        if _rule(variable) == "sum" and id(variable) not in equal:
            value = np.array(variable.value.numpy()).astype(_exact_dtype(variable))
            _, base = common.get(id(variable), (None, np.zeros_like(value)))
            kept.append((variable, value - base))
            variable.assign(base)
    object.__setattr__(model, COMBINED, common := dict(common))
    try:
        yield any(own.any() for _, own in kept)
    finally:
        goes_on = vars(model)[COMBINED] is common
        note_combined(model)
        for variable, own in kept if goes_on else ():
            variable.assign(variable.value.numpy().astype(own.dtype) + own)
        for flag, value in flags:
            flag.assign(value)


def note_reset(model: Any) -> None:
    """Note that the metrics of a model begin anew."""
    object.__setattr__(model, COMBINED, {})


def _combined(channel: Channel, variables: list[Any], common: Mapping[int, tuple[Any, Array]]) -> list[Array]:
    """Return the values of variables over all ranks, each by the aggregation that it declares. *Collective*.

    Parameters
    ----------
    common : variables, and what each rank has of all; see `note_combined`.
    """
    channel.check_same(f"combine metrics {[(tuple(v.shape), str(v.dtype), _rule(v)) for v in variables]}")
    values = [np.array(variable.value.numpy(), order="C") for variable in variables]
    for exact in (np.dtype(np.int64), np.dtype(np.float64)):
        chosen = [i for i, v in enumerate(variables) if _rule(v) != "root" and _exact_dtype(v) == exact]
        if not chosen:
            continue
        flat = np.concatenate([values[i].reshape(-1).astype(exact) for i in chosen])
        channel.host.reduce(flat)
        ends = np.cumsum([values[i].size for i in chosen])
        for i, end in zip(chosen, ends, strict=True):
            total = flat[end - values[i].size : end].reshape(values[i].shape)
            _, base = common.get(id(variables[i]), (None, 0))
            known = np.asarray(base).astype(exact)
            total = total / channel.size if _rule(variables[i]) == "mean" else total - (channel.size - 1) * known
            values[i] = total.astype(values[i].dtype)
    for value, variable in zip(values, variables, strict=True):
        if _rule(variable) == "root":
            channel.host.broadcast(value.reshape(-1))
    return values


def _exact_dtype(variable: Any) -> np.dtype[Any]:
    kind = np.dtype(variable.dtype).kind if variable.dtype != "bfloat16" else "f"
    return np.dtype(np.int64) if kind in "iub" else np.dtype(np.float64)


def _rule(variable: Any) -> str:
    """Return the declared aggregation of a variable: "sum", "mean", or "root" for the value of rank 0."""
    declared = getattr(variable, "aggregation", "sum")
    return {"sum": "sum", "mean": "mean"}.get(declared, "root")
