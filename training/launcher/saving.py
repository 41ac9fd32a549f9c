"""Saved models and checkpoints of scripts: rank 0 writes them, the other ranks wait until they are complete.

Rank 0 does not wait for the others, since a script may save on rank 0 alone. Another rank that saves a file for the
n-th time waits until rank 0 has done so n times; it writes the file itself if rank 0 does not.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable
from copy import copy
from typing import Any

import keras
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.mpi.activity import busy
from matex_data.mpi.processes import is_child_process
from matex_data.training.comm.channel import Channel
from matex_data.training.comm.world import alone, running_alone
from matex_data.training.exact.rows import is_sharded
from matex_data.training.exact.step import DistributedTestStep
from matex_data.training.keras_api import CHECKPOINT_MANAGER, tf_keras_models, tf_keras_saving
from matex_data.training.launcher.journal import status_of, version_of
from matex_data.training.launcher.openers import opening
from matex_data.training.launcher.overlay import Overlay
from matex_data.training.launcher.root import Root
from matex_data.training.launcher.tf_openers import patch_tensorflow_openers
from matex_data.training.replacements import patch
from matex_data.training.saving import WAITS_FOR_ROOT

Get = Callable[[Any], Any]
Set = Callable[[Any, Any], None]


def patch_saving(channel: Channel, files: Overlay | None) -> None:
    """Patch functions that save models or write summaries: only rank 0 does. Others load what rank 0 loads.

    Parameters
    ----------
    files : files of the script; None: each rank has its own.
    """
    written: dict[str, tuple[int, ...]] = {}
    if files is not None:
        patch_tensorflow_openers(files)
        _patch_latest(files.root)
        patch(tf.train.Checkpoint, functools.partial(_read, written), "read")
        patch(keras.Model, opening(files, "load", "self", "filepath"), "load_weights")
        patch(tf.saved_model, opening(files, "load", "export_dir"), "load")
        patch(tf.data.Dataset, opening(files, "load", "path"), "load")
    save = functools.partial(saving, channel, files, written)
    _patch_saves(keras.Model, save("filepath"), "save", "save_weights", "export")
    _patch_saves(tf.saved_model, save("export_dir"), "save")
    _patch_saves(tf.data.Dataset, save("path"), "save")
    _patch_saves(tf.train.Checkpoint, save("file_prefix"), "write")
    _patch_saves(tf.train.Checkpoint, save("file_prefix", _counter, _set_counter), "save")
    _patch_saves(tf.train.CheckpointManager, save("directory", _manager_state, _set_manager_state), "save")
    for module in (keras.saving, keras.models, tf_keras_saving, tf_keras_models):
        _patch_saves(
            module, save("filepath"), *(name for name in ("save_model", "save_weights") if hasattr(module, name))
        )
        if files is not None:
            patch(module, opening(files, "load", "filepath"), "load_model")
            if hasattr(module, "load_weights"):
                patch(module, opening(files, "load", "model", "filepath"), "load_weights")
    if channel.rank > 0:
        tf.summary.create_file_writer = lambda *_, **__: tf.summary.create_noop_writer()


def _patch_saves(owner: Any, save: Any, *names: str) -> None:
    patch(owner, save, *names)
    for name in names:
        vars(getattr(owner, name))[WAITS_FOR_ROOT] = True


def saving(
    channel: Channel,
    files: Overlay | None,
    written: dict[str, tuple[int, ...]],
    path_name: str,
    get: Get | None = None,
    set: Set | None = None,
) -> Callable[..., Any]:
    """Return what replaces a function that saves: only rank 0 runs it, and the others wait until it has.

    Parameters
    ----------
    written : gets the versions of checkpoints, by their names.
    path_name : name of the parameter with the path, or of an attribute of the saving object.
    get, set : get and set the state of the saving object, which all ranks take from rank 0.
    """

    def save(original: Any, *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs).arguments
        first = next(iter(bound.values()))
        path = bound[path_name] if path_name in bound else getattr(first, path_name, None)
        in_graph = path_name != "filepath" and not tf.executing_eagerly()
        target = os.path.abspath(path) if isinstance(path, str | os.PathLike) else ""  # noqa: PTH100
        parted = isinstance(first, tf.data.Dataset) and is_sharded(first)  # of which each rank has its rows
        alike = bool(target) and not (alone.get() or is_child_process() or in_graph or parted)

        def run() -> Any:
            with running_alone(), busy(f"{original.__name__}()"):  # patched functions call each other
                return original(*args, **kwargs)

        def run_for_all() -> tuple[Any, Any, Any]:
            return (result := run()), get and get(first), _version(result)

        if not alike or (files is not None and files.is_own(target)):
            return run()
        if files is None:
            result, state, version = channel.communicator.on_root(run_for_all)
        else:
            result, state, version = files.change(files.real(target), run_for_all, "replace")
        if version:
            written[_name(result)] = version
        if set is not None and channel.rank > 0:
            set(first, state)
        return result

    return save


def _patch_latest(root: Root) -> None:
    """Patch what looks for checkpoints: all ranks find those of rank 0, which may have saved more since."""

    def begin(original: Any, manager: Any, *args: Any, **kwargs: Any) -> None:
        original(manager, *args, **kwargs)
        vars(manager).update(root.value("a manager", lambda: _manager_attributes(manager)))

    def find(original: Any, *args: Any, **kwargs: Any) -> Any:
        return root.value(original.__name__, lambda: original(*args, **kwargs))

    patch(tf.train.CheckpointManager, begin, "__init__")
    patch(tf.train, find, "latest_checkpoint", "get_checkpoint_state")


def _read(
    written: dict[str, tuple[int, ...]], original: Any, checkpoint: Any, path: Any, *rest: Any, **given: Any
) -> Any:
    """Read a checkpoint; raise ``PartitionError`` if rank 0 has written another one of this name meanwhile."""
    status = original(checkpoint, path, *rest, **given)
    version = written.get(_name(path))
    if version not in (None, _version(path)):
        raise PartitionError(
            "rank 0 has written a checkpoint again, which this rank was to read",
            file=_name(path),
            expected="a name for each checkpoint, as of one Checkpoint or CheckpointManager",
            found="the same name, of which the files of the earlier checkpoint are gone",
            remedy="give another name, or let all ranks read before the next one is written: "
            "matex_data.training.barrier()",
        )
    return status


def _name(prefix: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(prefix))  # noqa: PTH100


def _version(prefix: Any) -> tuple[int, ...] | None:
    """Return the version of the files of a checkpoint."""
    return version_of(status_of(f"{_name(prefix)}.index")) if isinstance(prefix, str | os.PathLike) else None


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


def local_model(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager: evaluate a model on this rank alone, on whole batches, while all ranks train it."""
    test = vars(model).get("test_step")
    return test.on_this_rank() if isinstance(test, DistributedTestStep) else contextlib.nullcontext()
