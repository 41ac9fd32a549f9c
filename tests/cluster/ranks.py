"""What ranks do in jobs: arguments are the task, and its own. Each rank prints JSON objects, one on a line."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

import h5py  # noqa: F401  # before MPI, as programs do
import numpy as np

import matex_data as md
from matex_data.mpi.library import MPI

COMM = MPI.COMM_WORLD


def say(**facts: object) -> None:
    """Print facts in one write, since lines of ranks may mix."""
    os.write(1, (json.dumps({"rank": COMM.rank, "size": COMM.size, **facts}) + "\n").encode())


def read(path: str, out: str, mode: str = "auto") -> None:
    """Read an epoch; rank 0 writes the global batches, in the order of ranks and steps."""
    data = md.open_dataset(path, inputs="x", io=mode)
    begin = time.monotonic()
    own = [np.array(batch) for batch in data.batches(48, shuffle=True, seed=1)]
    say(node=MPI.Get_processor_name(), steps=len(own), seconds=time.monotonic() - begin)
    gathered = COMM.gather(own)
    if gathered is not None:
        np.save(out, np.stack([np.concatenate(parts) for parts in zip(*gathered, strict=True)]))


def die(path: str, victim: str, how: str) -> None:
    """Open a data set; one rank dies, the others wait for it."""
    data = md.open_dataset(path, inputs="x")
    next(iter(data.batches(48)))
    COMM.barrier()
    if COMM.rank == int(victim):
        time.sleep(1)
        say(time=time.time())
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        kept = []
        while True:  # until the memory limit of its cgroup
            kept.append(np.ones(1 << 20))
            say(time=time.time())
    data.statistics("x")


if __name__ == "__main__":
    {"read": read, "die": die}[sys.argv[1]](*sys.argv[2:])
