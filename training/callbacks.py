"""Callbacks on many ranks: files and progress on rank 0 alone, decisions taken together."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from matex_data.errors import PartitionError
from matex_data.io.counters import process_profile
from matex_data.mpi import deadlines
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.world import running_alone
from matex_data.training.steps.build import replicated_variables
from matex_data.training.steps.distributed_model import DistributedModel
from matex_data.training.steps.variables import broadcast_in

WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)
"""These write files or send reports: rank 0 does it for all."""
_PATHS = ("filepath", "backup_dir", "filename")
"""Attributes of these callbacks: files and folders that a script may read from."""
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")

_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]


def rank_callbacks(
    distributed: DistributedModel, user_callbacks: list[Any], element_spec: Any, trailing: Sequence[Any] = ()
) -> list[Any]:
    """The user's callbacks that run on this rank, between those that keep the ranks together. *Collective*.

    Parameters
    ----------
    element_spec : of the data; or a function that gives it once training begins, and whether batches are whole ones.
    last : callbacks that come after all others.
    """
    channel = distributed.channel
    selected = _of_this_rank(channel, user_callbacks) if channel.size > 1 else list(user_callbacks)
    if channel.size > 1:
        each_batch = any(channel.host.allgather_object(_watches_batches(selected)))
        restored = any(getattr(callback, "restores", False) for callback in trailing)
        changed = any(isinstance(callback, WRITERS) and type(callback) not in WRITERS for callback in user_callbacks)
        selected.append((BatchSynchronization if each_batch else EpochSynchronization)(channel, restored, changed))
    if channel.size > 1 or trailing:
        selected.insert(0, InitialBroadcast(distributed, element_spec))
    selected += trailing
    if channel.rank == 0 and not any(
        isinstance(callback, keras.callbacks.ProgbarLogger) for callback in user_callbacks
    ):
        selected.append(ThroughputBar(lambda: int(distributed.step.samples_seen.numpy()) * channel.size))
    if channel.size > 1:
        kind = BatchActivityReport if _watches_batches(user_callbacks, writers=True) else ActivityReport
        stack = contextlib.ExitStack()
        selected = [kind(stack, begins=True), *selected, kind(stack, begins=False)]
    return selected


def _of_this_rank(channel: Channel, user_callbacks: list[Any]) -> list[Any]:
    """Return the callbacks that run on this rank. *Collective*.

    Those that write files run on rank 0 alone; on other ranks, too, if they write to temporary folders of their own,
    from which their programs may read.
    """
    writers = [callback for callback in user_callbacks if isinstance(callback, WRITERS)]
    if not writers:
        return list(user_callbacks)
    everyone = channel.host.allgather_object([_temporary(callback) for callback in writers])
    here = {id(callback) for callback in writers if channel.rank == 0}
    for callback, paths in zip(writers, zip(*everyone, strict=True), strict=True):
        if paths[0] is None or len(set(paths)) == 1:
            continue
        here.add(id(callback))
        if getattr(callback, "save_best_only", False) and getattr(callback, "save_freq", "epoch") != "epoch":
            raise PartitionError(
                f"{type(callback).__name__} finds the best batch in what each rank sees, and each saves another",
                expected="a path that is the same on all ranks",
                found=f"{paths[0]!r} on rank 0",
                remedy="give a folder that all ranks share, not one of tempfile, or save_freq='epoch'",
            )
    for callback in writers:
        if id(callback) in here:
            _run_alone(callback)
    return [callback for callback in user_callbacks if not isinstance(callback, WRITERS) or id(callback) in here]


def _temporary(callback: Any) -> str | None:
    """Return where a callback writes, if that is in the folder for temporary files."""
    found = [vars(callback).get(name) for name in _PATHS]
    paths = [Path(path).absolute() for path in found if path and isinstance(path, str | os.PathLike)]
    folder = Path(tempfile.gettempdir()).absolute()
    return next((str(path) for path in paths if folder in path.parents), None)


def _run_alone(callback: Any) -> None:
    """Let the hooks of a callback be those of one rank: those that its class has, so that Keras calls no others."""
    for name in _HOOKS:
        hook = getattr(callback, name)
        if getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name) and name not in vars(callback):
            setattr(callback, name, functools.wraps(hook)(running_alone()(hook)))


def _watches_batches(callbacks: Sequence[Any], writers: bool = False) -> bool:
    """Whether a callback does something after each batch, which may stop this rank or change its learning rate.

    Parameters
    ----------
    writers : callbacks that write files count, too; they do neither.
    """
    ignored = (keras.callbacks.ProgbarLogger, *(() if writers else WRITERS))
    return any(
        name in vars(callback) or getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name)
        for callback in callbacks
        if not isinstance(callback, ignored)
        for name in _BATCH_HOOKS
    )


class ActivityReport(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Tell ranks that wait for this one that it runs callbacks: one comes before all of them, another after.

    Parameters
    ----------
    stack : of both.
    begins : whether this one comes first.
    """

    async_safe = True

    def __init__(self, stack: contextlib.ExitStack, begins: bool) -> None:
        super().__init__()
        self._stack, self._begins = stack, begins

    def _report(self, *_: Any, **__: Any) -> None:
        self._stack.close()  # also after a callback that has raised an exception
        if self._begins:
            self._stack.enter_context(deadlines.busy("its callbacks"))

    on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = on_test_begin = on_test_end = _report


