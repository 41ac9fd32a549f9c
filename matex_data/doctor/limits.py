"""Limits of the system for this process, and variables of libraries that matter on clusters."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from matex_data.doctor.report import Section
from matex_data.words import nbytes_text

_FILES = 8192  # an eighth of it are the files that a reader keeps open
_VARIABLES = (
    *("HDF5_USE_FILE_LOCKING", "OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "SLURM_CPUS_PER_TASK", "MATEX_THREADS"),
    *("MATEX_READ_THREADS", "MATEX_TIMEOUT", "MATEX_IO_HINTS", "MATEX_MPIEXEC", "MPI4PY_MPIABI", "MPI4PY_LIBMPI"),
)


def examine() -> Section:
    """Return the limits and variables of this process."""
    section = Section("Limits")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    section.add("open files", soft if soft != resource.RLIM_INFINITY else None, _limit(soft))
    if soft != resource.RLIM_INFINITY and soft < _FILES:
        able = hard == resource.RLIM_INFINITY or hard > soft
        section.advise(
            f"a process may open {soft} files (ulimit -n), of which a reader keeps an eighth open",
            f"ulimit -n {min(hard, 65536) if hard != resource.RLIM_INFINITY else 65536} in the job's script"
            if able
            else "ask the administrators for a higher limit",
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = locked == resource.RLIM_INFINITY
    section.add("locked memory", None if unlimited else locked, "unlimited" if unlimited else nbytes_text(locked))
    if not unlimited and any(Path("/sys/class/infiniband").glob("*")):
        section.advise(
            f"a process may lock {nbytes_text(locked)} of memory, which InfiniBand needs without limit",
            "ulimit -l unlimited on the nodes; under Slurm PropagateResourceLimitsExcept=MEMLOCK in slurm.conf",
        )
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if space != resource.RLIM_INFINITY:
        section.add("address space", space, f"{nbytes_text(space)} (ulimit -v)")
    values = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    section.facts["variables"] = values
    section.rows.append(("HDF5_USE_FILE_LOCKING", values.get("HDF5_USE_FILE_LOCKING", "not set: HDF5 locks files")))
    section.rows += [(name, value) for name, value in values.items() if name != "HDF5_USE_FILE_LOCKING"]
    return section


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}"
