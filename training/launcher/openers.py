"""Patches of the functions by which scripts open, rename and remove files: a table of how their paths are used."""

from __future__ import annotations

import builtins
import bz2
import contextlib
import errno
import functools
import inspect
import io
import logging
import os
import shutil
import stat
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import h5py
import netCDF4
import numpy as np

from matex_data.training.comm.channel import Channel
from matex_data.training.launcher.inputs import patch_inputs
from matex_data.training.launcher.journal import is_regular, is_unpatched, unpatched
from matex_data.training.launcher.overlay import Overlay
from matex_data.training.launcher.root import Root, is_called_by_package, is_called_by_script
from matex_data.training.replacements import patch

log = logging.getLogger("matex_data.training")

Replacement = Callable[..., Any]
"""Function that gets the original one, and its arguments."""
LOOKING = [name for name in ("stat", "lstat", "access", "readlink", "listxattr", "getxattr") if hasattr(os, name)]


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
    """Patch functions of Python, h5py, netCDF4 and SQLite that open, rename or remove files, or look at them."""
    everywhere: list[tuple[Any, Replacement, list[str]]] = [
        (io, opening(files, _kind_for_python, "file"), ["open"]),
        (np, opening(files, "replace", "fname"), ["savetxt"]),
        (np, opening(files, "load", "fname"), ["loadtxt", "genfromtxt"]),
        (np, opening(files, "load", "file"), ["fromregex"]),
        (os, opening(files, _kind_for_descriptor, "path"), ["open"]),
        (os, opening(files, "change", "path"), ["truncate"]),
        (h5py.File, opening(files, _kind_for_hdf5, "self", "name"), ["__init__"]),
        (os, changing(files, "remove", "path"), ["remove", "unlink", "rmdir"]),
        (shutil, changing(files, "remove", "path"), ["rmtree"]),
        (os, changing(files, "remove", "src", "dst", renames=True), ["rename", "replace"]),
        (os, changing(files, "create", "path"), ["mkdir"]),
        (os, changing(files, "create", "src", "dst"), ["link", "symlink"]),
        (Path, changing(files, "make", "self"), ["touch"]),
        (tempfile, functools.partial(_make_temporary, files), ["mkdtemp", "mkstemp", "NamedTemporaryFile"]),
        (os, functools.partial(list_directory, files), ["listdir"]),
        (os, functools.partial(_scandir, files), ["scandir"]),
    ]
    with contextlib.suppress(ImportError):  # Python may be built without it
        import sqlite3

        connect = opening(files, _kind_for_sqlite, "database")
        everywhere += [(module, connect, ["connect"]) for module in (sqlite3, sqlite3.dbapi2)]
    elsewhere: list[tuple[Any, Replacement, list[str]]] = [
        (os, looking(files, files.view), LOOKING),
        (os, looking(files, files.touch), ["chmod", "chown", "utime"]),
        (os, functools.partial(_chdir, files), ["chdir", "fchdir"]),
        (os, lambda original: files.working or original(), ["getcwd"]),
    ]
    original = io.open
    for owner, call, names in everywhere + (elsewhere if files.rank > 0 else []):
        patch(owner, call, *names)
    for module in (builtins, tarfile, bz2):
        for name in [name for name, value in vars(module).items() if value is original]:
            setattr(module, name, io.open)
    _patch_netcdf(files)


def _positional(names: Sequence[str], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """Return arguments by their positions, also those of the first parameters that are given by their names."""
    return [*args, *(kwargs.pop(name) for name in names[len(args) :] if name in kwargs)]


def opening(files: Overlay, kind: str | Callable[..., str | None], *names: str) -> Replacement:
    """Return what replaces a function that opens a file.

    Parameters
    ----------
    kind : of ``Overlay.open``; "create" if the file must not exist; "load" to read a file or a folder; or a function
        that gets the arguments and returns it, or None if the call opens no file.
    names : of the first parameters of the function, of which the last one is the file.
    """

    at = len(names) - 1

    def is_file(path: str) -> bool:
        return is_regular(path) or is_regular(files.look(path).path)  # rank 0 may have made a folder of it meanwhile

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        given = _positional(names, args, kwargs)
        how = None
        if len(given) > at:
            how = kind if isinstance(kind, str) else kind(*given, **kwargs)
        path = "" if how is None else files.path_of(given[at])
        if not path or is_called_by_package() or not (how == "load" or is_file(path)):
            return original(*given, **kwargs)
        if how == "create" and files.look(path).exists:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fsdecode(given[at]))

        def open_at(target: str) -> Any:
            file = files.argument(given[at], path, target)
            with unpatched():
                opened = original(*given[:at], file, *given[at + 1 :], **kwargs)
            stream = getattr(opened, "buffer", opened) if isinstance(opened, io.IOBase) else None
            raw = getattr(stream, "raw", stream)
            if isinstance(raw, io.FileIO) and file is not given[at]:
                raw.name = given[at]
            return opened

        return files.open(path, {"create": "replace", "load": ""}.get(str(how), str(how)), open_at)

    return call


