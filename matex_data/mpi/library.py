"""The MPI library, or a stand-in for one process where none is installed.

All modules import ``MPI`` from here. mpi4py is always installed, but it loads an MPI library that may be missing, or
that may not be the one whose launcher started this process.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from matex_data.errors import NoMpiLibrary, RanksNotConnected
from matex_data.machine import launch
from matex_data.mpi.launch_errors import print_in_one_line
from matex_data.mpi.netmod import short_addresses
from matex_data.mpi.processes import is_child_process, is_descendant_of_rank, mark_rank

__all__ = ["MPI"]

ALLOW_SINGLETONS = "MATEX_ALLOW_SINGLETONS"
"""Environment variable: neither empty nor 0 if processes of one launcher are meant to be independent."""

_independent = os.environ.get(ALLOW_SINGLETONS, "0") not in ("", "0") or is_descendant_of_rank()
_launch = None if _independent else launch()

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    try:
        if is_child_process():
            raise ImportError("a process that a rank has started must not initialize MPI")
        with short_addresses():
            from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        if _launch is not None and _launch.size > 1:
            print_in_one_line()
            raise NoMpiLibrary(_launch.size, str(error).partition("\n")[0]) from None
        from matex_data.mpi import single_process as MPI  # noqa: N812
    else:
        if MPI.Is_initialized() and MPI.COMM_WORLD.size > 1:
            mark_rank()
        elif _launch is not None and _launch.size > 1:
            print_in_one_line()
            library = MPI.Get_library_version().partition("\n")[0]
            raise RanksNotConnected(_launch.size, _launch.variable, " ".join(library.split()).rstrip("\0"))
