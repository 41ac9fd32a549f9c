"""Print the seconds of a message without content between two ranks, and the bytes a second of a large one."""

from __future__ import annotations

import json
import statistics
import time

import numpy as np
from mpi4py import MPI


def seconds(comm: MPI.Intracomm, nbytes: int, repetitions: int) -> float:
    """Return the seconds of a message of so many bytes. *Collective* among two ranks."""
    data, found = np.zeros(nbytes, np.uint8), []
    for _ in range(repetitions):
        comm.Barrier()
        begin = time.perf_counter()
        for sender in (0, 1):
            if comm.rank == sender:
                comm.Send(data, 1 - sender)
            else:
                comm.Recv(data, sender)
        found.append((time.perf_counter() - begin) / 2)
    return statistics.median(found)


if __name__ == "__main__":
    latency, large = seconds(MPI.COMM_WORLD, 1, 50), seconds(MPI.COMM_WORLD, 1 << 24, 5)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps({"latency": latency, "bandwidth": (1 << 24) / large}), flush=True)
