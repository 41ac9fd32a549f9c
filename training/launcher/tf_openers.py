"""Patches of TensorFlow's functions that open, rename and remove files; see ``Overlay``."""

from __future__ import annotations

import atexit
import contextlib
import functools
import glob
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from matex_data.training.exact.rows import is_sharded
from matex_data.training.launcher.openers import change_file, kind_of, opened, path_of_script
from matex_data.training.launcher.overlay import Overlay, is_unpatched, unpatched
from matex_data.training.launcher.root import is_called_by_package
from matex_data.training.replacements import patch


def patch_tensorflow_openers(files: Overlay) -> None:
    """Patch functions that open, rename or remove files."""
    patch(tf.io.gfile, functools.partial(change_file, files, 0), "remove", "rmtree")
    patch(tf.io.gfile, functools.partial(change_file, files, 1), "rename", "copy")
    if files.rank > 0:
        settling = functools.partial(_settle_first, files)
        for kind in (tf.data.TFRecordDataset, tf.data.TextLineDataset, tf.data.FixedLengthRecordDataset):
            patch(kind, settling, "__init__")
        patch(tf.io.gfile, settling, "exists", "stat", "glob", "listdir", "isdir")
        patch(tf.io, settling, "read_file", "matching_files")
        patch(tf.data.Dataset, settling, "list_files")
    _patch_records(files)
    _patch_tensors(files)


def _settle_first(files: Overlay, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that passes names of files on, on ranks other than 0."""
    if not is_unpatched() and files.root.is_shared():
        files.settle()
    return original(*args, **kwargs)


def _patch_records(files: Overlay) -> None:
    class TFRecordWriter(tf.io.TFRecordWriter):  # type: ignore[misc]
        """Writer of records that rank 0 alone writes."""

        def __init__(self, path: Any, options: Any = None) -> None:
            _open(path, "w", lambda target: super(TFRecordWriter, self).__init__(target, options))

    class GFile(tf.io.gfile.GFile):  # type: ignore[misc]
        """File of TensorFlow that rank 0 alone writes."""

        def __init__(self, name: Any, mode: str = "r") -> None:
            self._matex_held: Any = None

            def open_at(target: Any) -> None:
                super(GFile, self).__init__(target, mode)
                if kind_of(mode) and b"://" not in os.fsencode(target):
                    with unpatched(), contextlib.suppress(OSError):
                        self._matex_held = io.FileIO(target, "r+" if "r" in mode else "a")  # GFile opens it later

            _open(name, mode, open_at)

        def close(self) -> None:
            super().close()
            if self._matex_held is not None:
                self._matex_held.close()

    def _open(name: Any, mode: str, open_at: Callable[[Any], None]) -> None:
        path = path_of_script(files, name)
        if not path or is_called_by_package():
            open_at(name)
        else:
            opened(files, path, kind_of(mode), open_at)

    tf.io.TFRecordWriter, tf.io.gfile.GFile = TFRecordWriter, GFile


def _patch_tensors(files: Overlay) -> None:

    def write(write_file: Any, filename: Any, contents: Any, name: Any = None) -> Any:
        path = path_of_script(files, filename) if tf.executing_eagerly() else ""
        if not path:
            return write_file(filename, contents, name)
        return files.write(path, "replace", lambda target: write_file(target, contents, name))

    def cached(cache: Any, dataset: Any, filename: Any = "", name: Any = None) -> Any:
        if isinstance(filename, str | os.PathLike) and os.fspath(filename):
            filename = _cache_file(files, dataset, os.fspath(filename))
        return cache(dataset, filename, name)

    patch(tf.io, write, "write_file")
    patch(tf.data.Dataset, cached, "cache")


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
