"""Rows of a virtual dataset, read from its sources as byte ranges and decoded by the codecs of this package."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import h5py
import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.index.cache import ChunkCache
from matex_data.index.combined import Concatenated
from matex_data.index.model import EMPTY, Layout, ReadRequest, RowSelection
from matex_data.readers.hdf5.files import open_indexed
from matex_data.readers.hdf5.names import HDF5_ERRORS
from matex_data.readers.hdf5.virtual import Segment, segments_of


@declared
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

    def sources(self) -> Sequence[str]:
        return (self.path,)

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
                read = _Read(self.path, request)
                request = ReadRequest(EMPTY, EMPTY, on_complete=read.complete, fetch=read.fetch)
            yield request


class _Read:
    """Execution of a request for bytes of a source.

    Parameters
    ----------
    path : of the source.
    request : of the layout of its dataset.
    """

    def __init__(self, path: str, request: ReadRequest) -> None:
        self._path, self._request = path, request
        self._scratch = np.empty(0, np.uint8)

    def fetch(self) -> None:
        """Read to the target of the request, or to scratch memory."""
        request = self._request
        if request.target is None:
            self._scratch = np.empty(request.total, np.uint8)
        memory = (self._scratch if request.target is None else request.target).data
        begins = np.cumsum(request.nbytes) - request.nbytes if request.at is None else request.at
        try:
            with Path(self._path).open("rb", buffering=0) as file:
                for offset, nbytes, begin in zip(request.offset, request.nbytes, begins, strict=True):
                    self._read(file, int(offset), memory[begin : begin + nbytes])
        except FileNotFoundError as error:
            found = f"no file {self._path!r}"
            raise DecodeError("a source of the virtual dataset is missing", found=found) from error
        except OSError as error:
            raise DecodeError("a source of the virtual dataset cannot be read", found=error) from error

    def _read(self, file: FileIO, offset: int, memory: memoryview) -> None:
        """Read bytes of the open source, in as many calls as necessary."""
        done = 0
        while done < len(memory):
            count = os.preadv(file.fileno(), [memory[done:]], offset + done)
            if not count:
                raise DecodeError(
                    "a source of the virtual dataset has become shorter",
                    expected=f"{offset + len(memory)} bytes",
                    found=f"{offset + done} bytes in {self._path!r}",
                )
            done += count

    def complete(self, nothing: Bytes) -> None:
        """Decode what was read."""
        scratch, self._scratch = self._scratch, nothing
        if self._request.on_complete is not None:
            self._request.on_complete(scratch)


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
    with open_indexed(segment.path) as file:
        source = file[segment.name]
        if source.shape[1:] != dataset.shape[1:] or source.shape[0] < segment.first + segment.rows:
            return None
        if source.dtype.newbyteorder("=") != dataset.dtype.newbyteorder("="):
            return None
        layout = byte_ranges(source, segment.path)
    return None if layout is None else SourceRows(segment.path, layout, segment.first, segment.rows)