def kind_of(mode: str) -> str:
    """Return how a file of this mode is opened; empty to read it."""
    if "x" in mode:
        return "create"
    return "replace" if "w" in mode else "change" if "+" in mode else "append" if "a" in mode else ""


def _kind_for_python(file: Any, mode: Any = "r", *rest: Any, opener: Any = None, **_: Any) -> str | None:
    has_opener = opener is not None or len(rest) > 5  # the last parameter
    return None if has_opener or not isinstance(mode, str) else kind_of(mode)


def _kind_for_descriptor(path: Any, flags: int, *_: Any, dir_fd: int | None = None, **__: Any) -> str | None:
    if dir_fd is not None:
        return None
    if flags & os.O_CREAT and flags & os.O_EXCL:
        return "create"
    writes = "replace" if flags & os.O_TRUNC else "append" if flags & os.O_APPEND else "change"
    return writes if flags & (os.O_WRONLY | os.O_RDWR) else ""


def _kind_for_hdf5(file: Any, name: Any, mode: Any = "r", driver: Any = None, *_: Any, **__: Any) -> str | None:
    kinds = {"a": "change", "r+": "change", "w": "replace", "w-": "create", "x": "create"}
    return kinds.get(mode, "") if driver is None else None


def _kind_for_netcdf(
    file: Any, name: Any, mode: str = "r", clobber: bool = True, *_: Any, **options: Any
) -> str | None:
    if options.get("memory") is not None or options.get("diskless"):
        return None
    return "create" if "w" in mode and not clobber else kind_of(mode.replace("a", "r+"))


def _kind_for_sqlite(database: Any, *_: Any, uri: bool = False, **__: Any) -> str | None:
    return None if uri or database in ("", ":memory:", b":memory:") else "change"


def _patch_netcdf(files: Overlay) -> None:
    original = netCDF4.Dataset
    initialize = opening(files, _kind_for_netcdf, "self", "filename")

    class Dataset(original):  # type: ignore[misc,valid-type]  # a type of C, whose methods cannot be replaced
        """Dataset of netCDF4 that rank 0 alone writes."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            initialize(original.__init__, self, *args, **kwargs)

    Dataset.__module__, Dataset.__qualname__ = original.__module__, original.__qualname__
    netCDF4.Dataset = Dataset


def changing(files: Overlay, kind: str, *names: str, renames: bool = False) -> Replacement:
    """Return what replaces a function that makes, removes or renames a file without opening it.

    Parameters
    ----------
    kind : of ``Overlay.change``; "create" if the file must not exist: of threads that try it, one does.
    names : of the first parameters of the function, of which the last one is the file.
    renames : the first parameter is the file that is renamed.
    """

    at = len(names) - 1

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        given = _positional(names, args, kwargs)
        path = files.path_of(given[at], follow=False) if len(given) > at else ""
        if not path or kwargs.keys() & {"dir_fd", "src_dir_fd", "dst_dir_fd"} or is_called_by_package():
            return original(*given, **kwargs)
        if kind == "create":
            with files.creating:
                for code, hinders in (
                    (errno.EEXIST, files.look(path).exists),
                    (errno.ENOENT, not files.has_folder(path)),
                ):
                    if hinders:  # on rank 0 as well, which counts what it makes
                        raise OSError(code, os.strerror(code), os.fsdecode(given[at]))
                return files.change(path, lambda: original(*given, **kwargs), "make")
        source = files.path_of(given[0], follow=False) if renames else ""
        return files.change(path, lambda: original(*given, **kwargs), kind, source)

    return call


def looking(files: Overlay, find: Callable[[str, Callable[[str], Any]], Any]) -> Replacement:
    """Return what replaces a function that looks at a file, or passes its name on, on ranks other than 0.

    Parameters
    ----------
    find : gets a path, and what to call with that of the file to look at.
    """

    def call(original: Any, *args: Any, **kwargs: Any) -> Any:
        file, *rest = _positional(["path"], args, kwargs) or [None]
        follow = kwargs.get("follow_symlinks", original.__name__ not in ("lstat", "readlink"))
        path = "" if kwargs.get("dir_fd") else files.path_of(file, follow)
        if not path or not _may_differ(files, path):
            return original(file, *rest, **kwargs)
        return find(path, lambda target: original(files.argument(file, path, target), *rest, **kwargs))

    return call


def _may_differ(files: Overlay, path: str) -> bool:
    """Return whether rank 0 may have seen another file, or another list of a folder, at this line than there is now.

    Libraries look at many files, of which nobody has changed most.
    """
    return is_called_by_script() or files.is_private(path) or (files.is_recent(path) and not is_called_by_package())


def _chdir(files: Overlay, original: Any, path: Any) -> None:
    """Change the working directory, which rank 0 may have removed already, or may remove while this rank is there."""
    folder = files.path_of(path)
    files.view(folder, original) if folder else original(path)
    files.working = folder


def _make_temporary(files: Overlay, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Make a file or folder of a random name: ranks other than 0 make theirs where nothing of it stays."""
    if is_unpatched() or is_called_by_package():
        return original(*args, **kwargs)
    bound = inspect.signature(original).bind(*args, **kwargs)
    if files.rank > 0 and files.path_of(bound.arguments.get("dir") or tempfile.gettempdir()):
        bound.arguments["dir"] = files.private_folder()

    def name(made: Any) -> str:
        return os.fsdecode(made[1] if original.__name__ == "mkstemp" else getattr(made, "name", made))

    with unpatched():
        made = files.make_alone(lambda: original(*bound.args, **bound.kwargs), name)
    if original.__name__ == "mkdtemp":
        files.add_own_folder(name(made))
    return made


