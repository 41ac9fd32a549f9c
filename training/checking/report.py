"""Messages of the self-check, each once for a kind of model."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from matex_data.training.checking.comparison import COMPARABLE, Verdict
from matex_data.training.checking.probe import METRICS
from matex_data.training.exact.listed import Proof
from matex_data.training.exact.metrics import flat_metrics, numeric_states

if TYPE_CHECKING:
    from matex_data.training.checking.check import CheckSchedule

log = logging.getLogger("matex_data.training")

REASONS = 3
"""Reasons of a proof that failed which a message gives."""
_DOUBT = "from the first one that differs on, the result is not that of one process"
LOCAL_STATISTICS = (
    "except for BatchNormalization, which normalizes each shard by itself; change it with --sync-batch-norm"
)

LOSS_SCALE = (
    "except for the steps that loss scaling skips: in float16, gradients of shards overflow at other scales than those "
    "of the batch"
)


def rows_of_all(metrics: list[str]) -> str:
    """Return the note that metrics are computed from predictions that the ranks gather."""
    return f"metrics that combine rows get those of all ranks: {', '.join(metrics)}"


RAISES = "its step raises"
"""Beginning of the cause of a step that fails on shards."""
DRAWS = "up to random numbers, which each rank draws for itself"


class CheckReport:
    """Messages of rank 0, each once for models of the same class and structure.

    A cause says as a clause why shards cannot be compared with the whole batch, or is the verdict that they differ.
    Exceptions say in which they differ, as is known.

    Parameters
    ----------
    never : option that switches the check off.
    tells_proven : report also models that need no check.
    """

    def __init__(self, rank: int, size: int, never: str = "--verify=never", tells_proven: bool = True) -> None:
        self._rank, self._size = rank, size
        self._never, self._tells_proven = never, tells_proven
        self._said: set[tuple[Any, ...]] = set()

    def proven(self, model: Any, exceptions: list[str]) -> None:
        """Report that a model is proven."""
        if not self._tells_proven:
            return
        self._print(
            model,
            f"self-check: {model.name} is proven to train on {self._size} shards of a batch as on the whole batch"
            f"{_brackets(exceptions)}",
        )

    def agreed(
        self, model: Any, verdict: Verdict, proof: Proof, sums: bool, exceptions: list[str], again: bool
    ) -> None:
        """Report that the first check of a model found no difference."""
        notes = ["the loss is a sum over the batch"] if sums else []
        if verdict.noise is not None and verdict.noise > COMPARABLE:
            notes.append(
                f"up to rounding, which this network amplifies: the last bits of its weights change a gradient by "
                f"{verdict.noise:.0%}"
            )
        notes += exceptions
        later = "; it is not proven, so it is checked again in later steps" if again and not proof.proven else ""
        reasons = f"\n  not proven: {_reasons(proof)}" if later else ""
        self._print(
            model,
            f"self-check: the gradients of shards and of the whole batch agree in the first step of {model.name}"
            f"{_brackets(notes)}{later}{reasons}",
        )

    def trains_whole(self, model: Any, cause: str | Verdict, schedule: CheckSchedule, proof: Proof) -> None:
        """Report that a model is trained on whole batches, since shards differ or cannot be compared with them."""
        metric = _metric(model, cause)
        if metric is not None:
            first = f"the results of the metric {metric} of {model.name} differ on shards, and nothing else does"
        elif isinstance(cause, Verdict):
            first = (
                f"the gradients of shards and of the whole batch differ: the {cause.name} of {model.name} by "
                f"{cause.difference:.2g} of its size: {_cause(cause)}"
            )
        else:
            first = f"{model.name} cannot be trained on shards of a batch: {cause}"
        lines = [
            f"self-check: {first}",
            f"  every rank trains it on whole batches from step {schedule.steps + 1} on: as one process does, and no "
            "faster",
        ]
        lines += [_doubtful(schedule)] if schedule.checked is not None and schedule.steps else []
        lines += [f"  not proven: {_reasons(proof)}"] if proof.reasons else []
        if metric is not None:
            lines.append(
                "  remedy: leave it out, or make it a class derived from keras.metrics.Metric whose update_state gets "
                "y_true and y_pred: those of the whole batch"
            )
        elif isinstance(cause, Verdict):
            lines.append(
                "  remedy: use a loss that is a mean over the samples, layers that treat each sample independently, "
                f"and the same code on all ranks; or {self._never}, if the difference is intended"
            )
        elif RAISES in cause:
            lines.append(
                "  remedy: where the step counts on a batch size, take the number of rows from the data, as in "
                "tf.shape(x)[0]"
            )
        self._warn(model, "\n".join(lines))

    def unchecked(self, model: Any, proof: Proof) -> None:
        """Report that a model trains on data that is sharded already, and that nothing shows it to be right."""
        self._warn(
            model,
            f"self-check: {model.name} is trained on data of which each rank has its own rows, and is neither proven "
            "nor checked: the result is that of one process only if its loss is a mean over the rows of a batch, and "
            "if nothing combines rows\n"
            f"  not proven: {_reasons(proof)}\n"
            f"  remedy: train it once on batches that are the same on all ranks, which are checked; or {self._never}",
        )

    def evaluates_whole(self, model: Any, cause: str | Verdict, proof: Proof, first: bool) -> None:
        """Report that a model evaluates whole batches, since shards differ or cannot be compared with them."""
        if isinstance(cause, Verdict):
            cause = (
                f"the {cause.name} of shards differs from that of the whole batch by {cause.difference:.2g} of its size"
            )
        text = (
            f"self-check: {model.name} cannot be evaluated on shards of a batch: {cause}\n"
            "  every rank evaluates whole batches from now on: as one process does, and no faster"
        )
        if not first:
            text += "\n  evaluations before, since the latest check, may have had other results"
        self._warn(model, f"{text}\n  not proven: {_reasons(proof)}" if proof.reasons else text)

    def evaluates_shards(self, model: Any) -> None:
        """Report that an evaluation draws random numbers, others than in one process."""
        self._print(
            model,
            f"self-check: evaluations of {model.name} on shards and on whole batches agree{_brackets([DRAWS])}",
        )

    def predicts_whole(self, model: Any, cause: str) -> None:
        """Report that a model predicts whole batches on every rank, since a row depends on other rows."""
        self._warn(
            model,
            f"self-check: {model.name} cannot predict shards of a batch: {cause}\n"
            "  every rank predicts whole batches: as one process does, and no faster",
        )

    def predicts_all(self, model: Any, proof: Proof) -> None:
        """Report that a model predicts all of its data on every rank, since nothing shows that shards are right."""
        self._print(
            model,
            f"{model.name} predicts all of its data on every rank, since it is not proven to compute "
            f"each row by itself: {_reasons(proof)}\n"
            "  remedy: --verify=never, if it computes each row by itself",
        )

    def _print(self, model: Any, text: str) -> None:
        if self._first(model, text):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def _warn(self, model: Any, text: str) -> None:
        if self._first(model, text):
            log.warning("%s", text)

    def _first(self, model: Any, text: str) -> bool:
        """Return whether this rank reports a text: rank 0, once for each kind of model.

        A text about doubtful steps concerns this very model, and is reported each time.
        """
        shapes = tuple((tuple(v.shape), str(v.dtype)) for v in model.weights)
        key = (type(model).__qualname__, shapes, text.partition(":")[0], text.replace(model.name, ""))
        first = self._rank == 0 and (key not in self._said or _DOUBT in text)
        self._said.add(key)
        return first


def _doubtful(schedule: CheckSchedule) -> str:
    """Return the line that names the steps whose results are not known to be those of one process."""
    return (
        f"  steps {(schedule.checked or 0) + 2} to {schedule.steps} were trained on shards: {_DOUBT}"
        if schedule.steps > (schedule.checked or 0) + 1
        else f"  the steps before, up to step {schedule.steps}, were those of one process"
    )


def _metric(model: Any, cause: str | Verdict) -> str | None:
    """Return the name of the metric that alone differs; None if there is no such one."""
    if isinstance(cause, str) or not cause.name.startswith(METRICS):
        return None
    state = numeric_states(model)[int(cause.name.removeprefix(METRICS)) - 1]
    owners = [metric.name for metric in flat_metrics(model.metrics) if any(v is state for v in metric.variables)]
    return str(owners[0] if owners else state.path)


def _cause(verdict: Verdict) -> str:
    if verdict.hidden:
        return f"rounding alone may change it by {verdict.noise or 0:.2g}, which hides any other difference"
    if verdict.ratio is not None:
        kind = "sums over the batch, or divides by a constant" if verdict.ratio < 1 else "divides twice by its size"
        return f"that of the shards is {verdict.ratio:.3g} times that of the batch, as for a loss that {kind}"
    return (
        "a loss or a layer may combine samples of the batch (a metric as loss, pairs within the batch, statistics of "
        "the batch), an input with as many rows as the batch may be a table, random numbers may be drawn for other "
        "rows than those of the batch, or a branch may depend on the rank"
    )


def _reasons(proof: Proof) -> str:
    more = f"; and {len(proof.reasons) - REASONS} more" if len(proof.reasons) > REASONS else ""
    return "; ".join(proof.reasons[:REASONS]) + more


def _brackets(notes: list[str]) -> str:
    return f" ({'; '.join(notes)})" if notes else ""
