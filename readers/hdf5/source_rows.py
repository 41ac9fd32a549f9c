"""Rows of a virtual dataset, read from its sources as byte ranges and decoded by the codecs of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import h5py

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.index.cache import ChunkCache
from matex_data.index.combined import Concatenated, Converted
from matex_data.index.layout import ReadPart, read_elsewhere
from matex_data.index.model import Layout, ReadRequest, RowSelection
from matex_data.index.subset import subset_rows
from matex_data.readers.hdf5.files import open_indexed
from matex_data.readers.hdf5.names import HDF5_ERRORS
from matex_data.readers.hdf5.virtual import VirtualSource, whole_sources_of


@declared
@dataclass(frozen=True, eq=False)
class SourceRows(Converted):
    """Rows of a dataset of another file, which is open while they are read.

    Parameters
    ----------
    layout : of rows of the dataset.
    """

    path: str

    def sources(self) -> Sequence[str]:
        return (self.path,)

    def end(self) -> int:
        return 0  # of the file that names the other one

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        for request in self.layout.requests(rows, out, cache):
            yield read_elsewhere(request, self._fill)

    def _fill(self, parts: Iterable[ReadPart]) -> None:
        try:
            with Path(self.path).open("rb") as file:
                for offset, memory in parts:
                    file.seek(offset)
                    if (count := file.readinto(memory)) < len(memory):
                        raise DecodeError(
                            "a source of the virtual dataset has become shorter",
                            expected=f"{offset + len(memory)} bytes",
                            found=f"{offset + count} bytes in {self.path!r}",
                        )
        except FileNotFoundError as error:
            found = f"no file {self.path!r}"
            raise DecodeError("a source of the virtual dataset is missing", found=found) from error
        except OSError as error:
            raise DecodeError("a source of the virtual dataset cannot be read", found=error) from error


def source_layout(
    dataset: h5py.Dataset, path: str, byte_ranges: Callable[[h5py.Dataset, str], Layout | None]
) -> Layout | None:
    """Return the layout of a virtual dataset of the open file ``path``; None if only the library can read its rows.

    Parameters
    ----------
    byte_ranges : returns the layout of a source by its dataset and its path, or None.
    """
    sources = whole_sources_of(dataset, path)
    if not sources:
        return None
    try:
        parts = [_source_rows(source, first, dataset, byte_ranges) for source, first in sources]
    except (OSError, *HDF5_ERRORS):  # the library's rows report what is wrong with a source
        return None
    return None if None in parts else Concatenated(tuple(part for part in parts if part is not None))


def _source_rows(
    of: VirtualSource, first: int, dataset: h5py.Dataset, byte_ranges: Callable[[h5py.Dataset, str], Layout | None]
) -> SourceRows | None:
    rows = range(first, first + of.stop - of.start)
    with open_indexed(of.path) as file:
        source = file[of.name]
        if source.shape[1:] != dataset.shape[1:] or source.shape[0] < rows.stop:
            return None
        if source.dtype.newbyteorder("=") != dataset.dtype.newbyteorder("="):
            return None
        layout = byte_ranges(source, of.path)
    return None if layout is None else SourceRows(subset_rows(layout, rows), of.path)
