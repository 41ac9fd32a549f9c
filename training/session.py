"""Session: one call of ``fit`` on all ranks, of this package, of a script, or in stages."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from matex_data.training.callbacks import TrainedModel, rank_callbacks, release
from matex_data.training.model_parallel.stages.model import StagedModel
from matex_data.training.restart.checkpoint import ModelState
from matex_data.training.restart.preemption import stopping_on_request
from matex_data.training.restart.resume import TrainingRun
from matex_data.training.restart.unsaved import UnsavedVariables
from matex_data.training.zero.optimizer import check_callbacks


class Session:
    """Call of ``fit``: a model that all ranks train, with its callbacks and its checkpoint. *Collective*.

    Parameters
    ----------
    options : arguments of Keras's ``fit``.
    run : its checkpoint; None without.
    shard_optimizer : the state of the optimizer is cut over the ranks.
    """

    def __init__(
        self, distributed: TrainedModel, options: dict[str, Any], run: TrainingRun | None, shard_optimizer: bool
    ) -> None:
        self._distributed, self._options, self._run, self._shard_optimizer = distributed, options, run, shard_optimizer
        callbacks = options.get("callbacks")
        self._busy = contextlib.ExitStack()  # in which this rank reports its callbacks
        self._callbacks: list[Any] = [] if callbacks is None else keras.tree.flatten(callbacks)
        if shard_optimizer:
            check_callbacks(self._callbacks)

    def begin(self, spec: Any, *trailing: Any) -> None:
        """Set callbacks, epochs and progress of this rank among the options. *Collective*."""
        run, options, model = self._run, self._options, self._distributed.model
        before: list[Any] = []
        after: list[Any] = []
        if run is not None:
            options["epochs"] = run.last_epoch(self._callbacks, options.get("epochs", 1))
            options["initial_epoch"] = max(options.get("initial_epoch") or 0, run.start.epoch)
            channels = self._distributed.channel, self._distributed.world
            state: Callable[[], ModelState] = functools.partial(ModelState, model, *channels)
            if isinstance(self._distributed, StagedModel):
                state = self._distributed.state
            before, after = run.callbacks(self._callbacks, state)
            if before and channels[0] is channels[1] and channels[0].rank == 0 and not self._shard_optimizer:
                before.append(UnsavedVariables())  # parts of variables, which steps read elsewhere, are saved
        trailing = (*trailing, *after)
        made = rank_callbacks(self._distributed, self._callbacks, spec, self._busy, trailing, self._shard_optimizer)
        options["callbacks"] = [*before, *made]
        if self._distributed.world.rank > 0:
            options["verbose"] = 0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager of the training: signals request this process to save and end, if there is a checkpoint."""
        saves = self._run is not None and self._run.folder is not None
        with stopping_on_request() if saves else contextlib.nullcontext(), self._busy:
            try:
                yield
            finally:
                release(self._callbacks)
