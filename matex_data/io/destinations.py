"""Where MPI puts what it reads: the memory of each run of bytes that follow one another in the file.

A run whose pieces go to many places can be described to MPI as such. But ROMIO (MPICH) then calls the system for each
piece, and the system brings every line of the places into the processor's cache before it writes it. So a run that fits
into the cache is read there in one piece, and copied to its places past it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from matex_data._types import Bytes, Integers
from matex_data.codecs.scratch import thread_scratch
from matex_data.io.coalesce import Ranges
from matex_data.mpi.library import MPI

CACHED_BYTES = 1 << 20  # of a run that stays in the processor's cache
LEAST_PIECE = 4096  # bytes of each piece on average; to copy smaller ones past the cache takes longer
WORTH_COMPILING = 256 << 20  # bytes: where so many have been read already, the wait for Numba is made up for


class Destination(NamedTuple):
    """Of bytes that follow one another in the file.

    Parameters
    ----------
    destination : the memory, as MPI takes it.
    copied : what to call when they have been read, if they have to be copied to their places then.
    """

    destination: Any
    copied: Callable[[], object] | None = None


@contextmanager
def destinations(ranges: Ranges, read: int) -> Iterator[list[Destination]]:
    """The memory of each run, for one thread; what describes it to MPI is given back at the end.

    Parameters
    ----------
    ranges : of a file.
    read : bytes of the files that have been read before.
    """
    first, address, nbytes = ranges.first, ranges.address, ranges.nbytes
    lows, highs = first.tolist(), [*first[1:].tolist(), len(address)]
    begins, totals = address[first].tolist(), np.add.reduceat(nbytes, first).tolist() if lows else []
    cached = thread_scratch(CACHED_BYTES)
    runs, kinds, copy = [], [], _copy(cached) if read >= WORTH_COMPILING else None
    for low, high, begin, total in zip(lows, highs, begins, totals, strict=True):
        if high - low == 1:
            runs.append(Destination(MPI.memory.fromaddress(begin, total)))
        elif copy is not None and LEAST_PIECE * (high - low) <= total <= CACHED_BYTES:
            runs.append(Destination(cached[:total], partial(copy, address[low:high], nbytes[low:high])))
        else:
            kinds.append(MPI.BYTE.Create_hindexed(nbytes[low:high].tolist(), address[low:high].tolist()).Commit())
            runs.append(Destination([MPI.BOTTOM, 1, kinds[-1]]))
    try:
        yield runs
    finally:
        for kind in kinds:
            kind.Free()


def _copy(cached: Bytes) -> Callable[[Integers, Integers], object] | None:
    """From memory that stays in the cache to addresses, as many bytes to each; None where Numba does not work."""
    try:
        from matex_data.codecs.kernels import pieces_to_places
    except (ImportError, OSError):  # of a version that does not go with NumPy's, or without its library
        return None
    return partial(pieces_to_places(), cached.ctypes.data)