def _listed(files: Overlay, path: Any) -> str:
    """Return the folder whose list ranks see as rank 0 has seen it; empty if the list stays as it is."""
    if isinstance(path, int):
        with contextlib.suppress(OSError):
            path = os.readlink(f"/proc/self/fd/{path}")  # noqa: PTH115
    folder = files.path_of("." if path is None else path)
    return folder if folder and (files.has_private(folder) or _may_differ(files, folder)) else ""


def list_directory(files: Overlay, original: Any, path: Any = None) -> Any:
    """Return the names in a folder that this rank has to see, in place of what a function returns."""
    return [entry.name for entry in os.scandir(path)] if _listed(files, path) else original(path)


def _scandir(files: Overlay, original: Any, path: Any = None) -> Any:
    folder = _listed(files, path)
    if not folder:
        return original(path)
    by_name: dict[str, Any] = {}

    def list_names(where: str) -> list[str]:
        with original(files.argument(path, folder, where)) as entries:
            found = {os.fsdecode(entry.name): entry for entry in entries}
        by_name.update(found)
        return list(found)

    names = files.names(folder, list_names)
    for name in names:
        if files.differs(os.path.join(folder, name)):  # noqa: PTH118
            by_name.pop(name, None)  # a later file of this name
    return _Scan([_Entry(folder, path, name, by_name.get(name)) for name in names])


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
    """Entry of a folder, which rank 0 may have removed or changed already, or has not made yet.

    Parameters
    ----------
    folder : absolute path.
    path : of the folder, as the script gives it.
    listed : what the file system has listed; None: nothing.
    """

    def __init__(self, folder: str, path: Any, name: str, listed: Any) -> None:
        self.path: Any = name if isinstance(path, int) else os.path.join(os.fsdecode(path or "."), name)  # noqa: PTH118
        self.name: Any = name
        if isinstance(path, bytes):
            self.name, self.path = os.fsencode(name), os.fsencode(self.path)
        self._file, self._listed = os.path.join(folder, name), listed  # noqa: PTH118

    def _is(self, kind: int, follow: bool) -> bool:
        if self._listed is not None and not self._listed.is_symlink():  # without looking at the file
            return bool({stat.S_IFDIR: self._listed.is_dir, stat.S_IFREG: self._listed.is_file}.get(kind, bool)())
        with contextlib.suppress(OSError):
            return stat.S_IFMT(self.stat(follow_symlinks=follow).st_mode) == kind
        return False

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFDIR, follow_symlinks)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self._is(stat.S_IFREG, follow_symlinks)

    def is_symlink(self) -> bool:
        return self._is(stat.S_IFLNK, follow=False)

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self._file, follow_symlinks=follow_symlinks)  # noqa: PTH116

    def inode(self) -> int:
        return self.stat(follow_symlinks=False).st_ino if self._listed is None else int(self._listed.inode())

    def __fspath__(self) -> Any:
        return self.path
