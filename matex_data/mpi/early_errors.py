"""Let an uncaught error end the job also before the first data set has set an exception hook."""

from __future__ import annotations

import atexit
import sys
from contextlib import suppress
from functools import cache

from matex_data.errors import NoMpiLibrary, RanksNotConnected


@cache
def notice() -> None:
    """Look for an uncaught error when this process exits. Once in a process; sets no hook, starts no MPI."""
    atexit.register(_end_after_error)


def _end_after_error() -> None:
    if "mpi4py.MPI" in sys.modules and getattr(sys, "last_value", None) is not None:
        with suppress(NoMpiLibrary, RanksNotConnected):  # there are no other ranks
            from matex_data.mpi import abort  # imports MPI, which this program has imported already

            abort.end_without_hook()
