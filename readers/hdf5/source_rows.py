"""Rows of a virtual dataset, read from its sources as byte ranges and decoded by the codecs of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import h5py
import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.errors import DecodeError
from matex_data.index.cache import ChunkCache
from matex_data.index.combined import Concatenated
from matex_data.index.model import EMPTY, Layout, ReadRequest, RowSelection
from matex_data.io.coalesce import plan_tasks
from matex_data.io.counters import Profile
from matex_data.io.files import Files
from matex_data.mpi.communicator import Communicator
from matex_data.readers.hdf5.names import HDF5_ERRORS
from matex_data.readers.hdf5.rows import open_file
from matex_data.readers.hdf5.virtual import Segment, segments_of


@dataclass(frozen=True, eq=False)
class SourceRows(Layout):
    """Rows of a dataset of another file, which is open while they are read.

    Parameters
    ----------
    path : of the file.
    layout : of the dataset.
    first, rows : range of its rows.
    """

    path: str
    layout: Layout
    first: int
    rows: int

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return self.layout.block_rows

    def borders(self) -> Integers | None:
        borders = self.layout.borders()
        if borders is None and self.layout.block_rows > 1 and self.first:
            borders = np.arange(0, self.layout.rows, self.layout.block_rows)
        if borders is None:
            return None
        within = borders[(borders > self.first) & (borders < self.first + self.rows)]
        return np.concatenate([[0], within - self.first])

    def stored_bytes(self) -> int:
        return self.layout.stored_bytes() * self.rows // max(1, self.layout.rows)

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        rows = RowSelection(rows.start + self.first, rows.stop + self.first, rows.destination)
        for request in self.layout.requests(rows, out, cache):
            if request.total:
                request = ReadRequest(EMPTY, EMPTY, on_complete=partial(self._read, request, cache))
            yield request

    def _read(self, request: ReadRequest, cache: ChunkCache, _: Bytes) -> None:
        """Execute a request of the layout; on an error, fail the chunks for which others may wait."""
        try:
            if not Path(self.path).exists():
                raise DecodeError("a source of the virtual dataset is missing", found=f"no file {self.path!r}")
            files = Files(Communicator(), [self.path], "independent", Profile())
            for task in plan_tasks([request]):
                scratch = np.empty(task.scratch, np.uint8)
                files.read(0, task.into(scratch))
                task.complete(scratch)
        except BaseException as error:
            cache.fail_pending(error)
            raise


def source_layout(
    dataset: h5py.Dataset, path: str, byte_ranges: Callable[[h5py.Dataset, str], Layout | None]
) -> Layout | None:
    """Return the layout of a virtual dataset of the open file ``path``; None if only the library can read its rows.

    Parameters
    ----------
    byte_ranges : returns the layout of a source by its dataset and its path, or None.
    """
    segments = segments_of(dataset, path)
    if not segments:
        return None
    try:
        parts = [_source_rows(segment, dataset, byte_ranges) for segment in segments]
    except (OSError, *HDF5_ERRORS):  # the library's rows report what is wrong with a source
        return None
    return None if None in parts else Concatenated(tuple(part for part in parts if part is not None))


def _source_rows(
    segment: Segment, dataset: h5py.Dataset, byte_ranges: Callable[[h5py.Dataset, str], Layout | None]
) -> SourceRows | None:
    with open_file(segment.path) as file:
        source = file[segment.name]
        if source.shape[1:] != dataset.shape[1:] or source.shape[0] < segment.first + segment.rows:
            return None
        if source.dtype.newbyteorder("=") != dataset.dtype.newbyteorder("="):
            return None
        layout = byte_ranges(source, segment.path)
    return None if layout is None else SourceRows(segment.path, layout, segment.first, segment.rows)
