"""Clock, UUIDs, ``secrets``, standard input, locks, ports and children of a script: all ranks get what rank 0 gets.

Names and loops that depend on them are so the same on all ranks.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import fcntl
import functools
import io
import logging
import multiprocessing.process
import os
import random
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from matex_data.mpi.activity import busy, user_location
from matex_data.paths import is_of_user
from matex_data.training.launcher.journal import is_unpatched, unpatched
from matex_data.training.launcher.overlay import Overlay
from matex_data.training.launcher.root import Root, is_called_by_script, say_once
from matex_data.training.replacements import patch

log = logging.getLogger("matex_data.training")

CLOCKS = ("time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns")
WITHOUT_TIME = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}
"""Functions that take the present time without their last argument, and the number of those before it."""


def patch_inputs(root: Root, files: Overlay) -> None:
    """Patch clocks, standard input, locks of files and functions that start processes."""
    _patch_clocks(root)
    _patch_input(root)
    _patch_locks(root)
    _patch_children(root, files)
    if root.rank > 0:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)  # what a child of this rank would wait for, nobody types
        os.close(nothing)


def _patch_clocks(root: Root) -> None:
    def clock(original: Any, *args: Any) -> Any:
        name = original.__name__
        frame = sys._getframe(2)
        names_files = frame.f_globals.get("__name__") == "logging.handlers" and is_called_by_script()
        if len(args) > WITHOUT_TIME.get(name, 0) or not (names_files or is_of_user(frame)):
            return original(*args)
        return root.value(name, lambda: original(*args))

    def identity(original: Any, *args: Any) -> Any:
        return root.value(original.__name__, lambda: original(*args))  # libraries name files by it as well

    def entropy(original: Any, size: int) -> Any:
        frame: FrameType | None = sys._getframe(2)
        while frame and frame.f_globals.get("__name__") in ("random", "secrets"):
            frame = frame.f_back
        return root.value("urandom", lambda: original(size)) if frame and is_of_user(frame) else original(size)

    stamp = time.time
    patch(os, entropy, "urandom")
    random._urandom = os.urandom  # type: ignore[attr-defined]  # by which ``secrets`` draws
    patch(time, clock, *CLOCKS, *WITHOUT_TIME)
    patch(uuid, identity, "uuid1", "uuid4")

    def now(frame: Any) -> float:
        return float(root.value("datetime", stamp)) if is_of_user(frame) else stamp()

    shared = ModuleType("datetime", datetime.__doc__)
    vars(shared).update(vars(datetime), datetime=_dated(datetime.datetime, now), date=_dated(datetime.date, now))
    import_module = builtins.__import__

    @functools.wraps(import_module)
    def import_shared(name: str, *args: Any, **kwargs: Any) -> Any:
        found = import_module(name, *args, **kwargs)
        return shared if found is datetime and is_of_user(sys._getframe(1)) else found

    builtins.__import__ = import_shared


def _dated(original: Any, now: Callable[[Any], float]) -> Any:
    """Return a class for scripts in place of one of ``datetime``: it makes objects of that one, by another clock."""

    class OfAll(type(original)):  # type: ignore[misc]
        def __new__(cls, name: str, bases: tuple[Any, ...], members: dict[str, Any]) -> Any:
            if members.get("__new__") is make:
                return super().__new__(cls, name, bases, members)
            return type(name, tuple(original if isinstance(base, OfAll) else base for base in bases), members)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

        def __subclasscheck__(cls, subclass: Any) -> bool:
            return issubclass(subclass, original)

        def __eq__(cls, other: object) -> bool:
            return other is original or other is cls

        def __hash__(cls) -> int:
            return hash(original)

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    def of_now(cls: Any, tz: Any = None) -> Any:
        stamp = now(sys._getframe(1))
        return cls.fromtimestamp(stamp) if tz is None else cls.fromtimestamp(stamp, tz)

    def of_today(cls: Any) -> Any:
        return cls.fromtimestamp(now(sys._getframe(1)))

    def of_utc(cls: Any) -> Any:
        return cls.fromtimestamp(now(sys._getframe(1)), datetime.UTC).replace(tzinfo=None)

    methods: dict[str, Any] = {"__new__": make, "today": classmethod(of_today)}
    if hasattr(original, "utcnow"):
        methods.update(now=classmethod(of_now), utcnow=classmethod(of_utc))
    named = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__slots__": ()}
    return OfAll(original.__name__, (original,), {**named, **methods})


def _patch_input(root: Root) -> None:
    """Let rank 0 alone read standard input; the others get what it has read."""
    stdin = sys.stdin

    def read(make: Callable[[], Any]) -> Any:
        def wait() -> Any:
            with busy("reading standard input"):
                return make()

        return root.outcome("standard input", wait)

    @functools.wraps(input)
    def ask(prompt: Any = "", /) -> str:
        sys.stdout.write(str(prompt))
        sys.stdout.flush()
        line: str = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")

    class Input(io.RawIOBase):
        """Standard input of the job."""

        name = "<stdin>"

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            data: bytes = read(lambda: os.read(stdin.fileno(), len(buffer)))
            buffer[: len(data)] = data
            return len(data)

        def fileno(self) -> int:
            return stdin.fileno()

        def isatty(self) -> bool:
            return stdin.isatty()

    builtins.input = ask
    if stdin is not None:
        sys.stdin = io.TextIOWrapper(io.BufferedReader(Input()), stdin.encoding, stdin.errors)


def _patch_locks(root: Root) -> None:
    """Let rank 0 alone lock files, for all: another rank would wait for a lock that rank 0 holds."""

    def lock(original: Any, *args: Any) -> Any:
        if not is_called_by_script():
            return original(*args)
        return root.outcome("a lock", lambda: original(*args))

    patch(fcntl, lock, "flock", "lockf")


def _patch_children(root: Root, files: Overlay) -> None:
    """Patch functions that start processes: each rank starts its own, after rank 0's has ended, which is said once."""

    def start(original: Any, *args: Any, **kwargs: Any) -> Any:
        if is_unpatched() or not root.is_shared() or not is_called_by_script():
            return original(*args, **kwargs)
        ends = original.__name__ in ("system", "run")
        say_once(
            root.rank,
            "this script starts processes, at %s: each rank starts its own, and what they write is written by all "
            "ranks\n"
            "  remedy: if matex_data.training.world().rank == 0, where one is enough",
            user_location(),
        )
        if root.rank > 0:
            files.settle()
            if ends:
                root.value("a process", lambda: None)
        try:
            with busy(f"{original.__name__}()") if ends else contextlib.nullcontext(), unpatched():
                return original(*args, **kwargs)
        finally:
            if ends and root.rank == 0:
                root.value("a process", lambda: None)

    patch(os, start, "system")
    patch(subprocess, start, "run")
    patch(subprocess.Popen, start, "__init__")
    patch(multiprocessing.process.BaseProcess, start, "start")


def patch_ports(rank: int) -> None:
    """Let ``bind`` of other ranks than 0 take any free port in place of the one that is asked for.

    Clients of the script reach the server of rank 0 as in one process, and rank 0 raises the error if it cannot listen.
    """
    if rank == 0:
        return

    def bind(original: Any, self: socket.socket, address: Any, /) -> None:
        internet = self.family in (socket.AF_INET, socket.AF_INET6) and self.type == socket.SOCK_STREAM
        if not internet or not address[1]:
            original(self, address)
            return
        original(self, (address[0], 0, *address[2:]))
        log.info("rank %d listens at port %d, rank 0 at %d", rank, self.getsockname()[1], address[1])

    patch(socket.socket, bind, "bind")
