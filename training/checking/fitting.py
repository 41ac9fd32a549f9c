"""Self-checks of ``fit`` and of evaluations, whose ranks have their own rows of each batch.

Pairs of ranks exchange those of the steps to check.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from matex_data.mpi.activity import busy
from matex_data.training.checking.batches import of_all_ranks, taken, union_spec
from matex_data.training.checking.check import CheckSchedule, Mode, SelfCheck
from matex_data.training.checking.report import CheckReport
from matex_data.training.checking.shards import ShardComparison
from matex_data.training.comm.channel import Channel
from matex_data.training.distributed_model import DistributedModel, replace_function
from matex_data.training.exact.attributes import kept_random_state
from matex_data.training.exact.listed import Proof, agreed_proof, specs_of, tensors_of
from matex_data.training.exact.variables import row_states


class FitCheck(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that checks the steps of ``fit``, and trains on whole batches if shards are no equal to them."""

    def __init__(self, distributed: DistributedModel, mode: Mode) -> None:
        super().__init__()
        self._distributed, self._checks = distributed, False
        schedule = None if _has_fixed_rows(distributed.model) else model_schedule(distributed.model)
        self.check = SelfCheck(distributed, mode, rank_report(distributed.channel), schedule)

    def begin(self, spec: Any) -> None:
        """Note that a call of ``fit`` begins, and the element spec of its batches."""
        self._spec = spec
        self._first_of_fit = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Look at the model, and check its steps from now on. *Collective*."""
        self.check.of_shards(self._spec)
        if self.check.schedule.whole and not self._distributed.step.whole:
            self._distributed.train_on_whole()
        if self.check.active and self.check.gathers and not self._checks:
            self._checks = True
            self._distributed.set_sum_losses(self.check.schedule.sums)
            replace_function(self._distributed.replacements, self._distributed.model, "train", self._checked)

    def on_train_end(self, logs: Any = None) -> None:
        """Check the model again if that is due. *Collective* then."""
        self.check.after_training()

    def _checked(self, run: Callable[..., Any], iterator: Any) -> Any:
        """Run an execution of steps, with the checks that are due. *Collective*."""
        first, self._first_of_fit = self._first_of_fit, False
        spec = iterator.element_spec  # with the weights of classes, which Keras adds to batches
        return self.check.execute(run, iterator, spec, {"first_of_fit": first})


def fit_check(distributed: DistributedModel, mode: Mode, spec: Any) -> FitCheck:
    """Return the callback that checks the steps of ``fit``: that of the calls before, whose traced steps it keeps."""
    if ("train", mode) not in distributed.checks:
        distributed.checks["train", mode] = FitCheck(distributed, mode)
    found: FitCheck = distributed.checks["train", mode]
    found.begin(spec)
    return found


@functools.cache
def rank_report(channel: Channel) -> CheckReport:
    """Return the messages of a channel of ranks."""
    return CheckReport(channel.rank, channel.size, 'verify="never"', tells_proven=False)


def _has_fixed_rows(model: Any) -> bool:
    """Return whether a model takes as many rows as this rank has, so that no rank can run it on all of a batch."""
    return bool(row_states(model)) or any(x.shape[0] is not None for x in tensors_of(model, "inputs") if x.shape)


def model_schedule(model: Any, kind: str = "train") -> CheckSchedule:
    """Return the schedule, "train" or "test", of a model as it is compiled, for this and later calls."""
    name = f"_matex_{kind}_schedule"
    compiled, schedule = vars(model).get(name, (None, None))
    if compiled is not model._loss_tracker:
        schedule = CheckSchedule()
        object.__setattr__(model, name, (model._loss_tracker, schedule))
    return schedule  # type: ignore[no-any-return]


class TestCheck:
    """Check of the evaluations of one model, which gathers whole batches from the first one that differs on."""

    __test__ = False  # no class of tests

    def __init__(self, distributed: DistributedModel, mode: Mode, report: CheckReport, schedule: CheckSchedule) -> None:
        self._distributed, self._mode, self._report, self._schedule = distributed, mode, report, schedule
        self._comparison = ShardComparison(distributed, distributed.test)
        self._proofs: dict[str, Proof] = {}
        self._compared: str = ""
        if distributed.channel.size > 1:
            replace_function(distributed.replacements, distributed.model, "test", self._checked)

    def begin(self) -> None:
        """Evaluate whole batches if a check has failed before."""
        if self._schedule.whole and self._mode != "never" and not self._distributed.test.whole:
            self._distributed.evaluate_whole()

    def _checked(self, run: Callable[[Any], Any], iterator: Any) -> Any:
        """Run an execution of steps, the first one of an evaluation after a check if one is due. *Collective* then."""
        test, executed = self._distributed.test, self._distributed.model.steps_per_execution
        if test.agrees:
            iterator = of_all_ranks(self._distributed.channel, iterator, executed)
        spec = iterator.element_spec
        begins, test.begins, test.running = test.begins, False, True
        if begins and not test.whole and self._mode != "never" and self._due(spec):
            batches, iterator = taken(iterator, executed, spec)
            if batches:
                with busy("its self-check"), kept_random_state():
                    self._check(batches[0], spec)
        return run(iterator)

    def _due(self, spec: Any) -> bool:
        """Return whether an evaluation that begins is checked: ever fewer of them, and each with other batches."""
        if f"{spec}" not in self._proofs:
            self._proofs[f"{spec}"] = self._prove(spec)
        if self._proofs[f"{spec}"].proven and self._mode != "always":
            return False
        due = self._schedule.due(first_of_fit=True) or f"{spec}" != self._compared
        return due and (self._mode != "first" or self._schedule.checked is None)

    def _prove(self, spec: Any) -> Proof:
        self._distributed.prepare_test(spec)
        return agreed_proof(self._distributed.channel, self._distributed.model, specs_of(spec), step="test_step")

    def _check(self, batch: Any, spec: Any) -> None:
        """Check the step; evaluate whole batches if it fails. *Collective*."""
        distributed, first = self._distributed, self._schedule.checked is None
        if f"{spec}" != self._compared:
            self._comparison.begin_anew()
        cause, verdict = self._comparison.compare(batch, union_spec(spec), first, gathers=True)
        own = [key for key, possible in distributed.test.possible.items() if not possible]
        own = [key for keys in distributed.channel.host.allgather_object(own) for key in keys]
        if cause is None and own:
            cause = f"its {own[0]} is no mean, sum, maximum or minimum over the samples"
        self._schedule.note_check()
        self._compared = f"{spec}"
        if cause is None and verdict.agree:
            if self._comparison.probe is not None and self._comparison.probe.draws:
                self._report.evaluates_shards(distributed.model)
            return
        self._schedule.whole = True
        self._report.evaluates_whole(distributed.model, cause or verdict, self._proofs[f"{spec}"], first)
        distributed.evaluate_whole()


def begin_test_check(distributed: DistributedModel, mode: Mode) -> None:
    """Check evaluations that begin, as those before."""
    if ("test", mode) not in distributed.checks:
        schedule = model_schedule(distributed.model, "test")
        distributed.checks["test", mode] = TestCheck(distributed, mode, rank_report(distributed.channel), schedule)
    distributed.checks["test", mode].begin()
