"""New folders: all ranks may create a folder at the same call site."""

from __future__ import annotations

import contextlib
import functools
import os
import pathlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from matex_data.mpi.processes import is_child_process
from matex_data.training.launcher.registry import SaveRegistry

_thread = threading.local()


@contextlib.contextmanager
def _may_exist() -> Iterator[None]:
    """Context manager: an existing folder is no error for the caller, so query no rank."""
    before = getattr(_thread, "may_exist", False)
    _thread.may_exist = True
    try:
        yield
    finally:
        _thread.may_exist = before


def patch_folders(registry: SaveRegistry) -> None:
    """Patch ``os.mkdir`` and its callers: all ranks may create a new folder at the same call site."""
    mkdir, makedirs, path_mkdir = os.mkdir, os.makedirs, pathlib.Path.mkdir

    @functools.wraps(mkdir)
    def make_folder(path: Any, *args: Any, **kwargs: Any) -> None:
        if is_child_process() or getattr(_thread, "may_exist", False) or "dir_fd" in kwargs:
            mkdir(path, *args, **kwargs)
        else:
            registry.make_folder(str(Path(os.fsdecode(path)).absolute()), lambda: mkdir(path, *args, **kwargs))

    @functools.wraps(makedirs)
    def make_all(name: Any, mode: int = 0o777, exist_ok: bool = False) -> None:
        with _may_exist() if exist_ok else contextlib.nullcontext():
            makedirs(name, mode, exist_ok)

    @functools.wraps(path_mkdir)
    def make_path(self: Any, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        with _may_exist() if exist_ok else contextlib.nullcontext():
            path_mkdir(self, mode, parents, exist_ok)

    os.mkdir, os.makedirs = make_folder, make_all
    pathlib.Path.mkdir = make_path  # type: ignore[method-assign]
