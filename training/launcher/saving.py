"""Saved models and checkpoints of scripts: rank 0 writes them, the other ranks wait until they are complete.

Rank 0 does not wait for the others, since a script may save on rank 0 alone. Another rank that saves a file for the
n-th time waits until rank 0 has done so n times; it writes the file itself if rank 0 does not.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
from collections.abc import Callable
from copy import copy
from typing import Any, TypeVar

import keras
import tensorflow as tf

from matex_data.mpi.activity import busy
from matex_data.mpi.processes import is_child_process
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.world import alone, running_alone
from matex_data.training.exact.step import DistributedTestStep
from matex_data.training.keras_api import CHECKPOINT_MANAGER, tf_keras_models, tf_keras_saving
from matex_data.training.launcher.openers import opening
from matex_data.training.launcher.overlay import Overlay
from matex_data.training.launcher.root import Root
from matex_data.training.launcher.tf_openers import patch_tensorflow_openers
from matex_data.training.replacements import patch
from matex_data.training.saving import WAITS_FOR_ROOT

log = logging.getLogger("matex_data.training")

T = TypeVar("T")
Get = Callable[[Any], Any]
Set = Callable[[Any, Any], None]


def patch_saving(channel: Channel, files: Overlay | None) -> None:
    """Patch functions that save models or write summaries: only rank 0 does.

    Parameters
    ----------
    files : files of the script; None: each rank has its own.
    """
    if files is not None:
        patch_tensorflow_openers(files)
    saves = SavePatches(channel, files)
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
    if files is not None:
        _patch_managers(files.root)
        for owner, name in (
            (keras.Model, "load_weights"),
            (keras.saving, "load_model"),
            (keras.saving, "load_weights"),
            (keras.models, "load_model"),
            (tf_keras_saving, "load_model"),
            (tf_keras_models, "load_model"),
        ):
            names = ("self", "filepath") if owner is keras.Model else ("filepath",)
            patch(owner, opening(files, lambda *_, **__: "load", *names), name)
    if channel.rank > 0:
        tf.summary.create_file_writer = lambda *_, **__: tf.summary.create_noop_writer()


class SavePatches:
    """Patches of functions that save files."""

    def __init__(self, channel: Channel, files: Overlay | None) -> None:
        self._channel = channel
        self._files = files

    def patch(self, owner: Any, name: str, path_name: str, get: Get | None = None, set: Set | None = None) -> None:
        """Patch a function that saves: only rank 0 runs it, unless the paths of the ranks differ.

        Parameters
        ----------
        owner, name : object and attribute name of the function.
        path_name : name of the parameter with the path, or of an attribute of the saving object.
        get, set : get and set the state of the saving object, which all ranks take from rank 0.
        """
        signature = inspect.signature(getattr(owner, name))

        def save(original: Any, *args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs).arguments
            first = next(iter(bound.values()))
            path = bound[path_name] if path_name in bound else getattr(first, path_name, None)
            in_graph = path_name != "filepath" and not tf.executing_eagerly()
            if alone.get() or is_child_process() or in_graph or not isinstance(path, str | os.PathLike):
                return self._save_locally(original, args, kwargs)
            target = os.path.abspath(path)  # noqa: PTH100  # as in path_of_script
            run = functools.partial(self._save_locally, original, args, kwargs)
            if self._files is not None and self._files.is_own(target):
                return run()
            result, state = self._saved(target, lambda: (run(), get and get(first)))
            if set is not None and self._channel.rank > 0:
                set(first, state)
            return result

        patch(owner, save, name)
        vars(getattr(owner, name))[WAITS_FOR_ROOT] = True

    @staticmethod
    def _save_locally(original: Any, args: Any, kwargs: Any) -> Any:
        with running_alone(), busy(f"{original.__name__}()"):  # patched functions call each other
            return original(*args, **kwargs)

    def _saved(self, target: str, save: Callable[[], T]) -> T:
        """Return what a function that saves returns on rank 0; on this rank if rank 0 does not save.

        *Collective* without common files.
        """
        if self._files is not None:
            return self._files.change(self._files.real(target), save, "replace")
        return self._channel.communicator.on_root(save)


def _patch_managers(root: Root) -> None:
    """Patch checkpoint managers: new ones list the checkpoints of rank 0, which may have saved more since."""

    def begin(original: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
        original(manager, *args, **kwargs)
        vars(manager).update(root.value("a manager", lambda: _manager_attributes(manager)))

    patch(tf.train.CheckpointManager, begin, "__init__")


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


def local_model(model: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context manager: evaluate a model on this rank alone, on whole batches, while all ranks train it."""
    test = vars(model).get("test_step")
    return test.on_this_rank() if isinstance(test, DistributedTestStep) else contextlib.nullcontext()
