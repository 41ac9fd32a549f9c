"""Chunk table of an HDF5 dataset: byte range and filters of each chunk."""

from __future__ import annotations

from array import array
from math import prod
from typing import Any

import h5py
import numpy as np

from matex_data._types import Array, Integers
from matex_data.codecs.pipeline import Filter, Pipeline, can_decode
from matex_data.index.chunked import Chunked, axis_first
from matex_data.index.model import EMPTY
from matex_data.readers.hdf5.names import HDF5_ERRORS
from matex_data.readers.hdf5.rows import missing_filters
from matex_data.readers.hdf5.types import element_type
from matex_data.storage.files import allocated_size, open_binary

FILL_BYTES = 1024 * 1024  # of a block of a dataset that was never written
MANY_CHUNKS = 1 << 23  # HDF5 lists so many in about a second
MAX_COMPRESSION = 1000  # decoded bytes per stored byte of a plausible file
MAX_OFFSET = 1 << 62  # of a chunk in a file, so that sums of two fit into int64
SUPERBLOCK_BYTES = 24  # of the shortest one, with which a file begins
REPORTS_USER_BLOCK = (1, 14, 3)  # first version of HDF5 whose offsets of chunks have the user block
MAX_PROBES = 16  # chunks that are read to find out what HDF5 does not report


def chunked_layout(
    dataset: h5py.Dataset, path: str, dtype: np.dtype[Any], item: tuple[int, ...] = (), axis: int = 0
) -> Chunked | None:
    """Return the layout of the rows of a chunked dataset along an axis; None if only the library can read it.

    Parameters
    ----------
    dtype : of one number as stored.
    item : shape of one element of the dataset; () unless it has an array type.
    axis : position of the sample axis.
    """
    grid = [-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True)]
    fill = fill_value(dataset, dtype, item)
    if fill is None or prod(grid) >= 2**63 or _is_too_sparse(dataset, path, prod(grid)):
        return None
    corner, offset, nbytes, mask = _read_table(dataset)
    width = dtype.itemsize * prod(item)
    pipeline = Pipeline(_filters(dataset), width, prod(dataset.chunks) * width)
    if not _is_decodable(pipeline, mask) or _has_wrong_corners(dataset, corner):
        return None
    base = _base_address(dataset, path, corner, offset)
    if base is None or _has_unfiltered_edges(dataset, pipeline, corner, nbytes, mask):
        return None
    number = np.zeros(len(offset), np.int64)
    for at in axis_first(range(dataset.ndim), axis):
        number = number * grid[at] + corner[:, at] // dataset.chunks[at]
    order = np.argsort(number, kind="stable")
    if (np.diff(number[order]) == 0).any():  # of two entries for one chunk, only HDF5 knows which one is valid
        return None
    return Chunked(
        shape=(*axis_first(dataset.shape, axis), *item),
        chunk_shape=(*axis_first(dataset.chunks, axis), *item),
        dtype=dtype,
        pipeline=pipeline,
        number=number[order],
        offset=offset[order] + base,
        nbytes=nbytes[order],
        mask=mask[order],
        fill=fill,
        axis=axis,
    )


