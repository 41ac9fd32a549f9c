"""Locks that a forked process finds free, properties that need none, calls that no signal interrupts, and settings."""

from __future__ import annotations

import _thread
import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")


class Lock:
    """Lock for the objects that a forked process goes on to use.

    Only the thread that forks lives on in the child. A lock that any other one holds at that moment would stay locked
    there for ever, so that in the child every lock is replaced by a free one. What such a lock protects must be
    usable at any moment, or be given up after a fork as well.

    Examples
    --------
    >>> lock = Lock()
    >>> with lock:
    ...     lock.acquire(blocking=False)
    False
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        _LOCKS.add(self)

    def __reduce__(self) -> tuple[type[Lock], tuple[()]]:
        return Lock, ()  # free in another process

    @property
    def acquire(self) -> Callable[..., bool]:
        """Function that returns whether this thread holds the lock from now on, like that of ``threading.Lock``."""
        return self._lock.acquire

    @property
    def release(self) -> Callable[[], None]:
        """Function that lets another thread have the lock."""
        return self._lock.release

    def renew(self) -> None:
        """Replace the lock by a free one."""
        self._lock = threading.Lock()

    # Properties, so that ``with`` calls the functions of the inner lock: a signal would interrupt one in Python that
    # has just taken it, which nobody would then release.
    @property
    def __enter__(self) -> Callable[[], bool]:
        return self._lock.__enter__

    @property
    def __exit__(self) -> Callable[..., None]:
        return self._lock.__exit__


class Condition(threading.Condition):
    """Condition of which a signal leaves no lock behind; see `Lock`.

    Examples
    --------
    >>> change = Condition()
    >>> with change:
    ...     change.wait_for(lambda: True)
    True
    """

    def __init__(self) -> None:
        self._inner = threading.RLock()
        super().__init__(self._inner)

    @property
    def __enter__(self) -> Callable[[], bool]:
        return self._inner.__enter__

    @property
    def __exit__(self) -> Callable[..., None]:
        return self._inner.__exit__


_LOCKS: weakref.WeakSet[Lock] = weakref.WeakSet()


def _renew_all() -> None:
    for lock in list(_LOCKS):
        lock.renew()


os.register_at_fork(after_in_child=_renew_all)


class cached_property(functools.cached_property[T]):  # noqa: N801 (named as the one of functools)
    """Property that is computed at its first use, by two threads at once if need be.

    Until Python 3.11, that of ``functools`` holds one lock for all objects while it computes a value. A process that
    is forked meanwhile would wait for it for ever.

    Parameters
    ----------
    function : computes the value; a pure function of its object.

    Examples
    --------
    >>> class Square:
    ...     side = 3
    ...
    ...     @cached_property
    ...     def area(self):
    ...         return self.side**2
    >>> Square().area
    9
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        super().__init__(function)
        self.lock = nullcontext()


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Context manager: a context variable has another value in this thread, and in those that run in its context.

    Examples
    --------
    >>> verbose = ContextVar("verbose", default=False)
    >>> with setting(verbose, True):
    ...     verbose.get()
    True
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def shielded(function: Callable[..., T], *arguments: Any) -> T:
    """Return ``function(*arguments)``, called where no signal interrupts it, whatever thread asks for it.

    Python raises ``KeyboardInterrupt``, and what the handlers of other signals raise, in the main thread, between any
    two instructions: a condition or a future whose lock the thread has just taken stays locked for ever. So the main
    thread has another one call the function, and waits for it. An interrupt ends this wait; the function goes on to its
    end, and its result is lost.

    Examples
    --------
    >>> shielded(divmod, 7, 2)
    (3, 1)
    """
    if threading.get_ident() != threading.main_thread().ident:
        return function(*arguments)
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Lock()
    ended.acquire()

    def call() -> None:
        sys.settrace(threading.gettrace())
        try:
            results.append(function(*arguments))
        except BaseException as error:
            errors.append(error)
        finally:
            ended.release()

    try:
        _thread.start_new_thread(call, ())  # starting a ``threading.Thread`` waits for a condition
    except RuntimeError:  # no memory for a thread, or the interpreter ends
        return function(*arguments)
    ended.acquire()
    if errors:
        raise errors.pop()
    return results.pop()
