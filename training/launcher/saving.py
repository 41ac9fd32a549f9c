"""Saved models and checkpoints of scripts: rank 0 writes them, the other ranks wait until they are complete.

Rank 0 does not wait for the others, since a script may save on rank 0 alone. Another rank that calls a function that
saves waits until rank 0 has finished the save of the same call site. If its path differs from that of rank 0 (a
temporary folder of its own, a name with its rank), it writes the file itself.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import pickle
from collections.abc import Callable, Iterator
from copy import copy
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from matex_data.mpi.activity import busy
from matex_data.mpi.processes import is_child_process
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.world import alone, running_alone
from matex_data.training.exact.evaluation import DistributedTestStep
from matex_data.training.keras_api import CHECKPOINT_MANAGER, METRICS_OF_EPOCH, tf_keras_models, tf_keras_saving
from matex_data.training.launcher.caches import patch_caches
from matex_data.training.launcher.folders import patch_folders
from matex_data.training.launcher.openers import patch_openers
from matex_data.training.launcher.registry import SaveOutcome, SaveRegistry, failed_save
from matex_data.training.launcher.script_files import ScriptFiles

log = logging.getLogger("matex_data.training")

Get = Callable[[Any], Any]
Set = Callable[[Any, Any], None]


def patch_saving(channel: Channel) -> None:
    """Patch functions that save models or write summaries: only rank 0 does. *Collective*."""
    registry = SaveRegistry(channel)
    patch_folders(registry)
    patch_caches(registry)
    if registry.liveness is not None:
        patch_openers(ScriptFiles(registry))
    elif channel.rank == 0:
        log.warning(
            "all ranks write the files of the script, since this MPI allows no thread that answers other ranks\n"
            "  remedy: use an MPI library with MPI_THREAD_MULTIPLE, or write files on rank 0 alone: "
            "if matex_data.training.world().rank == 0"
        )
    saves = SavePatches(channel, registry)
    for owner, names in (
        (keras.Model, ("save", "save_weights", "export")),
        (keras.saving, ("save_model", "save_weights")),
        (keras.models, ("save_model",)),
        (tf_keras_saving, ("save_model", "save_weights")),
        (tf_keras_models, ("save_model",)),
    ):
        for name in names:
            if hasattr(owner, name):
                saves.patch(owner, name, "filepath")
    saves.patch(tf.saved_model, "save", "export_dir")
    saves.patch(tf.train.Checkpoint, "write", "file_prefix")
    saves.patch(tf.train.Checkpoint, "save", "file_prefix", _counter, _set_counter)
    saves.patch(tf.train.CheckpointManager, "save", "directory", _manager_state, _set_manager_state)
    _patch_managers(registry)
    if channel.rank > 0:
        for owner, name in (
            (keras.Model, "load_weights"),
            (keras.saving, "load_model"),
            (keras.saving, "load_weights"),
            (keras.models, "load_model"),
            (tf_keras_saving, "load_model"),
            (tf_keras_models, "load_model"),
        ):
            setattr(owner, name, _check_after_load(getattr(owner, name), registry))
        tf.summary.create_file_writer = lambda *_, **__: tf.summary.create_noop_writer()


class SavePatches:
    """Patches of functions that save files."""

    def __init__(self, channel: Channel, registry: SaveRegistry) -> None:
        self._channel = channel
        self._registry = registry

    def patch(self, owner: Any, name: str, path_name: str, get: Get | None = None, set: Set | None = None) -> None:
        """Patch a function that saves: only rank 0 runs it, unless the paths of the ranks differ.

        Parameters
        ----------
        owner, name : object and attribute name of the function.
        path_name : name of the parameter with the path, or of an attribute of the saving object.
        get, set : get and set the state of the saving object, which all ranks take from rank 0.
        """
        original = getattr(owner, name)
        signature = inspect.signature(original)

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            first = next(iter(bound.values()))
            path = bound[path_name] if path_name in bound else getattr(first, path_name, None)
            in_graph = path_name != "filepath" and not tf.executing_eagerly()
            if alone.get() or is_child_process() or in_graph or not isinstance(path, str | os.PathLike):
                return self._save_locally(original, args, kwargs)
            target = str(Path(path).absolute())
            if self._channel.rank == 0:
                return self._save_on_root(original, args, kwargs, target, lambda: get and get(first))
            saved = self._outcome_of_root(f"{name}()", target)
            if saved.path != target:
                return self._save_locally(original, args, kwargs)
            if saved.error is not None:
                raise pickle.loads(saved.error)
            if set is not None:
                set(first, saved.state)
            return saved.result

        setattr(owner, name, save)

    @staticmethod
    def _save_locally(original: Any, args: Any, kwargs: Any) -> Any:
        with running_alone(), busy(f"{original.__name__}()"):  # patched functions call each other
            return original(*args, **kwargs)

    def _save_on_root(self, original: Any, args: Any, kwargs: Any, target: str, get: Callable[[], Any]) -> Any:
        if self._registry.liveness is None:
            return self._save_collectively(lambda: self._save_locally(original, args, kwargs), target, get)
        call_site = self._registry.call_site()
        self._registry.wait_for_readers(call_site)
        try:
            result = self._save_locally(original, args, kwargs)
        except Exception as error:
            self._registry.record_save(call_site, failed_save(target, error))
            raise
        self._registry.record_save(call_site, SaveOutcome(target, None, result, get()))
        return result

    def _outcome_of_root(self, call: str, target: str) -> SaveOutcome:
        if self._registry.liveness is None:
            saved: SaveOutcome = self._channel.host.allgather_object(None)[0]
            return saved
        return self._registry.wait_for_root(call, target)

    def _save_collectively(self, save: Callable[[], Any], target: str, get: Callable[[], Any]) -> Any:
        """Save and broadcast the outcome, since this MPI allows no thread that answers queries. *Collective*."""
        try:
            result = save()
        except Exception as error:
            self._channel.host.allgather_object(failed_save(target, error))
            raise
        self._channel.host.allgather_object(SaveOutcome(target, None, result, get()))
        return result


def _patch_managers(registry: SaveRegistry) -> None:
    """Patch checkpoint managers: new ones list the checkpoints of rank 0, which may have saved more since."""
    kind = tf.train.CheckpointManager
    original = kind.__init__

    @functools.wraps(original)
    def begin(manager: Any, *args: Any, **kwargs: Any) -> None:
        original(manager, *args, **kwargs)
        if alone.get() or is_child_process():
            return
        call_site, target = registry.call_site("manager"), str(Path(manager.directory).absolute())
        if registry.rank == 0:
            registry.record_save(call_site, SaveOutcome(target, state=_manager_attributes(manager)))
            return
        saved = registry.root_save(call_site)
        if saved is not None and saved.path == target:
            vars(manager).update(saved.state)

    kind.__init__ = begin


def _check_after_load(original: Any, registry: SaveRegistry) -> Any:
    """Wrap a function that loads: raise an error if rank 0 may have replaced the file meanwhile."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        loaded = original(*args, **kwargs)
        path = signature.bind(*args, **kwargs).arguments.get("filepath")
        if isinstance(path, str | os.PathLike) and not is_child_process():
            registry.check_read(str(Path(path).absolute()))
        return loaded

    return load


def _counter(checkpoint: Any) -> int:
    return int(checkpoint.save_counter.numpy())


def _set_counter(checkpoint: Any, count: int) -> None:
    checkpoint.save_counter.assign(count)


def _manager_state(manager: Any) -> Any:
    return _counter(manager.checkpoint), _manager_attributes(manager)


def _manager_attributes(manager: Any) -> dict[str, Any]:
    return {name: copy(value) for name, value in vars(manager).items() if name in CHECKPOINT_MANAGER}


def _set_manager_state(manager: Any, state: Any) -> None:
    count, attributes = state
    _set_counter(manager.checkpoint, count)
    vars(manager).update(attributes)


@contextlib.contextmanager
def local_model(model: Any) -> Iterator[None]:
    """Context manager: evaluate a model on this rank alone, on whole batches, while all ranks train it."""
    replaced, test = vars(model).pop(METRICS_OF_EPOCH, None), vars(model).get("test_step")
    try:
        with test.on_this_rank() if isinstance(test, DistributedTestStep) else contextlib.nullcontext():
            yield
    finally:
        if replaced is not None:
            object.__setattr__(model, METRICS_OF_EPOCH, replaced)
