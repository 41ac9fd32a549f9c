"""Calls that a signal does not interrupt."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


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
