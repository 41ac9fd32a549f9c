"""Self-check of one model: whether it is proven, before which steps it is checked, and what a difference leads to."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import tensorflow as tf

from matex_data.mpi.activity import busy
from matex_data.training.checking.batches import taken, union_spec
from matex_data.training.checking.report import DRAWS, LOCAL_STATISTICS, LOSS_SCALE, CheckReport, rows_of_all
from matex_data.training.checking.shards import ShardComparison
from matex_data.training.exact.attributes import kept_random_state
from matex_data.training.exact.digests import check_same
from matex_data.training.exact.listed import Proof, agreed_proof, specs_of
from matex_data.training.exact.rows import batch_size, leaf_rows, leaves_per_sample, static_rows
from matex_data.training.exact.variables import check_equal_weights, inner_optimizer, optimizers

if TYPE_CHECKING:
    from matex_data.training.distributed_model import DistributedModel

LATER = (1.5, 2.5)
"""Bounds of the steps before a check, in multiples of those before the latest one."""
END = 1.25
"""At the end of a fit, after which the result may be used, a check is due after so many times the steps before."""
FITS = 8
"""Calls of ``fit`` whose first batches are all checked; later ones are if their number is a power of two."""


class CheckSchedule:
    """Number of steps of a compiled model, and of those before its latest check.

    Checks before steps 1, 2, 3, and then before random ones, each after 1.5 to 2.5 times the steps before the latest
    one, cost less the longer a model trains: of the first 1,000 steps a dozen is checked. The random steps are the
    same on all ranks, and in each run.

    Attributes
    ----------
    checked : steps before the latest check; None: there was none.
    sums : losses that are one number for a batch count as sums.
    whole : the model trains on whole batches, since a check has failed.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.checked: int | None = None
        self.sums = self.whole = False
        self._fits = 0
        self._random = random.Random(0)
        self._next = 0

    def due(self, first_of_fit: bool = False, last_of_fit: bool = False) -> bool:
        """Return whether the next step has to be checked."""
        self._fits += first_of_fit
        if self.checked is None:
            return True
        if self.steps == self.checked and not first_of_fit:
            return False
        if first_of_fit and (self._fits <= FITS or self._fits & (self._fits - 1) == 0):
            return True
        factor = END if last_of_fit or first_of_fit else LATER[1]
        return self.steps >= min(self._next, max(1, factor * self.checked))

    def due_before(self, steps: int) -> bool:
        """Return whether one of the steps up to this number may be due by their number alone."""
        return self.checked is None or steps > min(self._next, max(1, LATER[1] * self.checked))

    def note_check(self) -> None:
        """Note that the next step is checked."""
        self.checked = self.steps
        self._next = self.steps + max(1, round(self._random.uniform(LATER[0] - 1, LATER[1] - 1) * self.steps))


Mode = Literal["always", "proven", "first", "never"]
"""Which steps are checked: of all models; of those that are not proven; their first ones; none."""


