"""The MPI library, or a stand-in for one process where none is installed.

All modules import ``MPI`` from here. mpi4py is always installed, but it loads an MPI library that may be missing.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "FLUX_JOB_SIZE")
_RANKS = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID", "FLUX_TASK_RANK")


class NoMpiLibrary(ImportError):
    """Error of a process that was started as one of several ranks, without an MPI library."""


def launcher_rank() -> int:
    """Return the rank that the launcher gave to this process; 0 without a launcher."""
    return max([0, *_numbers(_RANKS)])


def _numbers(names: tuple[str, ...]) -> list[int]:
    values = (os.environ.get(name, "") for name in names)
    return [int(value) for value in values if value.isdecimal()]


def _check_single_process(error: Exception) -> None:
    """Raise ``NoMpiLibrary`` if a launcher started several ranks."""
    size = max([1, *_numbers(_SIZES)])
    if size > 1:
        reason = str(error).partition("\n")[0]
        raise NoMpiLibrary(
            f"{size} ranks need an MPI library, and mpi4py found none ({reason}): run `pip install mpich`, "
            "or load the MPI module of your cluster"
        ) from None


if TYPE_CHECKING:
    from mpi4py import MPI
else:
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        _check_single_process(error)
        from matex_data.mpi import single_process as MPI  # noqa: N812

__all__ = ["MPI", "NoMpiLibrary", "launcher_rank"]
