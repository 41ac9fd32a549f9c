"""Self-check of ``fit``: compare the average of the shards' gradients with the gradient of the whole batch.

They agree for every loss that is a mean over samples, and for layers that treat each sample independently. Other
models show in the first batch: the check computes its gradient both ways, applies neither, and restores all state.

A deep network may amplify rounding until it changes a gradient altogether, as 60 dense layers with batch normalization
do. So where the two differ, the effect of rounding is measured: the gradient of the whole batch is computed once more,
with weights that differ in their last bit.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.machine import memory_shortage
from matex_data.mpi import deadlines
from matex_data.training.launcher.draws import draws_for_rows
from matex_data.training.sharding.rows import batch_size, rank_slice
from matex_data.training.steps.variables import optimizers

if TYPE_CHECKING:
    from matex_data.training.steps.distributed_model import DistributedModel

log = logging.getLogger("matex_data.training")


TOLERANCE = {"float32": 2e-3, "half": 5e-2}
"""Largest difference due to rounding, relative to the norm of a variable's gradient, by precision."""
FLOOR = 1e-3
"""Gradients below this fraction of the largest norm are rounding errors, as of a bias before BatchNormalization."""
ROUNDING = 5
"""Largest difference due to rounding, in multiples of the one that changed last bits of the weights make."""
COMPARABLE = 0.3
"""Largest difference from rounding, relative to a gradient's norm, beside which a wrong gradient would be noticed."""
TINY = 1e-300
"""In place of zero in denominators."""
COPIES = 3
"""Memory of a step in multiples of its activations: values, gradients, and one temporary."""


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison of the shards' averaged gradient with that of the whole batch.

    Parameters
    ----------
    excess : difference of the gradient that differs most, in multiples of what rounding explains.
    difference : the same difference, relative to the norm of that gradient.
    ratio : ratio of the shards' gradient to that of the whole batch, if one is a multiple of the other; else None.
    """

    excess: float
    difference: float
    ratio: float | None

    @property
    def agree(self) -> bool:
        """Return whether the gradients are equal up to rounding."""
        return self.excess <= 1


@dataclass(frozen=True)
class Rounding:
    """Effect of rounding on the gradients of the whole batch.

    Parameters
    ----------
    changes : float64[gradients], norms of their changes when the last bits of the weights change.
    norms : float64[gradients], norms of the gradients.
    """

    changes: Array
    norms: Array

    @property
    def largest(self) -> float:
        """Return the largest change of a gradient, relative to its norm; gradients that are zero do not count."""
        counted = self.norms > FLOOR * self.norms.max(initial=0.0)
        return float((self.changes[counted] / self.norms[counted]).max(initial=0.0))

    @property
    def hides_errors(self) -> bool:
        """Return whether rounding may change every gradient so much that a wrong one would not be noticed."""
        return not (ROUNDING * self.changes < COMPARABLE * self.norms).any()


def verify(distributed: DistributedModel, batch: Any) -> None:
    """Check a model on one batch, report the result, and train on whole batches if it fails. *Collective*.

    Parameters
    ----------
    distributed : model to check.
    batch : whole batch, equal on all ranks.
    """
    channel = distributed.channel
    total = batch_size(batch)
    if total is None or int(total) < channel.size:
        _print(channel.rank, "self-check: skipped, since the first batch has fewer rows than there are ranks")
        return
    # Free memory differs between nodes: all ranks skip the check, or none.
    missing = memory_shortage(_bytes(distributed.model, batch, int(total)), "the whole batch", remedy="")
    reasons = [reason for reason in channel.host.allgather_object(None if missing is None else str(missing)) if reason]
    if reasons:
        _print(channel.rank, f"self-check: skipped, since the whole batch does not fit in memory: {reasons[0]}")
        return
    with deadlines.busy("its self-check"):
        try:
            whole = _gradients(distributed, batch)
        except Exception as error:  # some steps run in graphs only
            whole, reasons = [], [f"{type(error).__name__}: {error}"]
        if not reasons and not any(g is not None and np.isfinite(g).all() for g in whole):
            reasons = ["no gradient of the first batch is finite"]
        reasons = [reason for found in channel.host.allgather_object(reasons) for reason in found]
        if reasons:
            _print(channel.rank, f"self-check: skipped: {reasons[0]}")
            return
        verdict, rounding, sums = _compare_on_all_ranks(distributed, batch, whole)
    _report(distributed, verdict, rounding, sums)
    distributed.train_on_whole(not verdict.agree)


def _compare_on_all_ranks(
    distributed: DistributedModel, batch: Any, whole: list[Array | None]
) -> tuple[Verdict, Rounding | None, bool]:
    """Compare the gradients; where they differ, allow for rounding, and for losses that are sums. *Collective*.

    Returns
    -------
    verdict : the same on all ranks.
    rounding : effect of rounding, if it was measured.
    sums : losses of one number for a batch count as sums from now on.
    """
    tolerance = TOLERANCE["half" if _epsilon(distributed.model) > np.finfo(np.float32).eps else "float32"]
    norms = _norms(whole)
    explained = tolerance * np.maximum(norms, FLOOR * norms.max() or 1.0)
    verdict, rounding, sums = _verdict(distributed, batch, whole, explained), None, False
    if not verdict.agree:
        rounding = _rounding(distributed, batch, whole)
        if ROUNDING * rounding.largest > tolerance and not rounding.hides_errors:
            explained = np.maximum(tolerance * norms, ROUNDING * rounding.changes)
            verdict = _verdict(distributed, batch, whole, explained)
    if not verdict.agree and distributed.set_sum_losses(True):
        second = _verdict(distributed, batch, whole, explained)
        sums = second.agree
        verdict = second if sums else verdict
        distributed.set_sum_losses(sums)
    return verdict, rounding, sums


def _report(distributed: DistributedModel, verdict: Verdict, rounding: Rounding | None, sums: bool) -> None:
    rank, size = distributed.channel.rank, distributed.channel.size
    if verdict.agree:
        notes = ["the loss is a sum over the batch"] if sums else []
        if rounding is not None and rounding.largest > COMPARABLE:
            notes.append(
                f"up to rounding, which this network amplifies: the last bits of its weights change a gradient by "
                f"{rounding.largest:.0%}"
            )
        if distributed.normalizes_locally():
            notes.append(
                "except for BatchNormalization, which normalizes each shard by itself; change it with --sync-batch-norm"
            )
        note = f" ({'; '.join(notes)})" if notes else ""
        _print(rank, f"self-check: the gradients of {size} shards and of the whole batch agree{note}")
    elif rank == 0:
        log.warning(
            "self-check: the gradients of %d shards and of the whole batch differ by %.2g of their size: %s\n"
            "  every rank trains %s on whole batches: correct, but no faster than one process\n"
            "  remedy: %s; or --no-verify, if the difference is intended",
            size,
            verdict.difference,
            _cause(verdict, rounding, size),
            distributed.model.name,
            "use a loss that is a mean over the samples, layers that treat each sample independently, and the same "
            "code on all ranks",
        )


def _cause(verdict: Verdict, rounding: Rounding | None, size: int) -> str:
    if rounding is not None and rounding.hides_errors:
        return f"rounding alone may change them by {rounding.largest:.2g}, which hides any other difference"
    if verdict.ratio is not None:
        kind = "sums over the batch, or divides by a constant" if verdict.ratio < 1 else "divides twice by its size"
        return f"that of the shards is {verdict.ratio:.3g} times the other, as for a loss that {kind}"
    return (
        "a loss or a layer may combine samples of the batch (a metric as loss, pairs within the batch, statistics of "
        "the batch), an input with as many rows as the batch may be a table, or a branch may depend on the rank"
    )


def _print(rank: int, text: str) -> None:
    if rank == 0:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _verdict(distributed: DistributedModel, batch: Any, whole: list[Array | None], explained: Array) -> Verdict:
    """Compare the average of the shards' gradients with that of the whole batch. *Collective*.

    Parameters
    ----------
    explained : float64[gradients], norms of differences that rounding explains.
    """
    channel, total = distributed.channel, int(batch_size(batch))
    with distributed.global_normalization(), distributed.unrounded_gradients():
        sharded = _gradients(distributed, batch, rank_slice(total, channel.rank, channel.size))
    by_rank: list[Verdict] = channel.host.allgather_object(_compare(whole, sharded, explained))
    return max(by_rank, key=lambda verdict: verdict.excess)


def _rounding(distributed: DistributedModel, batch: Any, whole: list[Array | None]) -> Rounding:
    """Measure the effect of rounding on the gradients of the whole batch; all ranks get the same. *Collective*."""
    weights = [v for v in distributed.model.weights if keras.backend.is_float_dtype(v.dtype)]
    before = [np.array(v.numpy()) for v in weights]
    signs, epsilon = np.random.default_rng(0), _epsilon(distributed.model)
    for variable, value in zip(weights, before, strict=True):
        sign = signs.choice([-epsilon, epsilon], value.shape)
        variable.assign((value + value * sign).astype(value.dtype))
    try:
        changed = _gradients(distributed, batch)
    finally:
        for variable, value in zip(weights, before, strict=True):
            variable.assign(value)
    pairs = zip(whole, changed, strict=True)
    changes = _norms([None if a is None or b is None else a - b for a, b in pairs])
    by_rank: list[Rounding] = distributed.channel.host.allgather_object(Rounding(changes, _norms(whole)))
    norms = by_rank[0].norms
    if any(len(other.norms) != len(norms) for other in by_rank):  # a branch depends on the rank
        return Rounding(np.zeros_like(norms), norms)
    return Rounding(np.max([other.changes for other in by_rank], axis=0), norms)


def _epsilon(model: Any) -> float:
    """Return the distance from 1 to the next number of the dtype in which a model computes."""
    return float(np.spacing(tf.as_dtype(model.compute_dtype).as_numpy_dtype(1)))


def _gradients(distributed: DistributedModel, batch: Any, rows: slice | None = None) -> list[Array | None]:
    """Run a step and undo it; return the gradients of its optimizers, and its other weight changes.

    Parameters
    ----------
    rows : rows of the batch that this rank trains on, which is *collective*; None: all of them, on every rank.
    """
    model, step, total = distributed.model, distributed.step, int(batch_size(batch))
    variables = [*model.variables, *model.metrics_variables, step.samples_seen]
    variables += [variable for optimizer in optimizers(model) for variable in optimizer.variables]
    before = [np.array(variable.numpy()) for variable in variables]
    weights = [variable.numpy() for variable in model.trainable_variables]
    python, eager = random.getstate(), tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    for optimizer in optimizers(model):
        if hasattr(optimizer, "dynamic_scale"):  # the scaled loss of a first step often overflows float16
            optimizer.dynamic_scale.assign(1.0)
    try:
        drawn = draws_for_rows(rows or slice(0, total), total)
        with drawn, _captured(distributed, average=rows is not None) as found:
            (step.train_on_whole_batch if rows is None else step)(batch)
        after = [variable.numpy() for variable in model.trainable_variables]
        changes = [new - old if (new != old).any() else None for new, old in zip(after, weights, strict=True)]
        return _dense([*found, *changes])
    finally:
        tf.config.run_functions_eagerly(eager)
        random.setstate(python)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def _compare(whole: list[Array | None], sharded: list[Array | None], explained: Array) -> Verdict:
    if [None if a is None else a.shape for a in whole] != [None if b is None else b.shape for b in sharded]:
        return Verdict(np.inf, np.inf, None)
    pairs = [(a, b) for a, b in zip(whole, sharded, strict=True) if a is not None and b is not None]
    if not all(np.isfinite(a).all() == np.isfinite(b).all() for a, b in pairs):
        return Verdict(np.inf, np.inf, None)
    pairs = [(a, b) for a, b in pairs if np.isfinite(a).all()]  # verify() makes sure that there are finite ones
    differences = _norms([None if a is None or b is None else a - b for a, b in zip(whole, sharded, strict=True)])
    excess = differences / np.maximum(explained, TINY)
    worst = int(excess.argmax())
    a, b = (np.concatenate([side.reshape(-1) for side in sides]) for sides in zip(*pairs, strict=True))
    ratio = float(a @ b) / max(float(a @ a), TINY)
    multiple = float(np.linalg.norm(b - ratio * a)) <= 0.01 * float(np.linalg.norm(b))
    difference = differences[worst] / max(_norms(whole)[worst], _norms(sharded)[worst], TINY)
    return Verdict(float(excess[worst]), float(difference), ratio if multiple else None)


def _norms(gradients: Sequence[Array | None]) -> Array:
    """Return float64[gradients]: the norms of the gradients; 0 for None, and where elements are not finite."""
    return np.array([0.0 if g is None or not np.isfinite(g).all() else np.linalg.norm(g) for g in gradients])


def _dense(gradients: list[Any]) -> list[Array | None]:
    return [None if g is None else np.asarray(tf.convert_to_tensor(g), np.float64) for g in gradients]


@contextlib.contextmanager
def _captured(distributed: DistributedModel, average: bool) -> Iterator[list[Any]]:
    """Context manager: collect the gradients that optimizers get, averaged or local, instead of applying them."""
    found: list[Any] = []
    originals = []

    def keep(grads: Any, trainable_variables: Any = None) -> None:
        with distributed.average.state.only_averages():
            found.extend(distributed.average.applied(list(grads)) if average else grads)

    for optimizer in optimizers(distributed.model):
        originals.append((optimizer, vars(optimizer).get("apply")))
        object.__setattr__(optimizer, "apply", keep)
    try:
        yield found
    finally:
        for optimizer, apply in originals:
            if apply is None:
                object.__delattr__(optimizer, "apply")
            else:
                object.__setattr__(optimizer, "apply", apply)


def _bytes(model: Any, batch: Any, total: int) -> int:
    """Return the approximate memory of a step on the whole batch, in bytes: data, activations and gradients."""
    data = sum(leaf.dtype.size * int(tf.size(leaf)) for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor))
    activations = 0
    for layer in model._flatten_layers():
        with contextlib.suppress(Exception):  # layers outside of functional models have no output yet
            outputs = keras.tree.flatten(layer.output)
            activations += 4 * sum(int(np.prod([size or 1 for size in x.shape[1:]])) for x in outputs)
    weights = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    return int(data + COPIES * activations * total + 4 * weights)