class SelfCheck:
    """Self-check of one distributed model under ``matex run``.

    Parameters
    ----------
    schedule : of the model, if it has trained before; with it, the data are this rank's rows, which pairs of ranks
        exchange.

    Attributes
    ----------
    gathers : the data are this rank's rows, which pairs of ranks exchange for a check.
    proof : whether sharding is proven to change nothing; None before the first step.
    """

    def __init__(
        self,
        distributed: DistributedModel,
        mode: Mode,
        report: CheckReport,
        schedule: CheckSchedule | None = None,
    ) -> None:
        self._distributed, self._mode, self._report = distributed, mode, report
        self._channel = distributed.channel
        self.gathers = schedule is not None
        self.schedule = schedule or CheckSchedule()
        self.proof: Proof | None = None
        self._spec: Any = None
        self._spec_of_shards: Any = None
        self._comparison = ShardComparison(distributed, distributed.step)
        self._traced = 0
        self._latest: Any = None

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
        position : ``first_of_fit`` and ``last_of_fit`` of the next step.
        """
        due = self.schedule.due(**position)
        if due and not self.gathers:
            return True  # the data are compared, also of models that need no check
        due |= self._distributed.watch.due
        return position.get("first_of_fit", False) or (self.active and (due or self._decides_anew()))

    def execute(
        self,
        run: Callable[..., Any],
        iterator: Any,
        spec: Any,
        position: dict[str, bool],
        of_root: Callable[[bool], Callable[[list[Any]], list[Any]] | None] = lambda due: None,
    ) -> Any:
        """Run an execution of steps, each after its check if one is due; return its logs. *Collective*.

        Of several steps, each is run by itself where one of them may be checked: a check needs the weights that the
        steps before have left.

        Parameters
        ----------
        run : train function of the model, see ``replace_function``.
        position : of the first of them, see ``due``.
        of_root : given whether a check is due, returns what replaces the batches; None: nothing does.
        """
        count, union = self._distributed.model.steps_per_execution, self.spec_of_union(spec) if self.gathers else spec
        due = self.due(**position)
        replace = of_root(due)
        if not (due or replace or (count > 1 and self._due_within(count))):
            self.schedule.steps += count
            return run(iterator)
        batches, iterator = taken(iterator, count, spec, *filter(None, [replace]))
        if batches and due:
            self.before_step(batches[0], union)
        if not batches or not self.active or count == 1:
            self.schedule.steps += count
            return run(iterator)
        for i, batch in enumerate(batches):
            if i and self.due():
                self.before_step(batch, union)
            logs = run(iterator, single=True)
            self.schedule.steps += 1
        return logs

    def _due_within(self, count: int) -> bool:
        """Return whether one of the next steps may have to be checked."""
        probe = self._comparison.probe
        decides = self._mode != "first" and probe is not None and probe.decisions.any_known
        return self.active and (decides or self.schedule.due_before(self.schedule.steps + count))

    def _decides_anew(self) -> bool:
        """Return whether the next step decides by variables in a way in which no checked step did."""
        probe = self._comparison.probe
        return self._mode != "first" and probe is not None and probe.decisions.new()

    def is_new(self, spec: Any) -> bool:
        """Return whether batches have another structure, or other shapes, than those before."""
        return f"{spec}" != f"{self._spec}"

    def before_step(self, batch: Any, spec: Any, call: str = "fit()") -> None:
        """Compare the ranks' data, prove the model, and check the step; train on whole batches if it fails.

        *Collective*.

        Parameters
        ----------
        batch : whole batch of the next step; of data that are this rank's rows, these.

        Raises
        ------
        PartitionError : on all ranks, if their batches differ.
        """
        if not self.gathers:
            first = self.schedule.checked is None
            check_same(self._channel, call if first else f"step {self.schedule.steps + 1} of {call}", batch)
        if self._distributed.step.whole or self._mode == "never":
            self.schedule.note_check()
            return
        if self.proof is None or self.is_new(spec) or self._distributed.step.traces > max(self._traced, 1):
            self._traced = self._distributed.step.traces
            self.proof, self._spec = self._prove(spec, batch), spec
            self._comparison.begin_anew()
        if self.active:
            with busy("its self-check"), kept_random_state():
                self._check(batch)
        self.schedule.note_check()
        self._latest = batch if self.active else None

    def of_shards(self, spec: Any) -> None:
        """Prove a model, or report that it is not: of batches that are sharded already, no rank has the union.

        *Collective* at first, and with another structure of batches.
        """
        if self._mode == "never" or (self.proof is not None and f"{self._spec_of_shards}" == f"{spec}"):
            return
        model = self._distributed.model
        proof = agreed_proof(self._channel, model, specs_of(spec))
        self.proof, self._spec = proof, spec
        self._spec_of_shards = spec
        if proof.proven:
            self._report.proven(model, self._exceptions(proof.draws))
        elif not self.gathers:
            self._report.unchecked(model, proof)

    def spec_of_union(self, spec: Any) -> Any:
        """Return the spec of the batches of all ranks; a known number of rows is the same on all of them."""
        flags = leaves_per_sample(spec)
        known = static_rows(spec, flags)
        return union_spec(spec, None if self._distributed.step.reducer or known is None else known * self._channel.size)

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
        self._latest = None

    def _prove(self, spec: Any, batch: Any) -> Proof:
        """Prove the model, and report it; the same result on all ranks. *Collective*.

        Parameters
        ----------
        batch : tells of leaves whose lengths the spec leaves open whether they have one row per sample.
        """
        model = self._distributed.model
        leaves, total = specs_of(spec), int(batch_size(batch))
        per_sample = [
            leaf is not None and (bool(tensor.shape.rank and leaf_rows(tensor) == total) if flag is None else flag)
            for leaf, tensor, flag in zip(leaves, tf.nest.flatten(batch), self._comparison.flags(spec), strict=True)
        ]
        proof = agreed_proof(self._channel, model, leaves, per_sample)
        if proof.proven and self._mode != "always":
            self._report.proven(model, self._exceptions(proof.draws))
        return proof

    def _exceptions(self, draws: bool) -> list[str]:
        """Return in which shards differ from the whole batch, as is known."""
        distributed = self._distributed
        scaled = any(inner_optimizer(optimizer) is not optimizer for optimizer in optimizers(distributed.model))
        scaled &= any(layer.compute_dtype == "float16" for layer in distributed.model._flatten_layers())
        local = distributed.normalizes_locally()
        return [DRAWS] * draws + [LOCAL_STATISTICS] * local + [LOSS_SCALE] * scaled

    def _check(self, batch: Any) -> None:
        """Check the next step; train on whole batches if it fails. *Collective*."""
        again = self.schedule.checked is not None
        assert self.proof is not None
        cause, verdict = self._comparison.compare(batch, self._spec, not again, self.gathers)
        sums, probe = self._comparison.sums, self._comparison.probe
        model = self._distributed.model
        if cause is not None or not verdict.agree:
            self._report.trains_whole(model, cause or verdict, self.schedule, self.proof)
        elif not again:
            notes = [rows_of_all(self._comparison.gathered)] * bool(self._comparison.gathered)
            notes += self._exceptions(bool(probe and probe.draws))
            self._report.agreed(model, verdict, self.proof, sums, notes, self._mode != "first")
        self.schedule.sums = sums or (again and self.schedule.sums)
        if cause is not None or not verdict.agree:
            self.schedule.whole = True
            self._distributed.train_on_whole(merge=bool(self.schedule.steps))
        else:
            self._distributed.watch.begin(probe.read if probe else [])
            if probe is not None:
                probe.decisions.note()
