"""Self-check of a ``fit``: does the average over the parts of a batch give the gradient of the whole batch?

It does for every loss that is a mean over samples, and layers that treat each sample by itself. What nobody thought of
shows in the first batch: its gradient is taken both ways, nothing is applied, and all state is put back.
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
from matex_data.training.steps.build import optimizers

if TYPE_CHECKING:
    from matex_data.training.steps.distributed_model import DistributedModel

log = logging.getLogger("matex_data.training")


TOLERANCE = {"float32": 2e-3, "half": 5e-2}
"""Differences that are rounding, of the norm of a variable's gradient."""
FLOOR = 1e-3
"""Gradients of a variable below this share of the largest are rounding themselves, as of a bias before a BatchNorm."""
COPIES = 3
"""Copies of all activations that a step holds: theirs, their gradients', and one in the making."""


@dataclass(frozen=True)
class Verdict:
    """How the averaged gradient of the parts compares with that of the whole batch.

    Parameters
    ----------
    difference : of the variable that differs most, as a share of its norm.
    ratio : of the parts' gradient to that of the whole, where one is a multiple of the other; else None.
    agree : whether they are equal but for rounding.
    """

    difference: float
    ratio: float | None
    agree: bool


def verify(distributed: DistributedModel, batch: Any) -> None:
    """Compare on this batch, tell the user, and train on whole batches from now on if need be. *Collective*.

    Parameters
    ----------
    batch : the whole one, of which every rank takes its rows.
    """
    channel = distributed.channel
    total = batch_size(batch)
    if total is None or int(total) < channel.size:
        _print(channel.rank, "self-check: left out, as the first batch has no row for some rank")
        return
    # Half of the ranks may have memory where others have none: all leave the check out, or none.
    missing = memory_shortage(_bytes(distributed.model, batch, int(total)), "the whole batch", remedy="")
    reasons = [reason for reason in channel.host.allgather_object(None if missing is None else str(missing)) if reason]
    if reasons:
        _print(channel.rank, f"self-check: left out, as the whole batch would not fit: {reasons[0]}")
        return
    with deadlines.busy("its self-check"):
        try:
            whole = _gradients(distributed, batch, slice(0, int(total)), int(total))
        except Exception as error:  # a step may be one that only graphs can run
            whole, reasons = [], [f"{type(error).__name__}: {error}"]
        if not reasons and not any(g is not None and np.isfinite(g).all() for g in whole):
            reasons = ["no gradient of the first batch is finite"]
        reasons = [reason for found in channel.host.allgather_object(reasons) for reason in found]
        if reasons:
            _print(channel.rank, f"self-check: left out: {reasons[0]}")
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
            notes.append("but for BatchNormalization, which takes each rank's part by itself: --sync-batch-norm")
        note = f" ({'; '.join(notes)})" if notes else ""
        _print(rank, f"self-check: the gradients of {size} parts and of the whole batch agree{note}")
    elif rank == 0:
        log.warning(
            "self-check: the gradients of %d parts and of the whole batch differ by %.2g of their size: %s\n"
            "  every rank trains %s on whole batches: right, but no faster than one process\n"
            "  remedy: %s; or --no-verify, if the difference is meant",
            size,
            verdict.difference,
            _cause(verdict, size),
            distributed.model.name,
            "a loss that is a mean over the samples, layers that treat each sample by itself, and the same code on "
            "all ranks",
        )


def _cause(verdict: Verdict, size: int) -> str:
    if verdict.ratio is not None:
        kind = "sums over the batch, or divides by a constant" if verdict.ratio < 1 else "divides twice by its size"
        return f"that of the parts is {verdict.ratio:.3g} times the other, as of a loss that {kind}"
    return (
        "a loss or a layer may look at several samples of the batch at once (a metric as loss, pairs within the batch, "
        "statistics of the batch), an input with as many rows as the batch may be a table, or a branch may depend on "
        "the rank"
    )


def _print(rank: int, text: str) -> None:
    if rank == 0:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _verdict(distributed: DistributedModel, batch: Any, whole: list[Array | None], total: int) -> Verdict:
    channel = distributed.channel
    with distributed.global_normalization():
        sharded = _gradients(distributed, batch, rank_slice(total, channel.rank, channel.size), total)
    local = _compare(whole, sharded, half="16" in str(distributed.model.compute_dtype))
    everyone: list[Verdict] = channel.host.allgather_object(local)
    return max(everyone, key=lambda verdict: (not verdict.agree, verdict.difference))


def _gradients(distributed: DistributedModel, batch: Any, rows: slice, total: int) -> list[Array | None]:
    """Return what a step on these rows gives to the optimizers, and what it changes by itself; undo all."""
    model, step, everything = distributed.model, distributed.step, rows == slice(0, total)
    variables = [*model.variables, *model.metrics_variables, step.samples_seen]
    variables += [variable for optimizer in optimizers(model) for variable in optimizer.variables]
    before = [np.array(variable.numpy()) for variable in variables]
    weights = [variable.numpy() for variable in model.trainable_variables]
    python, eager = random.getstate(), tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    for optimizer in optimizers(model):
        if hasattr(optimizer, "dynamic_scale"):  # scaled losses of a first step are mostly too large for float16
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
    pairs = [(a, b) for a, b in pairs if np.isfinite(a).all()]  # some at least, else there is nothing to check
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
    """Context in which optimizers keep the gradients that they are given, averaged or as they are, and do no more."""
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
    """Return about the memory of a step on the whole batch: of its data, its activations and all gradients."""
    data = sum(leaf.dtype.size * int(tf.size(leaf)) for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor))
    activations = 0
    for layer in model._flatten_layers():
        with contextlib.suppress(Exception):  # layers of models that are not functional have no output yet
            outputs = keras.tree.flatten(layer.output)
            activations += 4 * sum(int(np.prod([size or 1 for size in x.shape[1:]])) for x in outputs)
    weights = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    return int(data + COPIES * activations * total + 4 * weights)
