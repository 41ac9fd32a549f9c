"""Proof that a ``test_step`` of a model's own may be sharded: what it gives to metrics and what it returns."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from matex_data.training.exact.logs import Reduction, extreme_of, flat, reductions
from matex_data.training.exact.metrics import flat_metrics
from matex_data.training.proof.axes import Independent, Mixed, PerSample, Reason, RowCount, State, Total
from matex_data.training.proof.fingerprint import fingerprint
from matex_data.training.proof.model import Proof, any_rows, loss_reasons, unknown_rows
from matex_data.training.proof.propagate import follow
from matex_data.training.proof.sizes import ONE, ROWS
from matex_data.training.proof.tracing import LossValue, recorded_losses, unchanged


class _Number(NamedTuple):
    """Number that a step returns: its key, how it combines over the ranks, and the tensor that this has to hold for."""

    key: str
    kind: Reduction | None
    tensor: Any


class _Update(NamedTuple):
    """Call of a metric's ``update_state``, and the tensors that it gets."""

    metric: Any
    tensors: list[Any]


def prove_evaluation(model: Any, step: Callable[[Any], Any], x: Any, y: Any = None, sample_weight: Any = None) -> Proof:
    """Prove that a step that evaluates shards gives the numbers of the whole batch, once the ranks' are combined.

    It does if metrics get values of single samples, or means over the rows, and if all other numbers that it returns
    are means, sums, counts, maxima or minima of values of single samples. The model is left as it was.

    Parameters
    ----------
    model : built Keras model.
    step : its ``test_step``.
    x, y, sample_weight : nested ``tf.TensorSpec``.
    """
    leaves = tf.nest.flatten((x, y, sample_weight))
    unknown = unknown_rows(model, leaves, [leaf is None or leaf.shape.rank or None for leaf in leaves])
    if unknown is not None:
        return unknown
    specs = tf.nest.pack_sequence_as((x, y, sample_weight), [any_rows(leaf) for leaf in leaves])
    losses: list[LossValue] = []
    updates: list[_Update] = []
    numbers: list[_Number] = []
    changes: list[Reason] = []

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # as Keras does
    def evaluate(*data: Any) -> list[Any]:
        for found in (losses, updates, numbers):
            found.clear()
        compiled = getattr(model, "_compile_loss", None)
        recorded = contextlib.nullcontext() if compiled is None else recorded_losses(compiled, losses)
        with recorded, _recorded_updates(model, updates):
            logs = step(data if data[2] is not None else data[:2] if data[1] is not None else data[0])
        values = {key: value for key, value in flat(logs).items() if tf.is_tensor(value)}
        for key, kind in reductions(values).items():
            tensor = extreme_of(values[key]) if kind in ("max", "min") else values[key]
            numbers.append(_Number(key, kind, tensor))
        given = [tensor for update in updates for tensor in update.tensors]
        return [*(loss.values for loss in losses), *given, *(number.tensor for number in numbers)]

    try:
        with unchanged(model, changes):
            graph = tf.function(evaluate).get_concrete_function(*specs).graph
    except Exception as error:  # a step may fail with any error where its number of rows is unknown
        return Proof((Reason(model.name, "test_step", f"cannot be traced: {type(error).__name__}: {error}"[:200]),))
    followed = follow(graph, [0 for leaf in tf.nest.flatten(specs) if leaf is not None])
    states = iter(followed.outputs)
    reasons = [*changes, *followed.effects]
    for loss in losses:
        reasons += loss_reasons(loss, next(states))
    for update in updates:
        reasons += _of_update(update, [next(states) for _ in update.tensors])
    for number in numbers:
        reasons += _of_number(number, next(states))
    return Proof(tuple(dict.fromkeys(reasons)), draws=followed.draws, fingerprint=fingerprint(graph))


@contextlib.contextmanager
def _recorded_updates(model: Any, updates: list[_Update]) -> Iterator[None]:
    """Context manager: metrics record what they get, in place of their updates."""
    metrics = flat_metrics(model.metrics)
    before = [vars(metric).get("update_state") for metric in metrics]
    try:
        for metric in metrics:

            def record(*args: Any, metric: Any = metric, **kwargs: Any) -> None:
                leaves = [leaf for leaf in tf.nest.flatten([args, kwargs]) if leaf is not None]
                updates.append(_Update(metric, [tf.convert_to_tensor(leaf) for leaf in leaves]))

            object.__setattr__(metric, "update_state", record)
        yield
    finally:
        for metric, update in zip(metrics, before, strict=True):
            if update is None:
                object.__delattr__(metric, "update_state")
            else:
                object.__setattr__(metric, "update_state", update)


def _of_update(update: _Update, states: Sequence[State]) -> tuple[Reason, ...]:
    """Return the reasons why the states of a metric that the ranks update do not add to that of the batch."""
    mixed = [reason for state in states if isinstance(state, Mixed) for reason in state.reasons]
    if mixed:
        return tuple(mixed)
    if all(isinstance(state, PerSample) and _first(state) for state in states):
        return ()
    value, *weights = states
    plain = type(update.metric).update_state is keras.metrics.Mean.update_state
    number = isinstance(value, Independent) or (isinstance(value, Total) and value.mean)
    if plain and number and update.tensors[0].shape.rank == 0 and (not weights or _is_row_count(weights)):
        return ()
    return (Reason(update.metric.name, "update_state", "gets what is no value of each row, nor a mean over the rows"),)


def _first(state: PerSample) -> bool:
    """Return whether the samples are in order along the first axis."""
    return state.axis == 0 and state.before == ONE


def _is_row_count(weights: Sequence[State]) -> bool:
    return len(weights) == 1 and isinstance(weights[0], RowCount) and weights[0].values == (ROWS,)


def _of_number(number: _Number, state: State) -> tuple[Reason, ...]:
    """Return the reasons why a number of the batch does not follow from those of the ranks."""
    if isinstance(state, Mixed):
        return state.reasons
    known: bool = (
        isinstance(state, Independent)
        or (isinstance(state, Total) and number.kind == ("mean" if state.mean else "sum"))
        or (isinstance(state, RowCount) and number.kind == "sum" and _counts_rows(state))
        or (isinstance(state, PerSample) and number.kind in ("max", "min"))
    )
    why = "is no mean, sum, maximum or minimum over the rows"
    return () if known else (Reason("test_step", repr(number.key), why),)


def _counts_rows(state: RowCount) -> bool:
    """Return whether a number is a multiple of the number of rows."""
    size = state.values[0] if state.values else None
    rest = None if size is None else size / ROWS
    return rest is not None and not rest.has_rows
