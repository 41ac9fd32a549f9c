"""Patches of the functions by which scripts open, rename and remove files; see ``Overlay``."""

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
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np

from matex_data.training.comm.channel import Channel
from matex_data.training.launcher.inputs import patch_inputs
from matex_data.training.launcher.overlay import Overlay, is_regular, is_unpatched, unpatched
from matex_data.training.launcher.root import Root, is_called_by_package, is_called_by_script
from matex_data.training.replacements import patch

log = logging.getLogger("matex_data.training")


def shared_files(channel: Channel) -> tuple[Root, Overlay | None]:
    """Share files, clock and input of the script. *Collective*.

    Returns
    -------
    root : what the ranks ask of rank 0; it knows whether the script has asked for its rank.
    files : None: each rank has its own.
    """
    root = Root(channel)
    if root.available:
        tempfile.gettempdir()  # tries a folder with a file whose name is random, which rank 0 would never write
        files = Overlay(root)
        patch_openers(files)
        patch_inputs(root, files)
        return root, files
    if channel.rank == 0:
        log.warning(
            "all ranks write the files of the script, since this MPI allows no thread that answers other ranks\n"
            "  remedy: use an MPI library with MPI_THREAD_MULTIPLE, or write files on rank 0 alone: "
            "if matex_data.training.world().rank == 0"
        )
    return root, None


def patch_openers(files: Overlay) -> None:
    """Patch functions of Python, h5py, netCDF4 and SQLite that open, rename or remove files."""
    _patch_open(files)
    _patch_removal(files)
    _patch_h5py(files)
    _patch_netcdf(files)
    _patch_sqlite(files)
    _patch_lists(files)
    if files.rank > 0:
        _patch_looks(files)


def path_of_script(files: Overlay, path: Any, follow: bool = True) -> str:
    """Return the path of a file of the script as of ``Overlay.real``; empty if the call concerns this rank alone."""
    if not isinstance(path, str | bytes | os.PathLike) or is_unpatched() or not files.root.is_shared():
        return ""
    if b"://" in os.fsencode(path):
        return ""
    absolute = os.path.abspath(os.fsdecode(path))  # noqa: PTH100  # 1 us, where Path takes 10
    return "" if files.is_own(absolute) else files.real(absolute, follow)


def kind_of(mode: str) -> str:
    """Return how a file of this mode is opened; empty to read it."""
    if "w" in mode or "x" in mode:
        return "replace"
    return "change" if "+" in mode else "append" if "a" in mode else ""


def opened(files: Overlay, path: str, kind: str, open_file: Callable[[str], Any]) -> Any:
    """Open a file of the script.

    Parameters
    ----------
    path : absolute path.
    kind : of ``Overlay.write``; empty to read.
    open_file : opens the file of the path that it gets.
    """
    return files.write(path, kind, open_file) if kind else files.read(path, open_file)


