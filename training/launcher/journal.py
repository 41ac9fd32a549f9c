"""Journal of the files that rank 0 changes, by which the other ranks know what it has done already."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from collections import defaultdict
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from matex_data.locks import setting

_unpatched: ContextVar[bool] = ContextVar("unpatched", default=False)
_lstat = os.lstat


def is_unpatched() -> bool:
    """Return whether this thread writes files for this package, which are not those of the script."""
    return _unpatched.get()


def unpatched() -> contextlib.AbstractContextManager[None]:
    """Return a context manager: files that this thread opens are not those of the script."""
    return setting(_unpatched, True)


@dataclass
class Change:
    """Change of a file by rank 0: it writes, renames or removes it, or makes a folder.

    Attributes
    ----------
    path : absolute path.
    existed : there was a file before.
    size, mode, times : its bytes, type and permissions, and times of its last access and change in nanoseconds.
    number : of the change, in the order of rank 0.
    held : rank 0 had the file open from an earlier change.
    kept : path at which rank 0 keeps it as it was; empty if nobody needs it.
    ended : the call has returned.
    closed : the change is complete.
    version : of the file afterwards; see ``version_of``.
    error : pickled error of the call, if it failed.
    real : path to which the path leads afterwards.
    result : of the call, if other ranks need it.
    """

    path: str
    existed: bool
    size: int
    mode: int = 0
    times: tuple[int, int] = (0, 0)
    number: int = 0
    held: bool = False
    kept: str = ""
    ended: bool = False
    closed: bool = False
    version: tuple[int, ...] = ()
    error: bytes | None = None
    real: str = ""
    result: Any = None


Numbered = list[tuple[int, Change]]
"""Changes with their numbers."""


class Journal:
    """Changes by rank 0, on another rank as far as this one knows them.

    Attributes
    ----------
    lock : no reply is given while it is held.
    """

    def __init__(self) -> None:
        self._changes: list[Change] = []
        self._by_path: defaultdict[str, list[Change]] = defaultdict(list)
        self._unclosed: dict[int, Change] = {}  # those that are not complete, by their numbers
        self.lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._changes)

    def of(self, path: str) -> list[Change]:
        """Return the changes of a file."""
        return self._by_path.get(path, [])

    def paths(self) -> list[str]:
        """Return the paths of all changes."""
        return list(self._by_path)

    def is_held(self, path: str) -> bool:
        """Return whether a change of a file is not complete."""
        with self.lock:  # the thread that answers closes changes
            return any(change.path == path for change in self._unclosed.values())

    def add(self, change: Change, moves: Iterable[tuple[str, str]] = ()) -> None:
        """Add the next change.

        Parameters
        ----------
        moves : files to rename, and their new paths: whoever misses one of them finds the change in the next reply.
        """
        with self.lock:
            for source, path in moves:
                os.rename(source, path)  # noqa: PTH104
            change.number = len(self._changes)
            if not change.closed:
                self._unclosed[change.number] = change
            self._by_path[change.path].append(change)
            self._changes.append(change)

    def close(self, path: str = "") -> None:
        """Note on rank 0 which files are closed meanwhile: one, or all."""
        with self.lock:
            for number, change in list(self._unclosed.items()):
                if change.ended and path in ("", change.path) and not is_open(change.path):
                    change.version = version_of(status_of(change.path))
                    change.closed = True
                    del self._unclosed[number]

    def known(self) -> tuple[int, list[int]]:
        """Return the number of changes, and the numbers of those that are not complete: the question to rank 0."""
        return len(self._changes), list(self._unclosed)

    def reply(self, known: tuple[int, list[int]]) -> Numbered:
        """Return the changes that another rank does not know; runs in another thread of rank 0."""
        begin, unclosed = known
        with self.lock:
            self.close()
            return [(number, self._changes[number]) for number in (*unclosed, *range(begin, len(self._changes)))]

    def take(self, answer: Numbered) -> None:
        """Take in an answer of rank 0."""
        with self.lock:
            for number, change in answer:
                if number >= len(self._changes):
                    self.add(change)
                    continue
                vars(self._changes[number]).update(vars(change))
                if change.closed:
                    self._unclosed.pop(number, None)


def status_of(path: str) -> os.stat_result | None:
    """Return the status of a file; None if there is none."""
    try:
        return _lstat(path)
    except OSError:
        return None


def version_of(status: os.stat_result | None) -> tuple[int, ...]:
    """Return inode, size and time of a file: another one, or one that has been written, differs. Empty: no file."""
    return () if status is None else (status.st_ino, status.st_size, status.st_mtime_ns)


def is_regular(path: str) -> bool:
    """Return whether a file is a regular one, or does not exist."""
    status = status_of(path)
    return status is None or stat.S_ISREG(status.st_mode)


def is_open(path: str, also_reading: bool = False) -> bool:
    """Return whether this process has a file open for writing. Where there is no /proc it is taken to be closed."""
    with unpatched(), contextlib.suppress(OSError):
        real = os.path.realpath(path)
        for number in os.listdir("/proc/self/fd"):  # noqa: PTH208
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}") == real:  # noqa: PTH115
                    flags = fcntl.fcntl(int(number), fcntl.F_GETFL)
                    if also_reading or flags & (os.O_WRONLY | os.O_RDWR):
                        return True
    return False
