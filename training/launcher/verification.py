"""Self-check of ``fit``: compare the average of the shards' gradients with the gradient of the whole batch.

They agree for every loss that is a mean over samples, and for layers that treat each sample independently. Other
models show in the first batch: the check computes its gradient both ways, applies neither, and restores all state.
"""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.machine import memory_shortage
from matex_data.mpi import deadlines
from matex_data.training.launcher.draws import draws_for_rows
from matex_data.training.optimizer import averaged_gradients
from matex_data.training.reduction.tape import average_untagged
from matex_data.training.sharding.rows import batch_size, rank_slice
from matex_data.training.steps.variables import optimizers

if TYPE_CHECKING:
    from matex_data.training.steps.distributed_model import DistributedModel

log = logging.getLogger("matex_data.training")


TOLERANCE = {"float32": 2e-3, "half": 5e-2}
"""Largest difference due to rounding, relative to the norm of a variable's gradient, by precision."""
FLOOR = 1e-3
"""Gradients below this fraction of the largest norm are rounding errors, as of a bias before BatchNormalization."""
COPIES = 3
"""Memory of a step in multiples of its activations: values, gradients, and one temporary."""


@dataclass(frozen=True)
class Verdict:
    """Result of a comparison of the shards' averaged gradient with that of the whole batch.

    Parameters
    ----------
    difference : difference of the variable that differs most, relative to its norm.
    ratio : ratio of the shards' gradient to that of the whole batch, if one is a multiple of the other; else None.
    agree : they are equal up to rounding.
    """

    difference: float
    ratio: float | None
    agree: bool


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
            whole = _gradients(distributed, batch, slice(0, int(total)), int(total))
        except Exception as error:  # some steps run in graphs only
            whole, reasons = [], [f"{type(error).__name__}: {error}"]
        if not reasons and not any(g is not None and np.isfinite(g).all() for g in whole):
            reasons = ["no gradient of the first batch is finite"]
        reasons = [reason for found in channel.host.allgather_object(reasons) for reason in found]
        if reasons:
            _print(channel.rank, f"self-check: skipped: {reasons[0]}")
            return
        verdict, sums = _verdict(distributed, batch, whole, int(total)), False
        if not verdict.agree and distributed.set_sum_losses(True):
            second = _verdict(distributed, batch, whole, int(total))
            sums = second.agree
            verdict = second if sums else verdict
            distributed.set_sum_losses(sums)
    _report(distributed, verdict, sums)
    distributed.train_on_whole(not verdict.agree)


def _report(distributed: DistributedModel, verdict: Verdict, sums: bool) -> None:
    rank, size = distributed.channel.rank, distributed.channel.size
    if verdict.agree:
        notes = ["the loss is a sum over the batch"] if sums else []
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
            _cause(verdict, size),
            distributed.model.name,
            "use a loss that is a mean over the samples, layers that treat each sample independently, and the same "
            "code on all ranks",
        )


def _cause(verdict: Verdict, size: int) -> str:
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


def _verdict(distributed: DistributedModel, batch: Any, whole: list[Array | None], total: int) -> Verdict:
    channel = distributed.channel
    with distributed.global_normalization(), distributed.unrounded_gradients():
        sharded = _gradients(distributed, batch, rank_slice(total, channel.rank, channel.size), total)
    local = _compare(whole, sharded, half="16" in str(distributed.model.compute_dtype))
    by_rank: list[Verdict] = channel.host.allgather_object(local)
    return max(by_rank, key=lambda verdict: (not verdict.agree, verdict.difference))


def _gradients(distributed: DistributedModel, batch: Any, rows: slice, total: int) -> list[Array | None]:
    """Run a step on these rows and undo it; return the gradients of its optimizers, and its other weight changes."""
    model, step, everything = distributed.model, distributed.step, rows == slice(0, total)
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
        with draws_for_rows(rows, total), _captured(distributed, average=not everything) as found:
            (step.train_on_whole_batch if everything else step)(batch)
        after = [variable.numpy() for variable in model.trainable_variables]
        changes = [new - old if (new != old).any() else None for new, old in zip(after, weights, strict=True)]
        return _dense([*found, *changes])
    finally:
        tf.config.run_functions_eagerly(eager)
        random.setstate(python)
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)


def _compare(whole: list[Array | None], sharded: list[Array | None], half: bool) -> Verdict:
    if [None if a is None else a.shape for a in whole] != [None if b is None else b.shape for b in sharded]:
        return Verdict(np.inf, None, False)
    pairs = [(a, b) for a, b in zip(whole, sharded, strict=True) if a is not None and b is not None]
    if not all(np.isfinite(a).all() == np.isfinite(b).all() for a, b in pairs):
        return Verdict(np.inf, None, False)
    pairs = [(a, b) for a, b in pairs if np.isfinite(a).all()]  # verify() makes sure that there are finite ones
    norms = [max(float(np.linalg.norm(a)), float(np.linalg.norm(b))) for a, b in pairs]
    floor = max(norms, default=0.0) * FLOOR or 1.0
    differences = [float(np.linalg.norm(a - b)) / max(norm, floor) for (a, b), norm in zip(pairs, norms, strict=True)]
    largest = max(differences, default=0.0)
    a, b = (np.concatenate([side.reshape(-1) for side in sides]) for sides in zip(*pairs, strict=True))
    ratio = float(a @ b) / max(float(a @ a), 1e-300)
    multiple = float(np.linalg.norm(b - ratio * a)) <= 0.01 * float(np.linalg.norm(b))
    return Verdict(largest, ratio if multiple else None, largest <= TOLERANCE["half" if half else "float32"])


def _dense(gradients: list[Any]) -> list[Array | None]:
    return [None if g is None else np.asarray(tf.convert_to_tensor(g), np.float64) for g in gradients]


@contextlib.contextmanager
def _captured(distributed: DistributedModel, average: bool) -> Iterator[list[Any]]:
    """Context manager: collect the gradients that optimizers get, averaged or local, instead of applying them."""
    found: list[Any] = []
    originals = []

    def keep(grads: Any, trainable_variables: Any = None) -> None:
        with averaged_gradients():
            found.extend(average_untagged(list(grads), distributed.average) if average else grads)

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
