"""The examination: all sections, in one process and in jobs."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Sequence

from matex_data import machine
from matex_data.doctor import launchers, limits, mpi, nodes, report, storage
from matex_data.doctor.report import Section

SECONDS = 180
"""Time after which the process ends, also within MPI, which no other thread of Python could interrupt."""


def examine(path: str | None, output: Callable[[Sequence[Section]], None], *, with_tensorflow: bool = False) -> bool:
    """Show what a job finds here, on rank 0; return whether there is no error, on all ranks. *Collective* in a job.

    In a process that no launcher has started, MPI is tried in child processes alone. Where MPI does not connect the
    processes of a launcher, the first of them examines its machine.

    Parameters
    ----------
    path : of data: their file system is measured. None: leave it out.
    output : shows the sections; called after all communication, so that an error of it holds no rank.
    with_tensorflow : import TensorFlow, and tell which GPUs it sees.
    """
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    try:
        comm, error = mpi.connect()
        launched = machine.launched_rank()
        if error is not None and launched is not None and launched.rank > 0:
            return False
        section, library = mpi.examine(comm, error)
        sections: list[Section | None] = [section]
        if comm is None or comm.rank == 0:
            sections.append(launchers.examine(library, comm is not None))
        sections += [nodes.examine(comm, with_tensorflow), storage.examine(path, comm), limits.examine()]
        present = [section for section in sections if section is not None]
        sound = report.is_sound(present)
        if comm is not None:
            sound = bool(comm.bcast(sound))
        if comm is None or comm.rank == 0:
            output(present)
        return sound
    finally:
        faulthandler.cancel_dump_traceback_later()
