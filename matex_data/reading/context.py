"""Files, memory and counters that the reads of one reader use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from matex_data._types import Integers
from matex_data.errors import DataError
from matex_data.index.model import Index
from matex_data.index.ragged import empty_output
from matex_data.io.counters import Profile
from matex_data.io.sessions import ReadSession
from matex_data.reading.buffers import BufferPool
from matex_data.reading.plan import Arrays

NO_ROWS: Integers = np.empty(0, np.int64)


@dataclass(eq=False)
class ReadContext:
    """Files, memory and counters that all epochs of some batches use, one epoch at a time.

    Parameters
    ----------
    session : communicator and open files for these batches alone.
    buffers : memory of the windows.
    scratch : memory for bytes to decode; separate, because blocks of one size would displace those of the other.
    cache_bytes : capacity of the cache of decoded chunks, in bytes.
    profile : counters of the data set.
    changed_file : returns the error of a file that changed after it was indexed, or None.
    lists : ragged samples may be kept as lists; False where samples are left out of a window one by one.
    """

    session: ReadSession
    index: Index
    buffers: BufferPool
    scratch: BufferPool
    cache_bytes: int
    profile: Profile
    changed_file: Callable[[], DataError | None]
    lists: bool = True

    def __post_init__(self) -> None:
        self.session.assign(self)

    def allocate(self, rows: int, samples: int) -> Arrays:
        """Return arrays of ``rows`` rows for all fields; rows from ``samples`` on are padding."""
        fields = self.index.fields
        lists = [name for name, field in fields.items() if field.ragged and self.lists]
        arrays = self.buffers.arrays([field for name, field in fields.items() if name not in lists], rows)
        for name in lists:
            arrays[name] = empty_output(fields[name], rows, self.index.inner_bytes(name), self.buffers.bytes)
        for name, array in arrays.items():
            fields[name].blank(array[samples:])
        return arrays
