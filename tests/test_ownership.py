"""The rule of ownership: whoever uses a resource holds the object that owns it, also in a forked process."""

from __future__ import annotations

import ast
import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from matex_data.index import library
from matex_data.io import counters
from matex_data.locks import Lock, cached_property
from matex_data.mpi.communicator import Communicator
from matex_data.readers.images.stacks import pages as stack_pages
from matex_data.readers.root import entries
from tests.support.launch import ROOT

SOURCES = sorted(path for folder in ("matex_data", "readers") for path in (ROOT / folder).rglob("*.py"))
OWN_LOCKS = ROOT / "matex_data" / "locks.py"


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _calls(path: Path) -> Iterator[str]:
    return (ast.unparse(node.func) for node in ast.walk(_tree(path)) if isinstance(node, ast.Call))


def test_nothing_is_identified_by_its_address() -> None:
    assert [_id(path) for path in SOURCES if "id" in _calls(path)] == []


def test_a_descriptor_stays_with_the_object_that_closes_it() -> None:
    """Only one class keeps the number of a descriptor, and only its own methods use it."""
    keepers = set()
    for path in SOURCES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Attribute) and "descriptor" in node.attr:
                assert ast.unparse(node) == "self._descriptor", f"{_id(path)}, line {node.lineno}"
                keepers.add(_id(path))
            if isinstance(node, ast.Assign) and any(isinstance(target, ast.Attribute) for target in node.targets):
                assert "fileno()" not in ast.unparse(node.value), f"{_id(path)}, line {node.lineno}"
    assert keepers == {"matex_data/io/files.py"}


def test_locks_of_modules_are_free_after_a_fork() -> None:
    for path in SOURCES:
        tree = _tree(path)
        threads_locks = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "threading"
            for alias in node.names
            if alias.name in ("Lock", "RLock")
        } | {"threading.Lock", "threading.RLock"}
        for statement in tree.body:
            made = isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(statement.value, ast.Call)
            if made and path != OWN_LOCKS:
                assert ast.unparse(statement.value.func) not in threads_locks, _id(path)  # type: ignore[union-attr]


def test_properties_hold_no_lock_of_functools() -> None:
    for path in SOURCES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.ImportFrom) and node.module == "functools":
                assert "cached_property" not in [alias.name for alias in node.names], _id(path)


HELD: dict[str, Lock] = {
    "calls of a library": library._LIBRARY_LOCK,
    "trees of uproot": entries._LOCK,
    "counters": counters._LOCK,
    "decoders of TIFF": stack_pages._DECODERS_LOCK,
    "a communicator": Communicator()._busy,
}


def _succeeds_in_fork(action: Callable[[], bool]) -> bool:
    child = os.fork()
    if child == 0:
        signal.alarm(10)  # ends a process that hangs
        try:
            os._exit(0 if action() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("name", HELD)
def test_a_lock_that_another_thread_holds_is_free_after_a_fork(name: str) -> None:
    lock, held, end = HELD[name], threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            end.wait(30)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert held.wait(10), "another thread holds the lock"
        assert _succeeds_in_fork(lambda: lock.acquire(blocking=False))
        assert not lock.acquire(blocking=False)  # the parent's lock is still held
    finally:
        end.set()
        thread.join()


class _Slow:
    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()
        self.waits = True

    @cached_property
    def value(self) -> int:
        if self.waits:
            self.begun.set()
            self.end.wait(30)
        return 7


def test_a_property_that_another_thread_computes_is_free_after_a_fork() -> None:
    slow, other = _Slow(), _Slow()
    other.waits = False
    thread = threading.Thread(target=lambda: slow.value)
    thread.start()
    try:
        assert slow.begun.wait(10)
        assert other.value == 7  # of another object, at the same time
        assert _succeeds_in_fork(lambda: _without_cache(other) == 7)
    finally:
        slow.end.set()
        thread.join()
    assert slow.value == 7


def _without_cache(slow: _Slow) -> int:
    del slow.__dict__["value"]
    return slow.value
