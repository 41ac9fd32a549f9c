"""Self-check of ``fit``, whose ranks have their own rows of each batch: pairs exchange those of the steps to check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras

from matex_data.training.checking.batches import taken
from matex_data.training.checking.check import Mode, Schedule, SelfCheck
from matex_data.training.checking.report import Report
from matex_data.training.comm.channel import Channel
from matex_data.training.distributed_model import DistributedModel
from matex_data.training.exact.listed import tensors_of
from matex_data.training.exact.variables import row_states


class FitCheck(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that checks the steps of ``fit``, and trains on whole batches if shards are no equal to them.

    Parameters
    ----------
    distributed : model that ``fit`` trains.
    mode : which steps are checked.
    spec : element spec of this rank's batches.
    """

    def __init__(self, distributed: DistributedModel, mode: Mode, spec: Any) -> None:
        super().__init__()
        self._distributed, self._spec = distributed, spec
        schedule = None if _has_fixed_rows(distributed.model) else model_schedule(distributed.model)
        self.check = SelfCheck(distributed, mode, rank_report(distributed.channel), schedule)
        self._first_of_fit = self._first_of_epoch = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Look at the model, and check its steps from now on. *Collective*."""
        self.check.of_shards(self._spec)
        if self.check.schedule.whole:
            self._distributed.train_on_whole()
        if self.check.active and self.check.gathers:
            self._distributed.set_sum_losses(self.check.schedule.sums)
            self._distributed.replace_function("train", self._checked)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note that the next step is the first of an epoch."""
        self._first_of_epoch = True

    def on_train_end(self, logs: Any = None) -> None:
        """Check the model again if that is due. *Collective* then."""
        self.check.after_training()

    def _checked(self, run: Callable[[Any], Any], iterator: Any) -> Any:
        """Run an execution of steps, after the check of its first batch if one is due. *Collective*.

        Parameters
        ----------
        run : the train function of the model, as it is when this is called.
        """
        schedule, executed = self.check.schedule, self.model.steps_per_execution
        due = self.check.due(first_of_fit=self._first_of_fit, first_of_epoch=self._first_of_epoch)
        self._first_of_fit = self._first_of_epoch = False
        if self.check.active and due:
            batches, iterator = taken(iterator, executed, self._spec)
            if batches:
                self.check.before_step(batches[0], self.check.spec_of_union(self._spec))
        schedule.steps += executed
        return run(iterator)


@functools.cache
def rank_report(channel: Channel) -> Report:
    """Return the messages of a channel of ranks."""
    return Report(channel.rank, channel.size, 'verify="never"', tells_proven=False)


def _has_fixed_rows(model: Any) -> bool:
    """Return whether a model takes as many rows as this rank has, so that no rank can run it on all of a batch."""
    return bool(row_states(model)) or any(x.shape[0] is not None for x in tensors_of(model, "inputs") if x.shape)


def model_schedule(model: Any, kind: str = "train") -> Schedule:
    """Return the schedule of a model as it is compiled, which goes on in its next ``fit`` or evaluation.

    Parameters
    ----------
    kind : "train" or "test".
    """
    name = f"_matex_{kind}_schedule"
    compiled, schedule = vars(model).get(name, (None, None))
    if compiled is not model._loss_tracker:
        schedule = Schedule()
        object.__setattr__(model, name, (model._loss_tracker, schedule))
    return schedule  # type: ignore[no-any-return]
