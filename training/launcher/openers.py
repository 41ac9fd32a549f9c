"""Patches of the functions by which scripts open, rename and remove files; see ``ScriptFiles``."""

from __future__ import annotations

import builtins
import bz2
import contextlib
import functools
import inspect
import io
import logging
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import h5py
import netCDF4
import numpy as np
import tensorflow as tf

from matex_data.mpi.activity import user_location
from matex_data.mpi.processes import is_child_process
from matex_data.training.comm.world import alone
from matex_data.training.launcher.registry import is_library, is_standard_library
from matex_data.training.launcher.script_files import ScriptFiles, Watch, is_unpatched

log = logging.getLogger("matex_data.training")


def patch_openers(files: ScriptFiles) -> None:
    """Patch functions of Python, h5py, netCDF4, SQLite and TensorFlow that open, rename or remove files."""
    _patch_open(files)
    _patch_removal(files)
    _patch_h5py(files)
    _patch_netcdf(files)
    _patch_sqlite(files)
    _patch_tensorflow(files)
    if files.rank > 0:
        _patch_looks(files)
    else:
        _warn_of_processes()


def _path(files: ScriptFiles, path: Any) -> str:
    """Return the absolute path of a file of the script; empty if the call concerns this rank alone."""
    if not isinstance(path, str | bytes | os.PathLike) or is_unpatched() or alone.get() or is_child_process():
        return ""
    if b"://" in os.fsencode(path):
        return ""
    absolute = _absolute(path)
    return "" if files.is_own(absolute) else absolute


def _absolute(path: Any) -> str:
    return os.path.abspath(os.fsdecode(path))  # noqa: PTH100  # 1 us, where Path takes 10


def _called_by_package() -> bool:
    """Return whether this package has called a patched function, also by way of the standard library."""
    return str(_caller().f_globals.get("__name__")).split(".")[0] == "matex_data"


def _called_by_script() -> bool:
    """Return whether the script has called a patched function, also by way of the standard library."""
    return not _called_by_package() and not is_library(_caller().f_code.co_filename)


def _caller() -> FrameType:
    """Return the innermost frame outside of this module and the standard library."""
    frame: FrameType = sys._getframe(1)
    while frame.f_back and (frame.f_globals is globals() or is_standard_library(frame.f_code.co_filename)):
        frame = frame.f_back
    return frame


class _Flag:
    """Closed state of an object; also true when the object is gone."""

    def __init__(self) -> None:
        self.closed = False

    def watch(self, owner: Any) -> Watch:
        reference = weakref.ref(owner)
        return lambda: self.closed or reference() is None


def _patch_open(files: ScriptFiles) -> None:
    original = io.open

    def watch(stream: Any) -> Watch:
        reference = weakref.ref(_raw(stream))
        return lambda: getattr(reference(), "closed", True)

    @functools.wraps(original)
    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = "" if (len(args) > 5 or kwargs.get("opener")) else _path(files, file)
        writes = isinstance(mode, str) and not {"w", "a", "x", "+"}.isdisjoint(mode)
        if not path or _called_by_package() or not files.is_regular(path):
            return original(file, mode, *args, **kwargs)
        if not writes:
            found = files.to_read(path)
            return original(file if found == path else found, mode, *args, **kwargs)

        def open_at(target: str) -> Any:
            if target == path:
                return original(file, mode, *args, **kwargs)
            stream = original(target, mode, *args, **kwargs)
            _raw(stream).name = file
            return stream

        changes = "+" in mode and "w" not in mode
        return files.write(path, open_at, watch, append="a" in mode, copy=shutil.copyfile if changes else None)

    for module in (builtins, io, tarfile, bz2):
        for name in [name for name, value in vars(module).items() if value is original]:
            setattr(module, name, open_file)
    save_text = np.savetxt

    @functools.wraps(save_text)
    def savetxt(fname: Any, *args: Any, **kwargs: Any) -> Any:
        if not _path(files, fname) or Path(os.fsdecode(fname)).suffix in (".gz", ".bz2", ".xz", ".lzma"):
            return save_text(fname, *args, **kwargs)
        encoding = inspect.signature(save_text).bind(fname, *args, **kwargs).arguments.get("encoding")
        with open_file(fname, "w", encoding=encoding or "latin1") as file:
            return save_text(file, *args, **kwargs)

    np.savetxt = savetxt


def _raw(stream: Any) -> Any:
    """Return the file object below the buffers of a stream."""
    return getattr(getattr(stream, "buffer", stream), "raw", getattr(stream, "buffer", stream))


