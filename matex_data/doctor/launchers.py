"""The launchers of this machine, each tried on two ranks."""

from __future__ import annotations

import os
import shutil

from matex_data.doctor.report import Section
from matex_data.launching.launchers import (
    batch_system,
    choose,
    find_launchers,
    find_srun,
    plugin_for,
    plugins,
    srun_command,
)
from matex_data.launching.library import MpiLibrary
from matex_data.launching.start import mpiexec_command, start_ranks
from matex_data.machine import number_in

_TRIED = 4
"""Launchers that are tried, at most: one that hangs takes its time limit."""


def examine(library: MpiLibrary | None, is_job: bool) -> Section:
    """Return which launchers there are, and whether they connect ranks; in a job of ranks that are connected, say so.

    Parameters
    ----------
    library : MPI library of mpi4py; None if there is none.
    is_job : the ranks of this job are connected: a launcher that fits has started them.
    """
    section = Section("Launchers")
    job = batch_system()
    section.add("batch system", job and job[0], f"{job[0]} ({job[1]})" if job else "none: not in a job")
    if is_job:
        section.add("this job", True, "its launcher connects the ranks")
        return section
    fitting = []
    launchers = find_launchers(library)
    for launcher in launchers[:_TRIED]:
        found = {"path": launcher.path, "kind": launcher.kind, "fits": False}
        if library is None:
            text = "not tried: no MPI library"
        else:
            outcome = start_ranks(mpiexec_command(launcher, 2), 2)
            found["fits"] = outcome.connected
            text = outcome.text
        if found["fits"]:
            fitting.append(launcher.path)
        section.facts.setdefault("mpiexec", []).append(found)
        section.rows.append((launcher.kind or "unknown MPI", f"{launcher.path}: {text}"))
    if library is not None:
        fitting += _add_srun(section, library)
    if library is not None and not fitting:
        section.fail(
            f"no launcher connects ranks with {library.version}",
            "pip install mpich, or load the MPI module of the cluster and put its bin folder in front of PATH",
        )
    elif library is not None and launchers and not os.environ.get("SLURM_JOB_ID"):
        _compare_with_path(section, library, fitting)
    return section


def _compare_with_path(section: Section, library: MpiLibrary, fitting: list[str]) -> None:
    """Advise if ``mpiexec`` alone is another one than that which fits."""
    first = shutil.which("mpiexec")
    chosen = choose(find_launchers(library), library)
    if first and chosen and os.path.realpath(first) not in map(os.path.realpath, fitting):
        section.advise(
            f"the mpiexec on the path of programs ({first}) does not connect ranks with this MPI",
            f"use matex run -n, or {chosen.path}",
        )


def _add_srun(section: Section, library: MpiLibrary) -> list[str]:
    """Add ``srun`` with its plugins; return its path if it connects ranks."""
    srun = find_srun()
    if srun is None:
        return []
    available = plugins(srun.path)
    plugin = plugin_for(library, available)
    tried, connected = "", False
    if not available:
        tried = "srun does not answer: no Slurm here"
    elif plugin is None:
        tried = f"no plugin for this MPI among {', '.join(available)}"
    elif not os.environ.get("SLURM_JOB_ID"):
        tried = f"--mpi={plugin} fits; tried only within a job"
    else:
        ranks = number_in("SLURM_NTASKS") or 2
        outcome = start_ranks([*srun_command(srun.path, ranks, plugin), "--overlap"], ranks)
        tried, connected = f"--mpi={plugin}: {outcome.text}", outcome.connected
    section.facts["srun"] = {"path": srun.path, "plugins": list(available), "plugin": plugin, "fits": connected}
    section.rows.append(("srun", f"{srun.path}: {tried}"))
    if os.environ.get("SLURM_JOB_ID") and available and plugin is None:
        section.advise(
            f"srun has no plugin that connects ranks of {library.version} (--mpi={', '.join(available)})",
            "use mpiexec within the job, as matex run -n does; or install MPICH for pmi2, Open MPI for pmix",
        )
    return [srun.path] if connected or (plugin and not os.environ.get("SLURM_JOB_ID")) else []
