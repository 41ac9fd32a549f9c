"""Warnings that name a line of the user's own code, and those that are not given.

``warnings.catch_warnings`` is no way to leave one out: it replaces the filters of the process, and then puts the former
ones back, whatever other threads have ignored or added meanwhile.
"""

from __future__ import annotations

import re
import sys
import warnings
from contextlib import AbstractContextManager
from contextvars import ContextVar

from matex_data.locks import setting
from matex_data.paths import is_of_user

_QUIET = ContextVar("_QUIET", default=False)


def warn(text: str) -> None:
    """Warn of something at the innermost line of code that belongs neither to this package nor to a library.

    The line where a user called is a number of frames away that changes with every function on the way.
    """
    if _QUIET.get():
        return
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_of_user(frame):
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__", "<unknown>"))
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)


def quiet() -> AbstractContextManager[None]:
    """Return a context manager: `warn` says nothing in this thread, and in those that run in its context.

    Examples
    --------
    >>> with quiet():
    ...     warn("what was said before")
    """
    return setting(_QUIET, True)


def ignore_warnings(category: type[Warning], module: str = "", message: str = "") -> None:
    """Ignore warnings of a library about what it reads nevertheless. Filters of the user come first, but for a message.

    Parameters
    ----------
    category : of the warnings.
    module, message : regular expressions of their beginnings; "": any.
    """
    patterns = re.compile(message, re.I) if message else None, re.compile(module) if module else None
    if ("ignore", patterns[0], category, patterns[1], 0) not in warnings.filters:  # adding one shows old ones again
        warnings.filterwarnings("ignore", message, category, module, append=not message)
