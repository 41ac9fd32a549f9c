"""Slurm's ``srun``: which of its plugins connects ranks of which MPI."""

from __future__ import annotations

import os
import re
import subprocess
from functools import cache

from matex_data.launching.launchers import SECONDS
from matex_data.launching.library import MpiLibrary


@cache
def plugins(srun: str) -> tuple[str, ...]:
    """Return the names that ``srun --mpi=list`` tells; none if it does not answer."""
    try:
        done = subprocess.run([srun, "--mpi=list"], capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return parse_plugins(done.stdout + done.stderr) if done.returncode == 0 else ()


def parse_plugins(text: str) -> tuple[str, ...]:
    """Return the names of plugins in the text of ``srun --mpi=list``, of any version of Slurm.

    >>> parse_plugins("MPI plugin types are...\\n\\tnone\\n\\tpmix\\nspecific pmix plugin versions available: pmix_v4")
    ('none', 'pmix', 'pmix_v4')
    >>> parse_plugins("srun: MPI types are...\\nsrun: none\\nsrun: pmi2")
    ('none', 'pmi2')
    """
    names = []
    for line in text.splitlines():
        line = line.strip().removeprefix("srun:").strip()
        if re.fullmatch(r"[a-z][a-z0-9_]*", line):
            names.append(line)
        elif "versions available:" in line:
            names += re.findall(r"[a-z][a-z0-9_]*", line.partition("available:")[2])
    return tuple(names)


def plugin_for(library: MpiLibrary, available: tuple[str, ...]) -> str | None:
    """Return the value of ``srun --mpi=`` for an MPI library; None if Slurm has no plugin that connects its ranks.

    Open MPI 5 speaks PMIx alone, and so do earlier ones that were built without Slurm's PMI. MPICH and its kin speak
    PMI-2 without further settings; Cray's has a plugin of its own.
    """
    wanted = {
        "openmpi": ("pmix", "pmi2") if library.number < (5,) else ("pmix",),
        "cray": ("cray_shasta", "pmi2", "pmix"),
    }.get(library.kind, ("pmi2", "pmix"))
    for name in wanted:
        if name in available:
            return name
        versions = [plugin for plugin in available if plugin.startswith(f"{name}_v")]
        if versions:
            return versions[-1]
    return None


def tasks_of_job() -> int | None:
    """Return the number of tasks that the job has asked Slurm for; None if it has not."""
    text = os.environ.get("SLURM_NTASKS", "")
    return int(text) if text.isdecimal() else None


def srun_command(srun: str, ranks: int, plugin: str) -> list[str]:
    """Return the start of a command: ``srun`` with a number of ranks, which end as soon as one of them fails.

    Since Slurm 22.05 ``srun`` no longer takes the cores of a task from ``SLURM_CPUS_PER_TASK``.
    """
    cores = os.environ.get("SLURM_CPUS_PER_TASK", "")
    bound = [f"--cpus-per-task={cores}"] if cores.isdecimal() else []
    return [srun, "-n", str(ranks), f"--mpi={plugin}", "--kill-on-bad-exit=1", *bound]
