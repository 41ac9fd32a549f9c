"""Patches of TensorFlow's functions that open, rename and remove files; see ``Overlay``."""

from __future__ import annotations

import atexit
import contextlib
import functools
import glob
import io
import os
from pathlib import Path
from typing import Any

import tensorflow as tf

from matex_data.training.exact.rows import is_sharded
from matex_data.training.launcher.journal import is_unpatched
from matex_data.training.launcher.openers import changing, kind_of, list_directory, looking, opening
from matex_data.training.launcher.overlay import Overlay
from matex_data.training.launcher.root import is_called_by_package
from matex_data.training.replacements import patch


def patch_tensorflow_openers(files: Overlay) -> None:
    """Patch functions that open, rename or remove files."""
    gfile = tf.io.gfile
    patch(gfile.GFile, _hold, "__init__")
    patch(gfile.GFile, opening(files, lambda _, name, mode="r": kind_of(mode), "self", "name"), "__init__")
    patch(gfile.GFile, _release, "close")
    patch(tf.io.TFRecordWriter, opening(files, "replace", "self", "path"), "__init__")
    eagerly = opening(files, lambda *_, **__: "replace" if tf.executing_eagerly() else None, "filename")
    patch(tf.io, eagerly, "write_file")
    patch(gfile, changing(files, "remove", "path"), "remove", "rmtree")
    patch(gfile, changing(files, "remove", "src", "dst", renames=True), "rename")
    patch(gfile, changing(files, "change", "src", "dst"), "copy")
    patch(gfile, changing(files, "make", "path"), "mkdir", "makedirs")
    patch(gfile, functools.partial(list_directory, files), "listdir")
    patch(gfile, functools.partial(_glob, files), "glob")
    patch(tf.data.Dataset, functools.partial(_cache, files), "cache")
    if files.rank > 0:
        settling = functools.partial(_settle_first, files)
        for kind in (tf.data.TFRecordDataset, tf.data.TextLineDataset, tf.data.FixedLengthRecordDataset):
            patch(kind, settling, "__init__")
        patch(gfile, looking(files, files.view), "exists", "stat", "isdir")
        patch(tf.io, settling, "read_file", "matching_files")
        patch(tf.data.Dataset, settling, "list_files")


def _settle_first(files: Overlay, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that passes names of files on, on ranks other than 0."""
    if not is_unpatched() and files.root.is_shared():
        files.settle()
    return original(*args, **kwargs)


def _glob(files: Overlay, original: Any, pattern: Any) -> Any:
    """Return the names that rank 0 has found, of files of which this rank may have private copies."""
    if is_unpatched() or is_called_by_package():
        return original(pattern)
    return files.root.value("glob", lambda: original(pattern))


def _hold(original: Any, gfile: Any, name: Any, mode: str = "r") -> None:
    """Hold a file of the script that is to be written open: TensorFlow opens it later."""
    original(gfile, name, mode)
    if is_unpatched() and kind_of(mode) and b"://" not in os.fsencode(name):
        with contextlib.suppress(OSError):
            gfile._matex_held = io.FileIO(name, "r+" if "r" in mode else "a")


def _release(original: Any, gfile: Any) -> None:
    original(gfile)
    if held := vars(gfile).pop("_matex_held", None):
        held.close()


def _cache(files: Overlay, original: Any, dataset: Any, filename: Any = "", name: Any = None) -> Any:
    if isinstance(filename, str | os.PathLike) and os.fspath(filename):
        filename = _cache_file(files, dataset, os.fspath(filename))
    return original(dataset, filename, name)


def _cache_file(files: Overlay, dataset: Any, filename: str) -> str:
    """Return the cache file of this rank.

    Rank 0 writes the file of the script, which all ranks read once it is complete, also in later jobs. Until then the
    other ranks write files that are removed at the end of the job. Of a sharded dataset each rank keeps a file.
    """
    if is_sharded(dataset):
        return f"{filename}.rank{files.rank}of{files.root.size}"
    if files.rank == 0 or Path(f"{filename}.index").exists():
        return filename
    own = Path(f"{filename}.{files.root.job}-rank{files.rank}")

    def remove() -> None:
        for path in own.parent.glob(f"{glob.escape(own.name)}*"):
            path.unlink(missing_ok=True)

    atexit.register(remove)
    return str(own)
