"""The network module of MPICH under ``srun --mpi=pmi2``, where that of UCX may hang in ``MPI_Init``.

MPICH from PyPI has two network modules, and prefers UCX. It cuts a node's addresses into texts of the length that
Slurm's PMI allows for a value, but with command and key such a line is longer than the buffer of ``slurmstepd``: it
reports "value not properly terminated in client request", and the ranks wait for ever (tried: MPICH 5.0, Slurm 22.05,
two ranks on each of two nodes). Addresses of libfabric fit into a line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NETMOD = "MPIR_CVAR_CH4_NETMOD"
"""Environment variable of MPICH: network module, read by ``MPI_Init``."""
_OTHER_LIBRARY = ("MPI4PY_LIBMPI", "MPI4PY_MPIABI")


@contextmanager
def short_addresses() -> Iterator[None]:
    """Context manager: let MPICH from PyPI choose libfabric, if Slurm's PMI connects ranks on several nodes.

    A module that the user has chosen stays.
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