def unwritten_layout(
    dataset: h5py.Dataset, dtype: np.dtype[Any], item: tuple[int, ...] = (), axis: int = 0
) -> Chunked | None:
    """Return the layout of a dataset without storage in the file: every element is the fill value.

    None if only the library knows the fill value. Parameters as of `chunked_layout`.
    """
    fill = fill_value(dataset, dtype, item)
    if fill is None:
        return None
    shape = (*axis_first(dataset.shape, axis), *item)
    row_bytes = max(1, prod(shape[1:]) * dtype.itemsize)
    depth = max(1, min(shape[0], FILL_BYTES // row_bytes))
    pipeline = Pipeline((), dtype.itemsize, depth * row_bytes)
    chunk_shape = (depth, *(max(1, n) for n in shape[1:]))
    return Chunked(shape, chunk_shape, dtype, pipeline, EMPTY, EMPTY, EMPTY, EMPTY, fill)


def fill_value(dataset: h5py.Dataset, dtype: np.dtype[Any], item: tuple[int, ...]) -> Any:
    """Return the value of elements that were never written; None if only the library knows it."""
    plist = dataset.id.get_create_plist()
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        return np.zeros((), dtype)[()]
    memory = element_type(dataset)
    if item or memory.hasobject or memory.itemsize != dtype.itemsize:
        return None
    value = np.zeros((), memory)
    try:
        plist.get_fill_value(value)
    except HDF5_ERRORS:
        return None
    return value.view(dtype)[()]


def _is_too_sparse(dataset: h5py.Dataset, path: str, chunks: int) -> bool:
    """Return whether the chunk table is so long, and the file so empty, that HDF5 would list chunks for a long time."""
    stored = allocated_size(path)
    decoded = chunks * prod(dataset.chunks) * dataset.id.get_type().get_size()
    return chunks > MANY_CHUNKS and decoded > stored * MAX_COMPRESSION


def _read_table(dataset: h5py.Dataset) -> tuple[Integers, Integers, Integers, Integers]:
    """Return the stored chunks as columns.

    Returns
    -------
    corner : int64[n, axes], first element of each chunk.
    offset, nbytes, mask : int64[n], first byte, size in bytes, and filter mask.
    """
    flat = array("Q")  # a list of a million tuples would slow down the garbage collector

    def visit(chunk: Any) -> None:
        flat.extend((*chunk.chunk_offset, chunk.byte_offset, chunk.size, chunk.filter_mask))

    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(visit)
    else:  # HDF5 before 1.12.3
        for i in range(dataset.id.get_num_chunks()):
            visit(dataset.id.get_chunk_info(i))
    table = np.array(flat, np.uint64).reshape(-1, dataset.ndim + 3)
    if (table >= MAX_OFFSET).any():
        raise ValueError(f"the chunk table is damaged: it has an offset or a size of {table.max()}")
    offset, nbytes, mask = table[:, dataset.ndim :].T.astype(np.int64)
    block = dataset.file.userblock_size if h5py.version.hdf5_version_tuple >= REPORTS_USER_BLOCK else 0
    check_begin(offset.min(initial=MAX_OFFSET) - block, "the chunk table is damaged: it has a chunk")
    return table[:, : dataset.ndim].astype(np.int64), offset, nbytes, mask


def check_chunks(dataset: h5py.Dataset, path: str) -> None:
    """Raise ``ValueError`` if the chunk table of a chunked dataset has impossible entries; HDF5 does not look."""
    grid = [-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True)]
    if not _is_too_sparse(dataset, path, prod(grid)):
        _read_table(dataset)


def begin_of(dataset: h5py.h5d.DatasetID) -> int | None:
    """Return the byte at which the data of a contiguous dataset begin; None if there are none, or not as such."""
    offset: int | None = dataset.get_offset()
    # HDF5 1.14.6 adds the user block to the address that stands for none.
    return None if offset is None or not dataset.get_storage_size() else offset


def check_begin(offset: int, found: str) -> None:
    """Raise ``ValueError`` for data in the superblock, in bytes from its begin: there an address of 0 points to."""
    if offset < SUPERBLOCK_BYTES:
        raise ValueError(f"{found} at byte {offset}, within the superblock at the begin of the file")


def _base_address(dataset: h5py.Dataset, path: str, corner: Integers, offset: Integers) -> int | None:
    """Return the bytes to add to the offsets; None if that cannot be determined.

    HDF5 up to 1.14.2 reports offsets without the user block, later versions with it.
    """
    block: int = dataset.file.userblock_size
    if not block or not len(offset):
        return 0
    with open_binary(path) as file:
        for i in range(min(len(offset), MAX_PROBES)):
            _, stored = dataset.id.read_direct_chunk(tuple(corner[i].tolist()))
            matches = []
            for base in (0, block):
                file.seek(int(offset[i]) + base)
                matches.append(file.read(len(stored)) == bytes(stored))
            if matches[0] != matches[1]:
                return 0 if matches[0] else block
    return None


def _filters(dataset: h5py.Dataset) -> tuple[Filter, ...]:
    plist = dataset.id.get_create_plist()
    steps = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    return tuple(Filter(number, tuple(options)) for number, _, options, _ in steps)


def _is_decodable(pipeline: Pipeline, mask: Array) -> bool:
    """Return whether there is a codec for every filter that was applied to any chunk."""
    return all(can_decode(step) or not (~mask >> i & 1).any() for i, step in enumerate(pipeline.filters))


def _has_unfiltered_edges(
    dataset: h5py.Dataset, pipeline: Pipeline, corner: Integers, nbytes: Integers, mask: Integers
) -> bool:
    """Return whether edge chunks may be stored unfiltered although their masks are 0.

    That is an option of the dataset (H5Pset_chunk_opts) which h5py does not report. Unfiltered chunks have their
    decoded size and hold the bytes that h5py returns. One edge chunk of that size with other bytes was filtered, and
    then all of them were.
    """
    over = (corner + np.array(dataset.chunks) > np.array(dataset.shape)).any(axis=1)
    doubtful = np.flatnonzero(over & (nbytes == pipeline.nbytes) & (mask == 0)) if pipeline.filters else EMPTY
    if not len(doubtful):
        return False
    return bool(missing_filters(dataset)) or all(_is_unfiltered(dataset, corner[i]) for i in doubtful[:MAX_PROBES])


def _is_unfiltered(dataset: h5py.Dataset, corner: Integers) -> bool:
    """Return whether a chunk that has its decoded size holds the bytes that h5py returns."""
    _, stored = dataset.id.read_direct_chunk(tuple(corner.tolist()))
    ends = np.minimum(corner + np.array(dataset.chunks), np.array(dataset.shape))
    cell = tuple(slice(start, stop) for start, stop in zip(corner.tolist(), ends.tolist(), strict=True))
    inner = tuple(slice(0, edge.stop - edge.start) for edge in cell)
    chunk = np.frombuffer(stored, np.uint8).reshape(*dataset.chunks, -1)[inner]
    return bool(np.ascontiguousarray(chunk).tobytes() == dataset[cell].tobytes())


def _has_wrong_corners(dataset: h5py.Dataset, corner: Integers) -> bool:
    """Return whether the corners of the chunks may be wrong.

    HDF5 numbers the chunks of an extensible array with the unlimited axis first, and converts the numbers to corners as
    if it had not moved that axis (seen in 1.14.6). Then no corner lies beyond the first chunk of the axes before it.
    """
    if (corner >= np.array(dataset.shape)).any() or (corner % np.array(dataset.chunks)).any():
        return True
    unlimited = [axis for axis, size in enumerate(dataset.maxshape) if size is None]
    if len(unlimited) != 1 or not len(corner):
        return False
    before = slice(0, unlimited[0])
    has_more_chunks = any(n > c for n, c in zip(dataset.maxshape[before], dataset.chunks[before], strict=True))
    return has_more_chunks and not corner[:, before].any()
