"""Stress of lifetimes: tiny caches and pools, many threads, several passes at once, passes left early, and forks.

A program of its own, since it changes caches, threads and the switch interval of its process::

    python tests/support/stress.py FOLDER THREADS FILES ROWS ROUNDS KIND...

It ends with an error if a sample is missing, comes twice or has a wrong value, and otherwise prints the number of
samples that it has compared.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import numpy as np
from mpi4py import MPI

from matex_data import open_dataset
from matex_data.io import files
from matex_data.readers.hdf5 import rows as hdf5_rows
from matex_data.readers.root import files as root_files
from matex_data.reading import buffers, source
from tests.support.stress_files import KINDS, Integers, Kind

SIZE = 2  # of every cache and pool
BATCH = 10  # samples; no multiple of the chunks
WINDOW_BYTES = 2048
FORK_SECONDS = 60.0  # in which a forked process has to end
SWITCH_INTERVAL = 1e-6  # seconds


def shrink() -> None:
    """Make every cache and pool of this process as small as it can be."""
    files.MOST_OPEN_FILES = hdf5_rows.MAX_OPEN_FILES = root_files.MAX_OPEN_FILES = SIZE
    buffers.KEPT_LARGE = buffers.KEPT_SMALL = SIZE
    source.CACHE_BYTES = SIZE * 64
    sys.setswitchinterval(SWITCH_INTERVAL)


class Stress:
    """Data set of one kind, whose samples are numbered from 0 to ``total``."""

    def __init__(self, kind: Kind, pattern: str, total: int) -> None:
        self._kind, self._total = kind, total
        self._data = open_dataset(pattern, comm=MPI.COMM_SELF, window_bytes=WINDOW_BYTES, **kind.options)

    def _pass(self, seed: int) -> Iterator[Integers]:
        for batch in self._data.batches(BATCH, shuffle=True, seed=seed, remainder="keep"):
            yield self._kind.numbers(batch)

    def check(self, seed: int) -> int:
        """Compare every sample of a pass, and return their number."""
        found = np.concatenate(list(self._pass(seed)))
        assert np.array_equal(np.sort(found), np.arange(self._total)), f"{self._total} samples: {found.tolist()}"
        return self._total

    def run(self, rounds: int) -> int:
        """Leave passes early, read others meanwhile, then the whole block; return the number of samples compared."""
        compared = 0
        for seed in range(rounds):
            early = self._pass(seed)
            compared += sum(map(len, islice(early, 2)))
            compared += self.check(seed + 100)
            early.close()
        assert np.array_equal(self._kind.numbers(self._data.load()), np.arange(self._total))
        return compared + self._total


def check_in_fork(all_stress: list[Stress], seed: int) -> None:
    """Read every data set in a forked process."""
    child = os.fork()
    if child == 0:
        faulthandler.dump_traceback_later(FORK_SECONDS / 2)
        try:
            for stress in all_stress:
                stress.check(seed)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + FORK_SECONDS
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(child, 9)
            os.waitpid(child, 0)
            raise TimeoutError("a forked process hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(ended[1]) == 0, "a forked process failed"


def main() -> None:
    """Run the stress that the command line asks for."""
    folder, threads, count, rows, rounds, *names = sys.argv[1:]
    os.environ["MATEX_THREADS"] = threads
    warnings.simplefilter("ignore")  # of compressed text
    shrink()
    all_stress = []
    for name in names:
        pattern = KINDS[name].fill(Path(folder) / name, int(count), int(rows))
        all_stress.append(Stress(KINDS[name], pattern, int(count) * int(rows)))
    with ThreadPoolExecutor(2 * len(all_stress)) as consumers:  # two of each data set
        running = [consumers.submit(stress.run, int(rounds)) for stress in all_stress for _ in range(2)]
        for seed in range(int(rounds)):
            check_in_fork(all_stress, seed)
        print(sum(future.result() for future in running))


if __name__ == "__main__":
    main()