def _patch_removal(files: ScriptFiles) -> None:
    """Patch functions that remove or rename files: rank 0 does, and the others wait until it has."""
    for owner, names, destination in (
        (os, ("remove", "unlink", "rmdir"), 0),
        (os, ("rename", "replace"), 1),
        (shutil, ("rmtree",), 0),
        (tf.io.gfile, ("remove", "rmtree"), 0),
        (tf.io.gfile, ("rename", "copy"), 1),
    ):
        for name in names:
            _replace(owner, name, _change(files, getattr(owner, name), destination))
    original = tempfile.mkdtemp

    @functools.wraps(original)
    def mkdtemp(*args: Any, **kwargs: Any) -> Any:
        folder = original(*args, **kwargs)
        if not is_unpatched():
            files.add_own_folder(os.fsdecode(folder))
        return folder

    tempfile.mkdtemp = mkdtemp


def _change(files: ScriptFiles, original: Any, destination: int) -> Any:
    """Wrap a function that removes or renames a file.

    Parameters
    ----------
    destination : position of the argument with the file; behind the source if it is not 0.
    """

    @functools.wraps(original)
    def change(*args: Any, **kwargs: Any) -> Any:
        path = _path(files, args[destination]) if len(args) > destination else ""
        if not path or kwargs.keys() & {"dir_fd", "src_dir_fd", "dst_dir_fd"} or _called_by_package():
            return original(*args, **kwargs)
        source = _absolute(args[0]) if destination and original.__name__ != "copy" else ""
        return files.change(path, lambda: original(*args, **kwargs), source)

    return change


def _patch_looks(files: ScriptFiles) -> None:
    """Patch functions that look at files, or pass their names on, on ranks other than 0."""

    def patch(owner: Any, names: tuple[str, ...], where: Callable[[Any], Any]) -> None:
        """Patch functions; ``where`` returns the first argument to use, maybe after a wait for rank 0."""
        for name in names:
            original = getattr(owner, name)

            @functools.wraps(original)
            def look(*args: Any, original: Any = original, **kwargs: Any) -> Any:
                if args and files.any_private and not is_unpatched():
                    args = where(args[0]), *args[1:]
                return original(*args, **kwargs)

            _replace(owner, name, look)

    def of_file(find: Callable[[str], str]) -> Callable[[Any], Any]:
        def where(path: Any) -> Any:
            absolute = _path(files, path)
            found = find(absolute) if absolute else absolute
            return path if found == absolute else found

        return where

    def settled(first: Any) -> Any:
        files.settle(_absolute(first) if isinstance(first, str | os.PathLike) else None)
        return first

    def all_settled(first: Any) -> Any:
        files.settle()
        return first

    patch(os, ("stat", "lstat", "access", "link", "symlink"), of_file(files.to_look_at))
    patch(os, ("chmod", "chown", "utime", "truncate"), of_file(files.to_change))
    patch(os, ("listdir", "scandir"), settled)
    patch(os, ("system",), all_settled)
    patch(subprocess.Popen, ("__init__",), all_settled)
    for kind in (tf.data.TFRecordDataset, tf.data.TextLineDataset, tf.data.FixedLengthRecordDataset):
        patch(kind, ("__init__",), all_settled)
    patch(tf.io.gfile, ("exists", "stat", "glob", "listdir", "isdir"), all_settled)
    patch(tf.io, ("read_file",), all_settled)


def _warn_of_processes() -> None:
    """Patch functions that start processes: on rank 0, warn once that each rank starts one."""
    warned: list[bool] = []

    def patch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def start(*args: Any, **kwargs: Any) -> Any:
            if not warned and not is_child_process() and not alone.get() and _called_by_script():
                warned.append(True)
                log.warning(
                    "this script starts processes, at %s: each rank starts its own, and what they write is written by "
                    "all ranks\n"
                    "  remedy: if matex_data.training.world().rank == 0, where one is enough",
                    user_location(),
                )
            return original(*args, **kwargs)

        setattr(owner, name, start)

    patch(os, "system")
    patch(subprocess.Popen, "__init__")


def _replace(owner: Any, name: str, function: Any) -> None:
    """Replace a function, also in the sets of those that support options, such as ``os.supports_dir_fd``."""
    original = getattr(owner, name)
    for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
        if owner is os and original in supporting:
            supporting.add(function)
    setattr(owner, name, function)