def _patch_open(files: Overlay) -> None:
    original = io.open

    @functools.wraps(original)
    def open_file(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        path = "" if (len(args) > 5 or kwargs.get("opener")) else path_of_script(files, file)
        if not path or not isinstance(mode, str) or is_called_by_package() or not is_regular(path):
            return original(file, mode, *args, **kwargs)
        if "x" in mode and files.exists(path):
            raise FileExistsError(17, "File exists", os.fsdecode(file))

        def open_at(target: str) -> Any:
            stream: Any = original(file if target == path else target, mode, *args, **kwargs)
            if target != path:
                getattr(getattr(stream, "buffer", stream), "raw", getattr(stream, "buffer", stream)).name = file
            return stream

        return opened(files, path, kind_of(mode), open_at)

    for module in (builtins, io, tarfile, bz2):
        for name in [name for name, value in vars(module).items() if value is original]:
            setattr(module, name, open_file)

    def savetxt(save_text: Any, fname: Any, *args: Any, **kwargs: Any) -> Any:
        if not path_of_script(files, fname) or Path(os.fsdecode(fname)).suffix in (".gz", ".bz2", ".xz", ".lzma"):
            return save_text(fname, *args, **kwargs)
        encoding = inspect.signature(save_text).bind(fname, *args, **kwargs).arguments.get("encoding")
        with open_file(fname, "w", encoding=encoding or "latin1") as file:
            return save_text(file, *args, **kwargs)

    def truncate(cut: Any, file: Any, length: int) -> None:
        path = path_of_script(files, file)
        if not path or is_called_by_package():
            cut(file, length)
        else:
            files.write(path, "change", lambda target: cut(file if target == path else target, length))

    patch(np, savetxt, "savetxt")
    patch(os, truncate, "truncate")


def _patch_removal(files: Overlay) -> None:
    """Patch functions that remove or rename files, or make folders: rank 0 does, and the others wait until it has."""
    for owner, names, destination in (
        (os, ("remove", "unlink", "rmdir", "mkdir"), 0),
        (os, ("rename", "replace", "link", "symlink"), 1),
        (shutil, ("rmtree",), 0),
        (Path, ("touch",), 0),
    ):
        patch(owner, functools.partial(change_file, files, destination), *names)

    def make(original: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a file or folder of a random name: ranks other than 0 make theirs where nothing of it stays."""
        if is_unpatched() or is_called_by_package():
            return original(*args, **kwargs)
        bound = inspect.signature(original).bind(*args, **kwargs)
        if files.rank > 0 and path_of_script(files, bound.arguments.get("dir") or tempfile.gettempdir()):
            bound.arguments["dir"] = files.private_folder()
        with unpatched():
            made = original(*bound.args, **bound.kwargs)
        if original.__name__ == "mkdtemp":
            files.add_own_folder(os.fsdecode(made))
        return made

    patch(tempfile, make, "mkdtemp", "mkstemp", "NamedTemporaryFile")


def change_file(files: Overlay, destination: int, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function that makes, removes or renames a file without opening it.

    Parameters
    ----------
    destination : position of the argument with the file.
    """
    path = path_of_script(files, args[destination], follow=False) if len(args) > destination else ""
    if not path or kwargs.keys() & {"dir_fd", "src_dir_fd", "dst_dir_fd"} or is_called_by_package():
        return original(*args, **kwargs)
    source = path_of_script(files, args[0], follow=False) if original.__name__ in ("rename", "replace") else ""
    return files.change(path, lambda: original(*args, **kwargs), source=source)


def _patch_lists(files: Overlay) -> None:
    """Patch functions that list folders: ranks see the names that rank 0 has seen.

    What libraries list is as it is, unless the script has written, or removed, what is listed.
    """

    def seen(path: Any) -> str:
        given = path if isinstance(path, str | os.PathLike) else "." if path is None else 0
        absolute = path_of_script(files, given)
        return absolute if absolute and (is_called_by_script() or files.has_changes(absolute)) else ""

    def listdir(list_names: Any, path: Any = None) -> Any:
        if isinstance(path, bytes):
            return [os.fsencode(name) for name in listdir(list_names, os.fsdecode(path))]
        folder = seen(path)
        if not folder:
            return list_names(path)
        return files.names(folder, lambda where: list_names(path if where == folder else where))

    def scandir(scan: Any, path: Any = None) -> Any:
        folder = seen(path)
        if not folder:
            return scan(path)
        by_name: dict[str, Any] = {}

        def list_names(where: str) -> list[str]:
            with scan(path if where == folder else where) as original:
                entries = {entry.name: entry for entry in original}
            by_name.update(entries if where == folder else {})
            return list(entries)

        names = files.names(folder, list_names)
        return _Scan([by_name[name] if name in by_name else _Entry(files, folder, path, name) for name in names])

    patch(os, listdir, "listdir")
    patch(os, scandir, "scandir")


class _Scan(contextlib.AbstractContextManager[Any]):
    """Iterator of ``os.scandir``, which is a context manager, too."""

    def __init__(self, entries: list[Any]) -> None:
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[Any]:
        return self._entries

    def __next__(self) -> Any:
        return next(self._entries)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the entries that have not been taken."""
        self._entries = iter(())


class _Entry:
    """Entry of a folder that rank 0 has removed already, or has not made yet."""

    def __init__(self, files: Overlay, folder: str, path: Any, name: str) -> None:
        self.name, self.path = name, str(Path(os.fsdecode(path or "."), name))
        self._real = Path(files.look(str(Path(folder, name))).path)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._real.is_dir()

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._real.is_file()

    def is_symlink(self) -> bool:
        return self._real.is_symlink()

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return self._real.stat()

    def __fspath__(self) -> str:
        return self.path


def _patch_looks(files: Overlay) -> None:
    """Patch functions that look at files, or pass their names on, on ranks other than 0."""

    def look(where: Callable[[str], str], original: Any, *args: Any, **kwargs: Any) -> Any:
        follow = kwargs.get("follow_symlinks", original.__name__ != "lstat")
        path = path_of_script(files, args[0], follow) if args and not kwargs.get("dir_fd") else ""
        if path and (files.is_private(path) or is_called_by_script()):
            found = where(path)
            args = args if found == path else (found, *args[1:])
        return original(*args, **kwargs)

    seen = functools.partial(look, lambda path: files.look(path).path)
    patch(os, seen, "stat", "lstat", "access")
    patch(os, functools.partial(look, files.to_change), "chmod", "chown", "utime")


def _patch_h5py(files: Overlay) -> None:
    def initialize(
        begin: Any, self: Any, name: Any, mode: str = "r", driver: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        path = "" if driver is not None else path_of_script(files, name)

        def open_at(target: str) -> None:
            begin(self, name if target == path else target, mode, driver, *args, **kwargs)

        if not path or is_called_by_package():
            open_at(path)
        else:
            opened(files, path, {"r": "", "a": "change", "r+": "change"}.get(mode, "replace"), open_at)

    patch(h5py.File, initialize, "__init__")


def _patch_netcdf(files: Overlay) -> None:
    original = netCDF4.Dataset

    class Dataset(original):  # type: ignore[misc,valid-type]  # a type of C, whose methods cannot be replaced
        """Dataset of netCDF4 that rank 0 alone writes."""

        def __init__(self, filename: Any, mode: str = "r", *args: Any, **kwargs: Any) -> None:
            path = "" if kwargs.get("memory") is not None or kwargs.get("diskless") else path_of_script(files, filename)

            def open_at(target: Any) -> None:
                original.__init__(self, target, mode, *args, **kwargs)

            if not path or is_called_by_package():
                open_at(filename)
            else:
                kind = "" if mode.startswith("r") and "+" not in mode else "change" if mode[0] in "ar" else "replace"
                opened(files, path, kind, open_at)

    Dataset.__module__, Dataset.__qualname__ = original.__module__, original.__qualname__
    netCDF4.Dataset = Dataset


def _patch_sqlite(files: Overlay) -> None:
    try:
        import sqlite3
    except ImportError:  # Python was built without it
        return

    def connect(original: Any, database: Any, *args: Any, **kwargs: Any) -> Any:
        named = database not in ("", ":memory:", b":memory:") and not kwargs.get("uri")
        path = path_of_script(files, database) if named else ""
        if not path:
            return original(database, *args, **kwargs)
        return files.write(path, "change", lambda target: original(target, *args, **kwargs))

    for module in (sqlite3, sqlite3.dbapi2):
        patch(module, connect, "connect")
