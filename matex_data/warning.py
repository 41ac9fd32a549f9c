"""Warnings that name a line of the user's own code."""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from matex_data.paths import is_library


def warn(text: str) -> None:
    """Warn of something at the innermost line of code that belongs neither to this package nor to a library.

    The line where a user called is a number of frames away that changes with every function on the way.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_of_user(frame):
        frame = frame.f_back
    module = str(frame.f_globals.get("__name__", "<unknown>"))
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, UserWarning, frame.f_code.co_filename, frame.f_lineno, module, registry)


def _is_of_user(frame: FrameType) -> bool:
    if str(frame.f_globals.get("__name__")).partition(".")[0] == "matex_data":
        return False
    return not is_library(frame.f_code.co_filename)
