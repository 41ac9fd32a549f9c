"""The MPI of mpi4py: the library, its level of threads, and whether it connects the processes of a launcher."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from matex_data import machine
from matex_data.doctor.report import Section
from matex_data.errors import DataError, NoMpiLibrary, RanksNotConnected
from matex_data.launching.library import MpiLibrary, mpi_library
from matex_data.launching.start import start_alone

if TYPE_CHECKING:
    from matex_data.mpi.library import MPI

LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
_MULTIPLE = 3


def connect() -> tuple[MPI.Intracomm | None, DataError | NoMpiLibrary | None]:
    """Return the ranks of this job, or the error of its MPI; neither in a process that no launcher has started.

    *Collective* in a job.
    """
    launched = machine.launch()
    if launched is None or (launched.size == 1 and machine.launched_rank() is not None):
        return None, None  # MPI might end this process: a child tries it
    try:
        from matex_data.mpi.library import MPI
    except (RanksNotConnected, NoMpiLibrary) as error:
        return None, error
    return (MPI.COMM_WORLD, None) if MPI.COMM_WORLD.size > 1 else (None, None)


def examine(comm: MPI.Intracomm | None, error: DataError | NoMpiLibrary | None) -> tuple[Section, MpiLibrary | None]:
    """Return what there is to say about MPI, and the library."""
    section, library = Section("MPI"), None
    try:
        library = mpi_library()
    except DataError as missing:
        section.add("library", None, f"none: {missing.found}")
        section.fail("mpi4py loads no MPI library, so that a job has one rank", f"{missing.remedy}")
    else:
        standard = f"MPI {library.standard}, interface (ABI) of {library.abi or 'the MPI that mpi4py was built with'}"
        section.add("library", library.version)
        section.add("file", library.file or None, library.file or "the system does not tell")
        section.add("mpi4py", library.mpi4py, f"{library.mpi4py}; {standard}")
        section.facts |= {"kind": library.kind, "standard": library.standard, "abi": library.abi}
    _add_start(section, comm, library is not None and error is None)
    _add_launch(section, comm, error)
    return section, library


def _add_start(section: Section, comm: MPI.Intracomm | None, loads: bool) -> None:
    """Add the level of threads with which MPI starts, in this process or in one of its own."""
    if comm is not None:
        from matex_data.mpi.library import MPI

        level = MPI.Query_thread()
    elif loads:
        outcome = start_alone()
        if outcome.level is None:
            section.add("threads", None, f"MPI does not start: {outcome.text}")
            section.fail(
                f"MPI does not start in one process: {outcome.text}",
                "see that /dev/shm and TMPDIR can be written to; MPICH: MPIR_CVAR_CH4_NETMOD=ofi; "
                "Open MPI: OMPI_MCA_pml=ob1 OMPI_MCA_btl=self,sm,tcp",
            )
            return
        level = outcome.level
    else:
        return
    section.add("threads", LEVELS[level])
    if level < _MULTIPLE:
        section.advise(
            f"MPI allows {LEVELS[level]} only: ranks do not read collectively",
            "load an MPI with MPI_THREAD_MULTIPLE, and leave mpi4py.rc.thread_level as it is",
        )


def _add_launch(section: Section, comm: MPI.Intracomm | None, error: DataError | NoMpiLibrary | None) -> None:
    launched = machine.launch()
    section.add("process management", _pmi() or None, _pmi() or "none: no launcher has started this process")
    if comm is not None:
        section.add("ranks", comm.size)
    elif launched is not None and error is not None:
        section.add("ranks", 1, f"1, of {launched.size} processes that the launcher has started ({launched.variable})")
        problem = error.problem if isinstance(error, RanksNotConnected) else str(error)
        section.fail(
            problem, "start the ranks with matex run -n, or with one of the launchers above that connects them"
        )
    else:
        section.add("ranks", 1)


def _pmi() -> str:
    """Return the interfaces by which a launcher introduces this process, as the environment shows them."""
    found = []
    if "PMIX_RANK" in os.environ:
        found.append("PMIx (PMIX_RANK)")
    if "PMI_RANK" in os.environ or "PMI_FD" in os.environ:
        found.append("PMI (PMI_RANK)")
    if "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ:
        found.append("step of Slurm (SLURM_PROCID)")
    return ", ".join(found)
