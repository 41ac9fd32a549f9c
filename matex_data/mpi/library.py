"""The MPI library, or a stand-in for one process where none is installed.

All modules import ``MPI`` from here. mpi4py is always installed, but it loads an MPI library that may be missing, or
that may not be the one whose launcher started this process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from matex_data.errors import NoMpiLibrary, RanksNotConnected
from matex_data.machine import launch
from matex_data.mpi.launch_errors import print_in_one_line
from matex_data.mpi.processes import is_child_process, is_descendant_of_rank, mark_rank

NETMOD = "MPIR_CVAR_CH4_NETMOD"
"""Environment variable of MPICH: network module, read by ``MPI_Init``."""
_OTHER_LIBRARY = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")


@contextmanager
def short_addresses() -> Iterator[None]:
    """Context manager: let MPICH from PyPI choose libfabric, if Slurm's PMI connects ranks on several nodes.

    MPICH prefers UCX, and cuts a node's addresses into texts of the length that Slurm's PMI allows for a value. With
    command and key such a line is longer than the buffer of ``slurmstepd``, which reports "value not properly
    terminated in client request", and the ranks wait for ever (tried: MPICH 5.0, Slurm 22.05, ``srun --mpi=pmi2``, two
    ranks on each of two nodes). Addresses of libfabric fit into a line. A module that the user has chosen stays.
    """
    if NETMOD in os.environ or not (_slurm_connects_nodes() and _is_from_pypi()):
        yield
        return
    os.environ[NETMOD] = "ofi"
    try:
        yield
    finally:
        os.environ.pop(NETMOD, None)


def _slurm_connects_nodes() -> bool:
    """Return whether Slurm has started this rank on one of several nodes, with its own PMI."""
    nodes = os.environ.get("SLURM_STEP_NUM_NODES", "")
    return "PMI_FD" in os.environ and nodes.isdecimal() and int(nodes) > 1


def _is_from_pypi() -> bool:
    """Return whether mpi4py loads the library that the package ``mpich`` has put beside Python."""
    named = any(name in os.environ for name in _OTHER_LIBRARY)
    return not named and Path(sys.prefix, "lib", "libmpi.so.12").exists()


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
