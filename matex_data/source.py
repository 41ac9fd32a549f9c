"""What all views of one opened data set share: its index, its communicators, its memory."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import numpy as np
from mpi4py import MPI

from matex_data.agreement import Agreement, Status
from matex_data.buffers import Pool
from matex_data.cache import ChunkCache
from matex_data.collective import Files, mode_for
from matex_data.errors import DataError
from matex_data.fetch import Arrays, Plan, execute, plan
from matex_data.index import Index
from matex_data.partition import Runs, share
from matex_data.stream import Channel, Profile

LOAD_BYTES = 64 << 20  # read and decoded together by ``load``
CACHE_BYTES = 64 << 20  # of decoded chunks that are kept, at least


class Source:
    """An opened data set.

    Parameters
    ----------
    comm : whose ranks share the data; duplicated, so that nothing here meets the user's own messages.
    index : of all files, the same on every rank.
    io : "auto", "collective" or "independent".
    window_bytes : of a window over all ranks.
    """

    def __init__(self, comm: MPI.Comm, index: Index, io: str, window_bytes: int) -> None:
        self.index = index
        self.window_bytes = window_bytes
        self.mode = mode_for(io, len(index.files))
        self.comm = comm.Dup()
        self.profile = Profile()
        self._threaded = MPI.Query_thread() >= MPI.THREAD_MULTIPLE
        if not self._threaded and comm.size > 1 and comm.rank == 0:
            warnings.warn(
                "this MPI does not allow calls from threads: each rank reads on its own, and an error of one rank "
                "does not reach the others",
                stacklevel=4,
            )
        self._pool = Pool()
        self._channels: list[tuple[Channel, weakref.ref[Any]]] = []

    def channel(self) -> Channel:
        """A channel that nobody uses at the moment; ``claim`` it. *Collective*."""
        unused = np.array([user() is None for _, user in self._channels], bool)
        if self.comm.size > 1 and len(unused):
            self.comm.Allreduce(MPI.IN_PLACE, unused, MPI.LAND)
        for number in np.flatnonzero(unused).tolist():
            return self._channels.pop(number)[0]
        cache_bytes = max(CACHE_BYTES, self.window_bytes // self.comm.size)
        comm = self.comm.Dup()
        return Channel(comm, self._threaded, self.index, self.mode, self._pool, cache_bytes, self.profile)

    def claim(self, channel: Channel, user: object) -> None:
        """The channel belongs to ``user`` as long as that lives."""
        self._channels.append((channel, weakref.ref(user)))

    def load(self, runs: Runs) -> Arrays:
        """This rank's block of the samples, in order, in memory of their own. *Collective*.

        Raises
        ------
        DataError : of any rank, on every rank.
        """
        comm, index = self.comm, self.index
        start, stop = share(runs.total, comm.rank, comm.size)
        arrays = {name: field.empty(stop - start) for name, field in index.fields.items()}
        row_bytes = max(1, sum(field.row_bytes for field in index.fields.values()))
        step = max(1, LOAD_BYTES // row_bytes)
        files = Files(comm, [file.path for file in index.files], self.mode)
        agreement = Agreement(comm)
        chunks = ChunkCache(CACHE_BYTES)
        failure: BaseException | None = None
        rounds = -(-share(runs.total, 0, comm.size)[1] // step)
        for done in range(0, (rounds + 1) * step, step):
            low, high = min(start + done, stop), min(start + done + step, stop)
            work = Plan({}, [])
            try:
                if failure is None and high > low:
                    part = runs.between(np.array([low]), np.array([high - low]))
                    place = np.arange(low - start, high - start, dtype=np.int64)
                    work = plan(index, part, place, arrays, chunks, self._pool)
            except Exception as error:  # whatever it is, the other ranks have to know
                failure = error
            status, needs = agreement.reach(
                Status.FAILED if failure else Status.GO_ON, work.counts(len(index.files))
            )
            if status == Status.FAILED:
                files.close()
                raise agreement.error(failure)
            try:
                for future in execute(work, files, needs):
                    future.result()
            except DataError as error:
                failure = error
        files.close()
        return arrays
