"""Launchers of MPI ranks on this machine: where they are, of which MPI, and which plugin of Slurm fits."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path

from matex_data.launching.library import MPICH_KINDS, MpiLibrary, kind_of
from matex_data.machine import number_in, without_rank

MPIEXEC = "MATEX_MPIEXEC"
"""Environment variable: the mpiexec that is used, whatever others there are."""
SECONDS = 20.0
"""Time in which a launcher has to tell its version."""
_NAMES = ("mpiexec", "mpirun")
_BATCH_SYSTEMS = {"SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF", "FLUX_URI": "Flux"}


@dataclass(frozen=True)
class Launcher:
    """Program that starts ranks.

    Attributes
    ----------
    path : of the program, as it was found.
    kind : MPI that it belongs to, as of ``MpiLibrary``; "srun"; or "" if it does not tell.
    version : first line of what it tells about its version.
    """

    path: str
    kind: str
    version: str

    def fits(self, library: MpiLibrary) -> bool | None:
        """Return whether it connects ranks with this library; None if it does not tell of which MPI it is."""
        if self.kind in ("", "srun") or not library.kind:
            return None
        return self.kind == library.kind or {self.kind, library.kind} <= set(MPICH_KINDS)


def batch_system() -> tuple[str, str] | None:
    """Return the name of the batch system in whose job this process is, and the variable that tells so; or None."""
    return next(((name, variable) for variable, name in _BATCH_SYSTEMS.items() if os.environ.get(variable)), None)


def find_launchers(library: MpiLibrary | None) -> list[Launcher]:
    """Return each ``mpiexec``, or ``mpirun`` where there is none, that this process can find, the one to prefer first.

    The order: ``MATEX_MPIEXEC``; in a job of a batch system other than Slurm, the path of programs, where the site has
    put its own; beside the MPI library; beside Python; the path of programs.
    """
    job = batch_system()
    on_path = list(_on_path())
    beside = [*(_beside_library(library) if library else ()), *_in_folder(Path(sys.prefix, "bin"))]
    found = [*on_path, *beside] if job and job[0] != "Slurm" else [*beside, *on_path]
    named = shutil.which(os.environ.get(MPIEXEC) or "")
    unique: dict[str, str] = {}
    for path in [*([named] if named else []), *found]:
        unique.setdefault(os.path.realpath(path), path)
    return [_describe(path) for path in unique.values()]


def find_srun() -> Launcher | None:
    """Return the ``srun`` of Slurm, or None."""
    path = shutil.which("srun")
    return None if path is None else Launcher(path, "srun", _version(path))


def choose(launchers: list[Launcher], library: MpiLibrary) -> Launcher | None:
    """Return the launcher that fits the library; None if there is none.

    One that does not tell its MPI is a site's own, and is chosen in jobs of a batch system, or if ``MATEX_MPIEXEC``
    names it.
    """
    trusted = batch_system() is not None
    for launcher in launchers:
        fits = launcher.fits(library)
        named = shutil.which(os.environ.get(MPIEXEC) or "") == launcher.path
        if fits or (fits is None and (trusted or named)):
            return launcher
    return None


def _beside_library(library: MpiLibrary) -> Iterator[str]:
    """Yield launchers in the ``bin`` folders above the library's own, as ``/usr/bin`` of ``/usr/lib/x86_64-…``.

    Where several MPIs share a folder (Debian), the names of their launchers end in their kind: ``mpiexec.openmpi``.
    """
    if library.file:
        for folder in list(Path(library.file).parents)[:5]:
            yield from _in_folder(folder / "bin", f".{library.kind}")
            yield from _in_folder(folder / "bin")


def _on_path() -> Iterator[str]:
    for folder in os.environ.get("PATH", os.defpath).split(os.pathsep):
        yield from _in_folder(Path(folder or "."))


def _in_folder(folder: Path, suffix: str = "") -> Iterator[str]:
    """Yield the launcher of a folder: one of the two names, which are the same program."""
    paths = (folder / f"{name}{suffix}" for name in _NAMES)
    yield from islice((str(path) for path in paths if path.is_file() and os.access(path, os.X_OK)), 1)


def _describe(path: str) -> Launcher:
    text = _version(path)
    return Launcher(path, kind_of(text), " ".join(text.partition("\n")[0].split()))


@cache
def _version(path: str) -> str:
    try:
        done = subprocess.run(
            [path, "--version"],
            env=without_rank(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no version: {error}"
    return (done.stdout or done.stderr).strip()


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


def srun_command(srun: str, ranks: int, plugin: str) -> list[str]:
    """Return the start of a command: ``srun`` with a number of ranks, which end as soon as one of them fails.

    Since Slurm 22.05 ``srun`` no longer takes the cores of a task from ``SLURM_CPUS_PER_TASK``.
    """
    cores = number_in("SLURM_CPUS_PER_TASK")
    bound = [] if cores is None else [f"--cpus-per-task={cores}"]
    return [srun, "-n", str(ranks), f"--mpi={plugin}", "--kill-on-bad-exit=1", *bound]
