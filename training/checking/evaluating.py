"""Self-check of evaluation: its first batch on shards and as a whole, since it may differ from the step of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from matex_data.mpi.activity import busy
from matex_data.training.checking.batches import taken, union_spec
from matex_data.training.checking.check import Schedule
from matex_data.training.checking.forward import agreed_proof, specs_of
from matex_data.training.checking.report import Report
from matex_data.training.checking.shards import ShardComparison
from matex_data.training.exact.attributes import kept_random_state
from matex_data.training.exact.listed import Proof

if TYPE_CHECKING:
    from matex_data.training.checking.check import Mode
    from matex_data.training.distributed_model import DistributedModel


class TestCheck:
    """Check of the evaluations of one model, which gathers whole batches from the first one that differs on.

    Parameters
    ----------
    distributed : the model.
    mode : which evaluations are checked.
    report : messages of all models.
    schedule : of the evaluations of the model as it is compiled.
    """

    __test__ = False  # no class of tests

    def __init__(self, distributed: DistributedModel, mode: Mode, report: Report, schedule: Schedule) -> None:
        self._distributed, self._mode, self._report, self._schedule = distributed, mode, report, schedule
        self._comparison = ShardComparison(distributed, distributed.test)
        self._proofs: dict[str, Proof] = {}
        self._compared: str = ""
        if distributed.channel.size > 1:
            distributed.replace_function("test", self._checked)
            if schedule.whole and mode != "never":
                distributed.evaluate_whole()

    def _checked(self, run: Callable[[Any], Any], iterator: Any) -> Any:
        """Run an execution of steps, the first one of an evaluation after a check if one is due. *Collective* then.

        Parameters
        ----------
        run : the test function of the model, as it is when this is called.
        """
        test, spec = self._distributed.test, iterator.element_spec
        begins, test.begins, test.running = test.begins, False, True
        if begins and not test.whole and self._mode != "never" and self._due(spec):
            batches, iterator = taken(iterator, self._distributed.model.steps_per_execution, spec)
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
        if not self._distributed.test.lockstep:
            self._report.unchecked_evaluation(self._distributed.model, self._proofs[f"{spec}"])
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
            return
        self._schedule.whole = True
        self._report.evaluates_whole(distributed.model, cause or verdict, self._proofs[f"{spec}"], first)
        distributed.evaluate_whole()
