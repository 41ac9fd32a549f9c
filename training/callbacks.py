"""Callbacks on several ranks: files and progress on rank 0 alone, equal decisions on all ranks."""

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
from matex_data.mpi.activity import busy
from matex_data.mpi.communicator import Equal
from matex_data.timeline import timeline
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.world import running_alone
from matex_data.training.distributed_model import DistributedModel
from matex_data.training.exact.variables import learning_rate
from matex_data.training.model_parallel.stages.model import StagedModel
from matex_data.training.progress import ThroughputBar
from matex_data.training.saving import saving_on_all

WRITERS = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.TensorBoard,
    keras.callbacks.CSVLogger,
    keras.callbacks.RemoteMonitor,
)
"""Callbacks that write files or send reports; they run on rank 0 alone."""
TrainedModel = DistributedModel | StagedModel
"""Model that all ranks train."""
_PATHS = ("filepath", "backup_dir", "filename")
"""Attributes of these callbacks that hold files and folders, from which a script may read."""
_BATCH_ENDS = ("on_batch_end", "on_train_batch_end")
_TEST_END = "on_test_batch_end"
_BATCH_HOOKS = ("on_batch_begin", "on_train_batch_begin", *_BATCH_ENDS)

_HOOKS = [name for name in dir(keras.callbacks.Callback) if name.startswith("on_")]
_FAILURES = "_matex_failures"
"""Attribute of a callback that runs on rank 0 alone, during a fit: the list of what its hooks raise."""


def rank_callbacks(
    distributed: TrainedModel,
    user_callbacks: list[Any],
    element_spec: Any,
    stack: contextlib.ExitStack,
    trailing: Sequence[Any] = (),
    shard_optimizer: bool = False,
) -> list[Any]:
    """Return the user's callbacks that run on this rank, and those that synchronize the ranks. *Collective*.

    Parameters
    ----------
    element_spec : element spec of the training data; or a function that returns, once training has begun, the spec
        and whether batches are whole on every rank.
    stack : closed when training ends, as it does within a callback that raises; this rank is busy until then.
    trailing : callbacks that run after all others.
    shard_optimizer : the state of the optimizer is cut over the ranks.
    """
    channel = distributed.world
    cut = channel is not distributed.channel or (shard_optimizer and channel.size > 1)
    failures: list[Exception] = []
    share = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: distributed.broadcast())
    selected = _select(channel, user_callbacks, failures, share) if channel.size > 1 else list(user_callbacks)
    gather = distributed.gather_weights if isinstance(distributed, StagedModel) else None
    if cut or gather is not None:
        channel.communicator.agreed(lambda: _check_backups(user_callbacks))
    if cut:
        selected = _saved_on_all(distributed, user_callbacks, selected)
    if channel.size > 1:
        writers = [callback for callback in user_callbacks if isinstance(callback, WRITERS)]
        writes = any(type(callback) not in WRITERS for callback in writers)
        in_batches = _has_batch_hooks(selected) or any(map(_writes_in_batches, selected))
        hooks = in_batches, any(map(_reads_batch_logs, selected)), any(map(_reads_test_logs, selected))
        agreed = channel.communicator.maximum(*hooks, writes, bool(writers))
        batch_hooks, trained, evaluated, changed, may_fail = map(bool, agreed)
        selected[:0] = _batch_logs(distributed, trained, evaluated)
        restored = any(getattr(callback, "restores", False) for callback in trailing)
        selected.append(Synchronization(distributed, batch_hooks, restored, changed, failures if may_fail else None))
    if channel.size > 1 or trailing:
        given = element_spec if callable(element_spec) else lambda: (element_spec,)
        create = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: distributed.prepare(*given()))
        selected.insert(0, create)
    selected += trailing
    if timeline.enabled:
        selected.insert(0, StepSpans())
    if channel.rank == 0 and not any(
        isinstance(callback, keras.callbacks.ProgbarLogger) for callback in user_callbacks
    ):
        selected.append(ThroughputBar(lambda: int(distributed.samples_seen.numpy())))
    if channel.size > 1:
        batch_hooks = _has_batch_hooks(user_callbacks, writers=True)
        report = ActivityReport(stack, True, batch_hooks), ActivityReport(stack, False, batch_hooks)
        selected = [report[0], *selected, report[1]]
    if gather is not None:  # callbacks may read the weights
        in_epochs = any(map(_reads_weights_of_batches, user_callbacks))
        after_epochs, in_epochs = map(bool, channel.communicator.maximum(bool(user_callbacks), in_epochs))
        of_batch = {"on_train_batch_end": lambda batch, logs: gather()} if in_epochs else {}
        of_epoch = {"on_epoch_end": lambda epoch, logs: gather(), "on_train_end": lambda logs: gather()}
        if after_epochs:
            selected.insert(0, keras.callbacks.LambdaCallback(**of_epoch, **of_batch))
    return selected