def _patch_h5py(files: ScriptFiles) -> None:
    begin, end = h5py.File.__init__, h5py.File.close

    @functools.wraps(begin)
    def initialize(self: Any, name: Any, mode: str = "r", driver: Any = None, *args: Any, **kwargs: Any) -> None:
        path = "" if driver is not None else _path(files, name)

        def open_at(target: str) -> Any:
            begin(self, name if target == path else target, mode, driver, *args, **kwargs)
            return self

        if not path or _called_by_package():
            open_at(path)
            return
        if mode == "r":
            open_at(files.to_read(path))
            return
        self._matex_state = _Flag()
        files.write(path, open_at, self._matex_state.watch, copy=shutil.copyfile if mode in ("a", "r+") else None)

    @functools.wraps(end)
    def close(self: Any) -> None:
        end(self)
        if hasattr(self, "_matex_state"):
            self._matex_state.closed = True

    h5py.File.__init__, h5py.File.close = initialize, close


def _patch_netcdf(files: ScriptFiles) -> None:
    original = netCDF4.Dataset

    class Dataset(original):  # type: ignore[misc,valid-type]  # a type of C, whose methods cannot be replaced
        """Dataset of netCDF4 that rank 0 alone writes."""

        def __init__(self, filename: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
            path = "" if kwargs.get("memory") is not None or kwargs.get("diskless") else _path(files, filename)

            def open_at(target: Any) -> Any:
                original.__init__(self, target, mode, *args, **kwargs)
                return self

            if not path or _called_by_package():
                open_at(filename)
                return
            if mode.startswith("r") and "+" not in mode:
                open_at(files.to_read(path))
                return

            def watch(owner: Any) -> Watch:
                reference = weakref.ref(owner)
                return lambda: (found := reference()) is None or not found.isopen()

            files.write(path, open_at, watch, copy=shutil.copyfile if mode[0] in "ar" else None)

    Dataset.__module__, Dataset.__qualname__ = original.__module__, original.__qualname__
    netCDF4.Dataset = Dataset


def _patch_sqlite(files: ScriptFiles) -> None:
    try:
        import sqlite3
    except ImportError:  # Python was built without it
        return
    original = sqlite3.connect

    def copy(source: str, target: str) -> None:
        with contextlib.closing(original(source)) as one, contextlib.closing(original(target)) as other:
            one.backup(other)

    @functools.wraps(original)
    def connect(database: Any, *args: Any, **kwargs: Any) -> Any:
        named = database not in ("", ":memory:", b":memory:") and not kwargs.get("uri")
        path = _path(files, database) if named and len(args) < 5 else ""
        if not path:
            return original(database, *args, **kwargs)
        flag, kind = _Flag(), kwargs.pop("factory", sqlite3.Connection)

        class Connection(kind):  # type: ignore[misc,valid-type]
            """Connection to a database that rank 0 alone writes."""

            def close(self) -> None:
                super().close()
                flag.closed = True

        return files.write(
            path, lambda target: original(target, *args, factory=Connection, **kwargs), flag.watch, copy=copy
        )

    sqlite3.connect = sqlite3.dbapi2.connect = connect


def _patch_tensorflow(files: ScriptFiles) -> None:
    class TFRecordWriter(tf.io.TFRecordWriter):  # type: ignore[misc]
        """Writer of records that rank 0 alone writes."""

        def __init__(self, path: Any, options: Any = None) -> None:
            self._matex_state = _Flag()
            _open(path, "w", self, lambda target: super(TFRecordWriter, self).__init__(target, options))

        def close(self) -> None:
            super().close()
            self._matex_state.closed = True

    class GFile(tf.io.gfile.GFile):  # type: ignore[misc]
        """File of TensorFlow that rank 0 alone writes."""

        def __init__(self, name: Any, mode: str = "r") -> None:
            self._matex_state = _Flag()
            _open(name, mode, self, lambda target: super(GFile, self).__init__(target, mode))

        def close(self) -> None:
            super().close()
            self._matex_state.closed = True

    def _open(name: Any, mode: str, owner: Any, initialize: Callable[[Any], None]) -> None:
        path = _path(files, name)
        if not path or _called_by_package():
            return initialize(name)
        if mode.startswith("r") and "+" not in mode:
            return initialize(files.to_read(path))

        def open_at(target: str) -> Any:
            initialize(target)
            return owner

        files.write(
            path, open_at, owner._matex_state.watch, append="a" in mode, copy=shutil.copyfile if "+" in mode else None
        )
        return None

    tf.io.TFRecordWriter, tf.io.gfile.GFile = TFRecordWriter, GFile
    write_file = tf.io.write_file

    @functools.wraps(write_file)
    def write(filename: Any, contents: Any, name: Any = None) -> Any:
        path = _path(files, filename) if tf.executing_eagerly() else ""
        if not path:
            return write_file(filename, contents, name)
        return files.write(path, lambda target: write_file(target, contents, name), lambda _: lambda: True)

    tf.io.write_file = write
