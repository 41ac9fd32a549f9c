"""Self-check of one model: whether it is proven, when it is checked, and what follows from a difference."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import keras
import numpy as np
import tensorflow as tf

from matex_data.machine import memory_shortage
from matex_data.mpi.activity import busy
from matex_data.training.checking.comparison import Rounding, Verdict, compare, finite
from matex_data.training.checking.forward import agreed_proof
from matex_data.training.checking.pairs import Pairs
from matex_data.training.checking.probe import Effects, NotCheckable, Probe
from matex_data.training.checking.report import Report
from matex_data.training.checking.rounding import epsilon, other_roundings
from matex_data.training.checking.schedule import Schedule
from matex_data.training.checking.state import kept_random_state
from matex_data.training.exact.attributes import Attributes
from matex_data.training.exact.digests import check_same
from matex_data.training.exact.listed import Proof, prove
from matex_data.training.exact.logs import possible_reductions
from matex_data.training.exact.metrics import change_rules
from matex_data.training.exact.rows import batch_size, leaves_per_sample, rows_between, static_rows
from matex_data.training.exact.variables import check_equal_weights

if TYPE_CHECKING:
    from matex_data.training.distributed_model import DistributedModel

Mode = Literal["always", "proven", "first", "never"]
"""Which steps are checked: of all models; of those that are not proven; their first ones; none."""

COPIES = 3
"""Memory of a step in multiples of its activations: values, gradients, and one temporary."""
LEAST_ROWS = 2
"""Rows of a pair of ranks, at least, to check a step with."""


class SelfCheck:
    """Self-check of one distributed model under ``matex run``.

    Parameters
    ----------
    distributed : the model.
    mode : which steps are checked.
    report : messages of all models.
    schedule : of the model, if it has trained before; with it, the data are this rank's rows, which are gathered.

    Attributes
    ----------
    schedule : steps so far, and those of the latest check.
    gathers : the data are this rank's rows, which are gathered for a check.
    proof : whether sharding is proven to change nothing; None before the first step.
    """

    def __init__(
        self, distributed: DistributedModel, mode: Mode, report: Report, schedule: Schedule | None = None
    ) -> None:
        self._distributed, self._mode, self._report = distributed, mode, report
        self._channel = distributed.channel
        self.gathers = schedule is not None
        self.schedule = schedule or Schedule()
        self.proof: Proof | None = None
        self._spec: Any = None
        self._whole_spec: Any = None
        self._pairs = Pairs(self._channel)
        self._probes: tuple[Probe, Probe] | None = None
        self._rounding: Rounding | None = None
        self._number = 0
        self._sums = False
        self._traced = 0
        self._latest: Any = None
        self._rules: list[str] = []

    @property
    def active(self) -> bool:
        """Return whether steps may have to be checked."""
        proven = self.proof is not None and self.proof.proven and self._mode != "always"
        done = self._mode == "first" and self.schedule.checked is not None
        return self._mode != "never" and not (proven or done or self._distributed.step.whole)

    def due(self, **position: bool) -> bool:
        """Return whether the batch of the next step is needed: for a check, or for a comparison of the ranks' data.

        Parameters
        ----------
        position : ``first_of_fit``, ``first_of_epoch`` and ``last_of_fit`` of the next step.
        """
        due = self.schedule.due(**position) or self._distributed.watch.due
        return position.get("first_of_fit", False) or (self.active and (due or self._decides_anew()))

    def _decides_anew(self) -> bool:
        """Return whether the next step decides by variables in a way in which no checked step did."""
        return self._mode != "first" and self._probes is not None and self._probes[0].decisions.new()

    def is_new(self, spec: Any) -> bool:
        """Return whether batches have another structure, or other shapes, than those before."""
        return f"{spec}" != f"{self._spec}"

    def before_step(self, batch: Any, spec: Any, call: str = "fit()") -> None:
        """Compare the ranks' data, prove the model, and check the step; train on whole batches if it fails.

        *Collective*.

        Parameters
        ----------
        batch : whole batch of the next step.
        spec : element spec of the batches.

        Raises
        ------
        PartitionError : on all ranks, if their batches differ.
        """
        first = self.schedule.checked is None
        check_same(self._channel, call if first else f"step {self.schedule.steps + 1} of {call}", batch)
        if self._distributed.step.whole or self._mode == "never":
            return
        if self.proof is None or self.is_new(spec) or self._distributed.step.traces > max(self._traced, 1):
            self._traced = self._distributed.step.traces
            self.proof, self._spec, self._probes = self._prove(spec, batch), spec, None
        if self.active:
            with busy("its self-check"), kept_random_state():
                self._check(batch)
        self.schedule.note_check()
        self._latest = batch if self.active else None

    def of_shards(self, spec: Any) -> None:
        """Prove a model, or report that it is not: of batches that are sharded already, no rank has the union.

        *Collective* at first, and with another structure of batches.

        Parameters
        ----------
        spec : element spec of the shards.
        """
        if self._mode == "never" or (self.proof is not None and not self.is_new(spec)):
            return
        model = self._distributed.model
        leaves = _without_optionals(spec)
        flags = [leaf is not None and bool(leaf.shape.rank) for leaf in leaves]
        proof = agreed_proof(self._channel, model, prove(model, leaves, flags))
        self.proof, self._spec = proof, spec
        if proof.proven:
            self._report.proven(model, proof.draws, self._distributed.normalizes_locally())
        elif not self.gathers:
            self._report.unchecked(model, proof)

    def spec_of_union(self, spec: Any) -> Any:
        """Return the spec of the batches of all ranks; a known number of rows is the same on all of them.

        Parameters
        ----------
        spec : element spec of this rank's batches.
        """
        if self._whole_spec is None:
            flags, size = leaves_per_sample(spec), self._channel.size
            known = static_rows(spec, flags)
            rows = None if known is None or self._distributed.step.reducer is not None else known * size
            self._whole_spec = tf.nest.map_structure(
                lambda leaf: (
                    tf.TensorSpec([rows, *leaf.shape[1:]], leaf.dtype)
                    if isinstance(leaf, tf.TensorSpec) and leaf.shape.rank
                    else leaf
                ),
                spec,
            )
        return self._whole_spec

    def after_training(self) -> None:
        """Compare the weights of all ranks, and check the latest batch again if that is due. *Collective*.

        It is due if many steps have passed since, or something has changed.
        """
        distributed = self._distributed
        check_equal_weights(distributed.model, self._channel)
        due = distributed.watch.due or self.schedule.due(last_of_fit=True)
        if self.active and self._latest is not None and due and self.schedule.steps != self.schedule.checked:
            with busy("its self-check"), kept_random_state():
                self._check(self._latest)
            self.schedule.note_check()

    def _flags(self, spec: Any) -> list[bool | None]:
        """Return for each leaf of the batches whether it has one row per sample; see ``leaves_per_sample``."""
        known = self._distributed.step.per_sample or []
        return known if len(known) == len(tf.nest.flatten(spec)) else leaves_per_sample(spec)

    def _prove(self, spec: Any, batch: Any) -> Proof:
        """Prove the model, and report it; the same result on all ranks. *Collective*.

        Parameters
        ----------
        batch : tells of leaves whose lengths the spec leaves open whether they have one row per sample.
        """
        model = self._distributed.model
        leaves, total = _without_optionals(spec), int(batch_size(batch))
        per_sample = [
            leaf is not None and (_has_rows(tensor, total) if flag is None else flag)
            for leaf, tensor, flag in zip(leaves, tf.nest.flatten(batch), self._flags(spec), strict=True)
        ]
        proof = agreed_proof(self._channel, model, prove(model, leaves, per_sample))
        if proof.proven and self._mode != "always":
            self._report.proven(model, proof.draws, self._distributed.normalizes_locally())
        return proof

    def _check(self, batch: Any) -> None:
        """Check the next step; train on whole batches if it fails. *Collective*."""
        again, self._sums = self.schedule.checked is not None, False
        assert self.proof is not None
        cause = self._agreed(self._hindrance(batch))
        verdict = Verdict()
        for number in range(self._pairs.rounds):  # all neighbours: a batch may differ in the rows of some ranks alone
            if cause is None and verdict.agree:
                result = self._compare(batch, number)
                cause = result if isinstance(result, str) else None
                verdict = verdict if isinstance(result, str) else result
        model = self._distributed.model
        if cause is not None:
            self._report.whole(model, cause, self.schedule, self.proof)
        elif not verdict.agree:
            self._report.differed(model, verdict, self.schedule, self.proof)
        elif not again:
            local = self._distributed.normalizes_locally()
            self._report.agreed(model, verdict, self.proof, self._sums, local, self._mode != "first")
        self.schedule.sums = self._sums or (again and self.schedule.sums)
        if cause is not None or not verdict.agree:
            self.schedule.whole = True
            self._distributed.train_on_whole(merge=bool(self.schedule.steps))
        else:
            self._distributed.watch.begin(self._probes[0].read if self._probes else [])
            if self._probes is not None:
                self._probes[0].decisions.note()

    def _hindrance(self, batch: Any) -> str | None:
        """Return why the model cannot be checked at all, as a clause; None if it can."""
        model = self._distributed.model
        total = int(batch_size(batch))
        if model.run_eagerly or tf.config.functions_run_eagerly():
            return "its Python code runs in every step (run_eagerly), so that a check would run it once more"
        lengths = {
            int(tf.shape(leaf)[0])
            for leaf, known in zip(tf.nest.flatten(batch), self._flags(self._spec), strict=True)
            if known is None and tf.is_tensor(leaf) and leaf.shape.rank
        }
        if lengths - {total}:
            return f"its inputs have {sorted(lengths | {total})} rows, so that those of a sample are not known"
        if total < self._channel.size and self.schedule.checked is None:
            return f"its batches have fewer rows ({total}) than there are ranks ({self._channel.size})"
        return None

    def _compare(self, batch: Any, number: int) -> Verdict | str:
        """Compare shards with their union; return the verdict, or why it is not known. *Collective*.

        Parameters
        ----------
        number : number of the round of pairs.
        """
        self._number = number
        self._pairs.connect(self._number)
        partner = self._pairs.partner(self._number)
        union = None if partner is None else self._union(batch)
        whole: list[Effects] = []

        def run_whole() -> None:
            probe, _ = self._traced_probes()  # on all ranks: the first call of a layer may create variables
            if union is not None:
                whole.append(probe.run(union))
                if not finite(whole[0]):
                    raise NotCheckable("no gradient is finite")

        def trace_shards() -> None:
            if union is not None:
                with self._distributed.global_normalization(), self._distributed.unrounded_gradients():
                    self._trace_probe(1)

        for action in (run_whole, trace_shards):
            cause = self._agreed(self._failure(action))
            if cause is not None:
                return f"{cause}"
        verdict = self._verdict(union, whole)
        if not self._agreeing(verdict):
            self._measure_rounding(union, whole)
            verdict = self._verdict(union, whole)
        if not self._agreeing(verdict) and self.schedule.checked is None:
            second = self._verdict_for_sums(union, whole)
            self._sums = self._agreeing(second)
            self._distributed.set_sum_losses(self._sums)
            verdict = second if self._sums else verdict
        return self._worst(verdict)

    def _verdict_for_sums(self, union: Any, whole: list[Effects]) -> Verdict:
        """Compare again with losses of one number for a batch as sums. *Collective*."""
        scalar = self._agreed(True if self._distributed.has_scalar_losses() else None)
        self._distributed.set_sum_losses(True)
        if scalar is None or self._agreed(None if union is None else self._failure(self._trace_again)):
            return Verdict(np.inf)
        return self._verdict(union, whole)

    def _union(self, batch: Any) -> Any:
        """Return the rows of this rank and its partner, as many as the memory holds."""
        total = int(batch_size(batch))
        start, stop = self._pairs.rows(total, self._number)
        per_sample = self._flags(self._spec)
        bytes_per_row = max(1, _bytes(self._distributed.model, batch, total) // max(total, 1))
        rows = stop - start
        while rows > LEAST_ROWS and memory_shortage(rows * bytes_per_row, "a batch", remedy="") is not None:
            rows //= 2
        return batch if rows == total else rows_between(batch, start, start + rows, per_sample)

    def _traced_probes(self) -> tuple[Probe, Probe]:
        if self._probes is None:
            spec = self._relaxed(self._spec)
            self._probes = Probe(self._distributed, spec, True), Probe(self._distributed, spec, False)
            self._trace_probe(0)
        return self._probes

    def _relaxed(self, spec: Any) -> Any:
        """Return the spec for a pair of ranks, whose batches have fewer rows than those of all."""
        if self._channel.size == 2:
            return spec
        flags = self._flags(spec)
        leaves = [
            tf.TensorSpec([None, *leaf.shape[1:]], leaf.dtype) if flag and isinstance(leaf, tf.TensorSpec) else leaf
            for leaf, flag in zip(tf.nest.flatten(spec), flags, strict=True)
        ]
        return tf.nest.pack_sequence_as(spec, leaves)

    def _trace_probe(self, which: int) -> None:
        """Trace a probe, unless it is traced.

        Raises
        ------
        NotCheckable : it cannot be sharded, or Python code changes attributes of the model.
        """
        probes = self._probes if which else None
        if which and (probes is None or probes[1].traced):
            return
        assert self._probes is not None
        attributes = Attributes(self._distributed.model)
        state, among_all = random.getstate(), self._channel.size == 2
        try:
            joined = self._pairs.joined(self._number) if which else contextlib.nullcontext()
            selecting = self._distributed.selecting_rows(self._flags(self._spec))
            with joined, self._distributed.weighed(not among_all), selecting:
                self._probes[which].trace()
        finally:
            changed = attributes.changed()
            drew = random.getstate() != state
            attributes.restore()
        if changed:
            raise NotCheckable(f"its Python code changes {changed[0]} when it is called")
        if drew:
            raise NotCheckable("its Python code draws random numbers when it is called")
        if which:
            self._rules = change_rules(self._distributed.model)

    def _trace_again(self) -> None:
        """Trace the probe of shards once more, since its losses now count as sums."""
        assert self._probes is not None
        self._probes[1].traced = False
        with self._distributed.global_normalization(), self._distributed.unrounded_gradients():
            self._trace_probe(1)

    def _verdict(self, union: Any, whole: list[Effects]) -> Verdict:
        """Compare the shards of this rank's pair with their union. *Collective* within the pair."""
        if union is None:
            return Verdict()
        assert self._probes is not None
        if self._rounding is None:
            self._rounding = Rounding(epsilon(self._distributed.model))
        try:
            with self._pairs.joined(self._number):
                sharded = self._probes[1].run(union)
                combined = self._combined(sharded.metrics)
                logs = self._channel.host.allgather_object((sharded.logs, sharded.rows))
        except tf.errors.OpError as error:
            return Verdict(np.inf, np.inf, f"step ({type(error).__name__}: {error.message.splitlines()[0]})")
        for key, value in whole[0].logs.items():
            shards = [(numbers[key], rows) for numbers, rows in logs if key in numbers]
            possible = possible_reductions(shards, value) if len(shards) == len(logs) else set()
            self._distributed.step.possible.setdefault(key, possible).intersection_update(possible)
        known = {i: change for i, change in whole[0].metrics.items() if i in combined}
        combined = {i: combined[i] for i in known}
        return compare(Effects(whole[0].named(known)), Effects(sharded.named(combined)), self._rounding)

    def _combined(self, changes: dict[int, Any]) -> dict[int, Any]:
        """Return the changes of metrics, combined over the ranks of the pair. *Collective* among them."""
        out: dict[int, Any] = {}
        for i, change in changes.items():
            value = np.array(change, np.float64, order="C")
            if self._rules[i] == "sum":
                self._channel.host.reduce(value.reshape(-1))
            if self._rules[i] in ("sum", "equal"):
                out[i] = value
        return out

    def _measure_rounding(self, union: Any, whole: list[Effects]) -> None:
        if union is None:
            return
        assert self._probes is not None
        self._rounding = Rounding(epsilon(self._distributed.model))
        self._rounding.measure(whole[0], other_roundings(self._probes[0], self._distributed.model, union))

    def _agreeing(self, verdict: Verdict) -> bool:
        """Return whether all ranks find that shards and their union agree. *Collective*."""
        failed = np.array([not verdict.agree], np.int64)
        self._channel.host.reduce(failed, "max")
        return not failed[0]

    def _worst(self, verdict: Verdict) -> Verdict:
        """Return the verdict of the rank that differs most. *Collective* if one does."""
        if self._agreeing(verdict):
            return verdict
        by_rank: list[Verdict] = self._channel.host.allgather_object(verdict)
        return max(by_rank, key=lambda verdict: (not verdict.agree, verdict.excess))

    def _failure(self, action: Callable[[], Any]) -> str | None:
        """Run an action; return why it failed, as a clause."""
        try:
            action()
        except NotCheckable as reason:
            return str(reason)
        except Exception as error:  # the code of the script may raise anything
            text = next(iter(str(error).strip().splitlines()), "")
            return f"its step raises {type(error).__name__}: {text}"
        return None

    def _agreed(self, reason: Any) -> Any:
        """Return the reason of the first rank that has one; None if none has. *Collective*."""
        known = np.array([reason is not None], np.int64)
        self._channel.host.reduce(known, "max")
        if not known[0]:
            return None
        return next(r for r in self._channel.host.allgather_object(reason) if r is not None)