def _batch_logs(distributed: TrainedModel, trained: bool, evaluated: bool) -> list[Any]:
    return [BatchLogs(distributed, trained, evaluated)] if trained or evaluated else []


def evaluation_callbacks(distributed: TrainedModel, callbacks: Any) -> Any:
    """Return the callbacks of ``evaluate`` on this rank, which read logs of all ranks. *Collective*.

    A ``CallbackList`` stays as it is.
    """
    own = isinstance(callbacks, keras.callbacks.CallbackList)
    given = [] if callbacks is None or own else keras.tree.flatten(callbacks)
    given = _select(distributed.world, given) if distributed.world.size > 1 else given
    (reads,) = distributed.world.communicator.maximum(any(map(_reads_test_logs, given)))
    return callbacks if own else [*_batch_logs(distributed, False, bool(reads)), *given]


def _select(
    channel: Channel, user_callbacks: list[Any], failures: list[Exception] | None = None, share: Any = None
) -> list[Any]:
    """Return the callbacks that run on this rank. *Collective*.

    Callbacks that write files run on rank 0 alone, which alone may have them, unless each rank gives a temporary folder
    of its own, from which its script may read.

    Parameters
    ----------
    failures : gets what their hooks raise, which all ranks then raise; None: they raise it on this rank.
    share : callback after each that restores a backup, so that those behind it find its weights on all ranks.
    """
    writers = [callback for callback in user_callbacks if isinstance(callback, WRITERS)]
    by_rank = channel.host.allgather_object([_temporary(callback) for callback in writers])
    here = {id(callback) for callback in writers if channel.rank == 0}
    alike = len({len(paths) for paths in by_rank}) == 1
    for callback, paths in zip(writers, zip(*by_rank, strict=True), strict=True) if alike else ():
        if paths[0] is not None and len(set(paths)) > 1:
            here.add(id(callback))
    for callback in writers:
        if id(callback) in here:
            _run_alone(callback, failures)
    selected = []
    for callback in user_callbacks:
        if not isinstance(callback, WRITERS) or id(callback) in here:
            selected.append(callback)
        if alike and share is not None and isinstance(callback, keras.callbacks.BackupAndRestore):
            selected.append(share)
    return selected


def _check_backups(user_callbacks: list[Any]) -> None:
    """Raise ``PartitionError`` if a callback saves the model in a way of its own."""
    if any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in user_callbacks):
        raise PartitionError(
            "BackupAndRestore saves the weights and the optimizer's state of one rank, which are parts of the whole",
            expected="fit(checkpoint=folder), which saves the state of all ranks",
            found="BackupAndRestore among the callbacks",
            remedy="give checkpoint= in place of this callback",
        )


def _saved_on_all(distributed: TrainedModel, user_callbacks: list[Any], selected: list[Any]) -> list[Any]:
    """Return the callbacks with those that save the model on every rank, since each has a part of it. *Collective*."""
    savers = [c for c in user_callbacks if isinstance(c, keras.callbacks.ModelCheckpoint)]
    paths = {"ModelCheckpoint": [str(callback.filepath) for callback in savers]}
    problem = "each rank has a part of what ModelCheckpoint saves, and the ranks have other ones"
    remedy = "give ModelCheckpoint on every rank, with the same path, which rank 0 writes; tempfile.mkdtemp() makes "
    remedy += "another folder on each rank: name one of your own, such as 'checkpoints'"
    distributed.world.communicator.agree(equal=Equal(paths, problem, remedy))
    for callback in savers:
        vars(callback).pop("set_model", None)
        for name in _HOOKS:
            vars(callback).pop(name, None)  # not alone
            hook = getattr(type(callback), name)
            if hook is not getattr(keras.callbacks.Callback, name):
                setattr(callback, name, _on_all_ranks(functools.partial(hook, callback), distributed))
    here = {id(callback) for callback in [*selected, *savers]}
    return [callback for callback in user_callbacks if id(callback) in here]


def _on_all_ranks(hook: Callable[..., Any], distributed: TrainedModel) -> Callable[..., Any]:
    def called_on_all_ranks(*args: Any, **kwargs: Any) -> Any:
        with saving_on_all(distributed.model, distributed.world.user):
            return hook(*args, **kwargs)

    return called_on_all_ranks


