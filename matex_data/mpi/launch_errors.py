"""Errors of processes that have no MPI or are not connected, printed as one line without a traceback."""

from __future__ import annotations

import sys
from functools import cache
from types import TracebackType

from matex_data.errors import NoMpiLibrary, RanksNotConnected
from matex_data.machine import launched_rank


@cache
def print_in_one_line() -> None:
    """Set an exception hook that prints such an error with ``print_launch_error``. Once in a process."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, NoMpiLibrary | RanksNotConnected):
            print_launch_error(error)
        else:
            previous(kind, error, trace)

    sys.excepthook = hook


def print_launch_error(error: Exception) -> None:
    """Write the error to stderr without a traceback, on the rank that the launcher numbers 0."""
    launched = launched_rank()
    if launched is None or launched.rank == 0:
        sys.stderr.write(f"matex_data: {error}\n")
