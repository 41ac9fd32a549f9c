"""Stress of lifetimes: tiny caches and pools, many threads, several passes at once, passes left early, and forks.

A program of its own, since it changes caches, threads and the switch interval of its process::

    python tests/support/stress.py FOLDER THREADS FILES ROWS ROUNDS KIND...
    python tests/support/stress.py FOLDER THREADS FILES ROWS ROUNDS KIND... --seconds 600

With ``--seconds``, threads subscript, show and read all data sets for so long, and signals interrupt the main thread,
which does the same, at random moments.

It ends with an error if a sample is missing, comes twice or has a wrong value, or if a call does not end,
and otherwise prints the number of samples that it has compared.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import os
import random
import signal
import sys
import threading
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
CALL_SECONDS = 120.0  # in which a call has to end: twelve threads that draw share two cores
CALLERS = 12  # threads that use the data sets while signals interrupt one of them
DRAWING = 2  # of them that draw: matplotlib draws one picture at a time
INTERRUPT_SECONDS = (1e-4, 0.3)  # from one interrupt to the next


def shrink() -> None:
    """Make every cache and pool of this process as small as it can be."""
    files.MOST_OPEN_FILES = hdf5_rows.OPEN.most = root_files.OPEN.most = SIZE
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

    def subscript(self, draw: random.Random) -> int:
        """Read samples by their positions, and return their number."""
        positions = [draw.randrange(self._total) for _ in range(draw.choice([1, 1, 5]))]
        batch = self._data[positions]
        assert self._kind.numbers(batch).tolist() == positions
        return len(positions)

    def head(self, draw: random.Random) -> int:
        """Show the first samples as a table."""
        count = draw.randrange(1, min(5, self._total))
        assert self._kind.numbers(self._data.head(count)).tolist() == list(range(count))
        return count

    def picture(self, draw: random.Random) -> int:
        """Show the data set as a notebook does."""
        assert "<" in self._data._repr_html_()
        return 0

    def some_batches(self, draw: random.Random) -> int:
        """Read a pass, whole or in part."""
        if draw.random() < 0.5:
            return self.check(draw.randrange(1000))
        return sum(map(len, islice(self._pass(draw.randrange(1000)), draw.randrange(3))))


class Callers:
    """Threads that use data sets until an end, of which signals interrupt the main one.

    Parameters
    ----------
    all_stress : the data sets.
    seconds : for which they run.
    """

    def __init__(self, all_stress: list[Stress], seconds: float) -> None:
        self._all, self._end = all_stress, time.monotonic() + seconds
        self._began: dict[int, tuple[float, str]] = {}
        self._errors: list[BaseException] = []
        self.compared = self.interrupted = 0

    def run(self) -> int:
        """Run, and return the number of samples that were compared."""
        threads = [threading.Thread(target=self._use, args=(number,), daemon=True) for number in range(1, CALLERS)]
        for thread in (*threads, threading.Thread(target=self._watch, daemon=True)):
            thread.start()
        signal.signal(signal.SIGALRM, self._interrupt)
        draw = random.Random(0)
        while time.monotonic() < self._end and not self._errors:
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(*INTERRUPT_SECONDS) * draw.random() ** 3)
                while time.monotonic() < self._end:
                    self._call(0, draw)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                self.interrupted += 1
            except RuntimeError as error:  # of a condition that is left while it is waited for
                if not isinstance(error.__context__, KeyboardInterrupt):
                    raise
        signal.setitimer(signal.ITIMER_REAL, 0)
        for thread in threads:
            thread.join(CALL_SECONDS)
        if self._errors:
            raise self._errors[0]
        return self.compared

    def _use(self, number: int) -> None:
        draw = random.Random(number)
        try:
            while time.monotonic() < self._end and not self._errors:
                self.compared += self._call(number, draw)
        except BaseException as error:
            self._errors.append(error)

    def _call(self, number: int, draw: random.Random) -> int:
        stress = draw.choice(self._all)
        actions = (stress.subscript, stress.head, stress.some_batches, stress.picture)
        action = draw.choices(actions, (20, 10, 9, number < DRAWING))[0]
        self._began[number] = (time.monotonic(), action.__name__)
        try:
            return action(draw)
        finally:
            self._began.pop(number, None)

    def _watch(self) -> None:
        """End the process, with the stacks of all threads, if a call does not end."""
        while time.monotonic() < self._end + CALL_SECONDS:
            time.sleep(1)
            late = [name for begin, name in list(self._began.values()) if time.monotonic() - begin > CALL_SECONDS]
            if late:
                sys.stderr.write(f"these calls do not end: {late}\n")
                faulthandler.dump_traceback(all_threads=True)
                os._exit(1)

    def _interrupt(self, *_: object) -> None:
        raise KeyboardInterrupt


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
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=0)
    options, (folder, threads, count, rows, rounds, *names) = parser.parse_known_args()
    os.environ["MATEX_THREADS"] = threads
    warnings.simplefilter("ignore")  # of compressed text
    shrink()
    all_stress = []
    for name in names:
        pattern = KINDS[name].fill(Path(folder) / name, int(count), int(rows))
        all_stress.append(Stress(KINDS[name], pattern, int(count) * int(rows)))
    if options.seconds:
        importlib.import_module("matplotlib.figure")  # which an interrupt would leave half imported
        sys.setswitchinterval(10 * SWITCH_INTERVAL)  # pictures would take minutes
        callers = Callers(all_stress, options.seconds)
        print(callers.run())
        sys.stderr.write(f"{callers.interrupted} interrupts\n")
        return
    with ThreadPoolExecutor(2 * len(all_stress)) as consumers:  # two of each data set
        running = [consumers.submit(stress.run, int(rounds)) for stress in all_stress for _ in range(2)]
        for seed in range(int(rounds)):
            check_in_fork(all_stress, seed)
        print(sum(future.result() for future in running))


if __name__ == "__main__":
    main()