def _temporary(callback: Any) -> str | None:
    """Return the path that a callback writes to, if it is in the folder for temporary files."""
    found = [vars(callback).get(name) for name in _PATHS]
    paths = [Path(path).absolute() for path in found if path and isinstance(path, str | os.PathLike)]
    folder = Path(tempfile.gettempdir()).absolute()
    return next((str(path) for path in paths if folder in path.parents), None)


def _run_alone(callback: Any, failures: list[Exception] | None) -> None:
    """Wrap the hooks that the class of a callback defines in ``running_alone``; Keras calls no others."""
    if failures is not None:
        vars(callback)[_FAILURES] = failures
    for name in (*_HOOKS, "set_model"):
        hook = getattr(callback, name)
        if getattr(type(callback), name) is not getattr(keras.callbacks.Callback, name) and name not in vars(callback):
            setattr(callback, name, functools.wraps(hook)(functools.partial(_call_alone, callback, name, hook)))


def _call_alone(callback: Any, name: str, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    failures = vars(callback).get(_FAILURES)
    if failures:  # all ranks are about to raise it
        return
    with running_alone():
        try:
            hook(*args, **kwargs)
        except Exception as error:
            if failures is None:
                raise
            failures.append(error)  # ranks without agreement after each batch agree after the first one and the epoch


def release(callbacks: Sequence[Any]) -> None:
    """Let callbacks raise errors of their hooks, which stay wrapped, where they occur, and call no other ranks.

    A fit has ended.
    """
    for callback in callbacks:
        vars(callback).pop(_FAILURES, None)
        for name in _HOOKS:
            if getattr(vars(callback).get(name), "__name__", "") == "called_on_all_ranks":
                vars(callback).pop(name)


def _has_batch_hooks(callbacks: Sequence[Any], writers: bool = False) -> bool:
    """Return whether a callback has hooks for batches, which may stop training or change the learning rate.

    Callbacks that write files do neither, and do not count unless ``writers`` is set.
    """
    ignored = (keras.callbacks.ProgbarLogger, *(() if writers else WRITERS))
    return any(_has_hooks(callback, _BATCH_HOOKS) for callback in callbacks if not isinstance(callback, ignored))


def _reads_batch_logs(callback: Any) -> bool:
    """Return whether a callback may act on the logs of single batches, or write them to a file."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_freq != "epoch" and callback.save_best_only)
    if isinstance(callback, keras.callbacks.TensorBoard):
        return bool(callback.update_freq != "epoch")
    return _has_hooks(callback, _BATCH_ENDS) and not isinstance(
        callback, keras.callbacks.ProgbarLogger | keras.callbacks.BackupAndRestore
    )


def _writes_in_batches(callback: Any) -> bool:
    """Return whether a callback may write files in the hooks of single batches, and so fail there."""
    if type(callback) in WRITERS:
        return any(vars(callback).get(name, "epoch") != "epoch" for name in ("save_freq", "update_freq"))
    return isinstance(callback, WRITERS) and _has_hooks(callback, _BATCH_HOOKS)


def _reads_test_logs(callback: Any) -> bool:
    """Return whether a callback may act on the logs of single batches of evaluations."""
    return _has_hooks(callback, (_TEST_END,)) and not isinstance(callback, keras.callbacks.ProgbarLogger)


def _has_hooks(callback: Any, names: Sequence[str]) -> bool:
    """Return whether a callback has a hook of its own of one of these names."""
    base = keras.callbacks.Callback
    return any(name in vars(callback) or getattr(type(callback), name) is not getattr(base, name) for name in names)


def _reads_weights_of_batches(callback: Any) -> bool:
    if type(callback).__module__.startswith("keras.") and not isinstance(callback, keras.callbacks.LambdaCallback):
        return isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch"
    return _has_hooks(callback, _BATCH_HOOKS)


class StepSpans(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that records steps in the timeline; each ends when Keras has its logs."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Record the time."""
        self._begin = time.time()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the step."""
        timeline.add(f"step {batch}", "step", self._begin)


class BatchLogs(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that gives the logs of the global batch to the callbacks after it; there is one if any reads them.

    Parameters
    ----------
    trained : some read those of batches of training.
    evaluated : some read those of batches of evaluations.
    """

    def __init__(self, distributed: TrainedModel, trained: bool, evaluated: bool) -> None:
        super().__init__()
        self._distributed = distributed
        if trained:
            self.on_train_batch_end = functools.partial(self._combine, evaluated=False)
        if evaluated:
            self.on_test_batch_end = functools.partial(self._combine, evaluated=True)

    def _combine(self, batch: int, logs: Any = None, *, evaluated: bool) -> None:
        """Combine the logs of the ranks. *Collective*."""
        combined = self._distributed.batch_logs(dict(logs or {}), evaluated)
        if logs is not None:
            combined = {key: combined[key] for key in logs if key in combined} | combined  # in the order of Keras
            logs.clear()
            logs.update({key: float(value) if np.ndim(value) == 0 else value for key, value in combined.items()})


class ActivityReport(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that reports to waiting ranks that this one runs callbacks; one precedes them, another follows.

    Parameters
    ----------
    stack : exit stack of the pair.
    begins : True for the first of the pair.
    batch_hooks : report around the hooks of batches, too.
    """

    async_safe = True

    def __init__(self, stack: contextlib.ExitStack, begins: bool, batch_hooks: bool) -> None:
        super().__init__()
        self._stack, self._begins = stack, begins
        if batch_hooks:
            self.on_train_batch_begin = self.on_train_batch_end = self._report

    def _report(self, *_: Any, **__: Any) -> None:
        self._stack.close()  # an earlier callback may have raised an exception
        if self._begins:
            self._stack.enter_context(busy("its callbacks"))

    on_train_begin = on_train_end = on_epoch_begin = on_epoch_end = on_test_begin = on_test_end = _report


class Synchronization(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that synchronizes the learning rate of rank 0 and stops all ranks with any of them.

    It runs after the callbacks of the user.

    Parameters
    ----------
    distributed : model that the ranks train; they agree about changes between its steps.
    batch_hooks : synchronize after each batch, too.
    restored : a checkpoint is about to set all variables.
    changed : callbacks on rank 0 alone may change variables.
    failures : what callbacks on one rank alone have raised, which all ranks raise; None: there are none on any rank.
    """

    def __init__(
        self,
        distributed: TrainedModel,
        batch_hooks: bool,
        restored: bool,
        changed: bool,
        failures: list[Exception] | None,
    ) -> None:
        super().__init__()
        if batch_hooks:
            self.on_train_batch_end = lambda batch, logs: self._synchronize(of_batch=True)
        elif failures is not None:  # TensorBoard writes the graph after the first batch
            self.on_train_batch_end = self._after_first_batch
        self._distributed, self._after_first = distributed, False
        self._channel = distributed.world
        self._watch = distributed.watch
        self._restored, self._changed, self._failures = restored, changed, failures

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast epoch and variables of rank 0, which may have restored a backup. *Collective*."""
        self._raise_failure()
        self.model._initial_epoch = self._channel.communicator.broadcast(self.model._initial_epoch)
        if not self._restored:
            self._distributed.broadcast()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Synchronize the learning rate. *Collective*."""
        self._raise_failure()
        self._synchronize()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Synchronize the learning rate and the stop flag. *Collective*."""
        self._raise_failure()
        self._synchronize()
        self._broadcast()

    def on_train_end(self, logs: Any = None) -> None:
        """Broadcast the variables that a callback of rank 0 may have changed. *Collective* if there is one."""
        self._raise_failure()
        self._broadcast()

    def _after_first_batch(self, batch: int, logs: Any = None) -> None:
        if not self._after_first:
            self._after_first = True
            self._raise_failure()

    def _raise_failure(self) -> None:
        """Raise on all ranks what a callback has raised on one of them alone. *Collective* if there are such ones."""
        if self._failures is not None:
            own = self._failures[0] if self._failures else None
            try:
                self._channel.communicator.agree(own)
            except Exception as error:
                first = own or error
                raise first from first.__cause__

    def _broadcast(self) -> None:
        if self._changed:
            self._distributed.broadcast()

    def _synchronize(self, of_batch: bool = False) -> None:
        """Exchange learning rate, stop flag, changes and failures in one message: this may run after every batch."""
        rate = learning_rate(self.model.optimizer)
        local = 0.0 if rate is None else float(rate.numpy())
        own_rate = local if self._channel.rank == 0 else 0.0
        shared = np.array(
            [bool(self.model.stop_training), own_rate, self._watch.changed(small=of_batch), bool(self._failures)]
        )
        self._channel.host.reduce(shared)
        self._watch.due |= bool(shared[2])
        if shared[3]:
            self._raise_failure()
        if shared[0]:
            self.model.stop_training = True
        if local != shared[1]:
            rate.assign(shared[1])
