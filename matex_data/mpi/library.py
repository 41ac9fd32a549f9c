"""The MPI library, or a stand-in for one process where none is installed.

All modules import ``MPI`` from here. mpi4py is always installed, but it loads an MPI library that may be missing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from matex_data.errors import NoMpiLibrary
from matex_data.machine import launched_rank
from matex_data.mpi import abort

if TYPE_CHECKING:
    from mpi4py import MPI
else:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        launched = launched_rank()
        if launched is not None and launched.size > 1:
            abort.install()  # which prints this error as one line
            raise NoMpiLibrary(launched.size, str(error).partition("\n")[0]) from None
        from matex_data.mpi import single_process as MPI  # noqa: N812

__all__ = ["MPI"]