def _without_optionals(spec: Any) -> list[Any]:
    """Return the leaves of the spec of a batch; None for an optional, which stands for None."""
    return [None if isinstance(leaf, tf.OptionalSpec) else leaf for leaf in tf.nest.flatten(spec)]


def _has_rows(leaf: Any, total: int) -> bool:
    """Return whether a tensor has as many rows as the batch."""
    if isinstance(leaf, tf.RaggedTensor):
        return int(leaf.nrows()) == total
    return bool(leaf.shape.rank) and int(leaf.shape[0]) == total


def _bytes(model: Any, batch: Any, total: int) -> int:
    """Return the approximate memory of a step on the whole batch, in bytes: data, activations and gradients."""
    data = sum(leaf.dtype.size * int(tf.size(leaf)) for leaf in tf.nest.flatten(batch) if isinstance(leaf, tf.Tensor))
    activations = 0
    for layer in model._flatten_layers():
        try:
            outputs = keras.tree.flatten(layer.output)
        except (AttributeError, ValueError):  # layers outside of functional models have no output yet
            continue
        activations += 4 * sum(int(np.prod([size or 1 for size in x.shape[1:]])) for x in outputs)
    weights = sum(int(np.prod(v.shape)) * 4 for v in model.trainable_variables)
    return int(data + COPIES * activations * total + 4 * weights)