class BatchActivityReport(ActivityReport):
    """Like ``Busy``, after every batch, too, where a callback may run then."""

    on_train_batch_begin = on_train_batch_end = ActivityReport._report


class InitialBroadcast(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Make the model's variables and take those of rank 0, before any other callback looks at them. Comes first."""

    def __init__(self, distributed: DistributedModel, element_spec: Any) -> None:
        super().__init__()
        self._distributed = distributed
        self._element_spec = element_spec

    def on_train_begin(self, logs: Any = None) -> None:
        """*Collective*."""
        if callable(self._element_spec):
            self._distributed.prepare(*self._element_spec())
        else:
            self._distributed.prepare(self._element_spec)


class EpochSynchronization(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Start alike, and agree with rank 0 on the learning rate and with any rank on stopping. Comes last.

    Parameters
    ----------
    restored : a checkpoint is about to set all variables.
    changed : callbacks of rank 0 alone may change variables.
    """

    def __init__(self, channel: Channel, restored: bool = False, changed: bool = False) -> None:
        super().__init__()
        self._channel = channel
        self._restored = restored
        self._changed = changed

    def on_train_begin(self, logs: Any = None) -> None:
        """Take over what rank 0 has, which may be a restored backup. *Collective*."""
        self.model._initial_epoch = self._channel.host.allgather_object(self.model._initial_epoch)[0]
        if not self._restored:
            broadcast_in(self._channel, replicated_variables(self.model))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """One learning rate. *Collective*."""
        self._synchronize()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """All stop or none. *Collective*."""
        self._synchronize()
        self._broadcast()

    def on_train_end(self, logs: Any = None) -> None:
        """Take over what a callback of rank 0 has set. *Collective* if there may be one."""
        self._broadcast()

    def _broadcast(self) -> None:
        if self._changed:
            broadcast_in(self._channel, replicated_variables(self.model))

    def _synchronize(self) -> None:
        """One message for both, since it may be sent after every batch."""
        optimizer = self.model.optimizer
        rate: Any = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
        settable = isinstance(rate, keras.Variable)
        local = (bool(self.model.stop_training), float(rate.numpy()) if settable else 0.0)
        everyone = self._channel.host.allgather_object(local)
        self.model.stop_training = any(stop for stop, _ in everyone)
        if local[1] != everyone[0][1]:
            rate.assign(everyone[0][1])


class BatchSynchronization(EpochSynchronization):
    """The same after every batch, where a callback of the user may act then."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """All stop or none. *Collective*."""
        self._synchronize()


class ThroughputBar(keras.callbacks.ProgbarLogger):  # type: ignore[misc]  # Keras has no types
    """Keras's progress bar with the samples per second of all ranks together, and how long rank 0 waited for data.

    Parameters
    ----------
    seen : samples of all ranks since training began (exact after an epoch, an estimate within).
    """

    async_safe = True

    def __init__(self, samples_seen: Callable[[], int]) -> None:
        super().__init__()
        self._samples_seen = samples_seen
        self._first = 0
        self._start = 0.0
        self._paused = 0.0
        self._waited = 0.0
        self._waiting_fraction = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Start the clock."""
        super().on_epoch_begin(epoch, logs)
        self._first, self._start, self._paused = self._samples_seen(), time.monotonic(), 0.0
        self._waited = process_profile().waiting

    def on_test_begin(self, logs: Any = None) -> None:
        """Stop the clock: validation is no training."""
        super().on_test_begin(logs)
        self._paused = self._paused or time.monotonic()

    def _speed(self) -> dict[str, Any]:
        """Since the epoch began, without validation."""
        now = self._paused or time.monotonic()
        seconds = max(now - self._start, 1e-9)
        if not self._paused:
            self._waiting_fraction = (process_profile().waiting - self._waited) / seconds
        rate = (self._samples_seen() - self._first) / seconds
        return {"samples/s": np.round(rate), "waiting for data %": np.round(100 * self._waiting_fraction)}

    def _update_progbar(self, batch: int, logs: Any = None) -> None:
        super()._update_progbar(batch, {**(logs or {}), **self._speed()} if self.verbose else logs)

    def _finalize_progbar(self, logs: Any) -> None:
        super()._finalize_progbar({**(logs or {}), **self._speed()})
