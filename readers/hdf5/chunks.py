"""Where the chunks of an HDF5 dataset lie, and what they went through."""

from __future__ import annotations

from array import array
from math import prod
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from matex_data._types import Array, Integers
from matex_data.codecs.pipeline import Filter, Pipeline, can_decode
from matex_data.index.chunked import Chunked
from matex_data.index.model import EMPTY
from matex_data.readers.hdf5.names import FAILURES
from matex_data.readers.hdf5.rows import missing_filters

FILL_BYTES = 1024 * 1024  # about as much of a dataset that was never written is filled in one go
MANY_CHUNKS = 1 << 23  # HDF5 goes through as many entries in about a second
BEST_COMPRESSION = 1000
MOST = 1 << 62  # no destination or size in a file, so that sums of two fit int64
MOST_PROBES = 16  # chunks that are looked at to settle what HDF5 leaves open


def chunked(dataset: h5py.Dataset, path: str, dtype: np.dtype[Any], item: tuple[int, ...]) -> Chunked | None:
    """How the rows lie in chunks; None where the library has to read them.

    Parameters
    ----------
    dtype : of one number as stored.
    item : shape of one element of the dataset, () but for array types.
    """
    grid = [-(-n // c) for n, c in zip(dataset.shape, dataset.chunks, strict=True)]
    fill = fill_value(dataset, dtype, item)
    if fill is None or prod(grid) >= 2**63 or _sparse(dataset, path, prod(grid)):
        return None
    corner, offset, nbytes, mask = _table(dataset)
    width = dtype.itemsize * prod(item)
    pipeline = Pipeline(_filters(dataset), width, prod(dataset.chunks) * width)
    if not _decodable(pipeline, mask) or _unfiltered(dataset, pipeline, corner, nbytes, mask):
        return None
    base = None if _misplaced(dataset, corner) else _base(dataset, path, corner, offset)
    if base is None:
        return None
    number = np.zeros(len(offset), np.int64)
    for axis, size in enumerate(grid):
        number = number * size + corner[:, axis] // dataset.chunks[axis]
    order = np.argsort(number, kind="stable")
    if (np.diff(number[order]) == 0).any():  # only HDF5 knows which of two entries for one chunk it takes
        return None
    return Chunked(
        shape=(*dataset.shape, *item),
        chunk_shape=(*dataset.chunks, *item),
        dtype=dtype,
        pipeline=pipeline,
        number=number[order],
        offset=offset[order] + base,
        nbytes=nbytes[order],
        mask=mask[order],
        fill=fill,
    )


def unwritten(dataset: h5py.Dataset, dtype: np.dtype[Any], item: tuple[int, ...]) -> Chunked | None:
    """The rows of a dataset that takes no room in the file: all are the fill value."""
    fill = fill_value(dataset, dtype, item)
    shape = (*dataset.shape, *item)
    row_bytes = max(1, prod(shape[1:]) * dtype.itemsize)
    depth = max(1, min(shape[0], FILL_BYTES // row_bytes))
    pipeline = Pipeline((), dtype.itemsize, depth * row_bytes)
    if fill is None:
        return None
    chunk_shape = (depth, *(max(1, n) for n in shape[1:]))
    return Chunked(shape, chunk_shape, dtype, pipeline, EMPTY, EMPTY, EMPTY, EMPTY, fill)


def fill_value(dataset: h5py.Dataset, dtype: np.dtype[Any], item: tuple[int, ...]) -> Any:
    """What an element is that was never written; None where only the library knows."""
    plist = dataset.id.get_create_plist()
    if plist.fill_value_defined() != h5py.h5d.FILL_VALUE_USER_DEFINED:
        return np.zeros((), dtype)[()]
    if item:
        return None
    value = np.zeros((), dataset.dtype)
    try:
        plist.get_fill_value(value)
    except FAILURES:
        return None
    return value.view(dtype)[()]


def _sparse(dataset: h5py.Dataset, path: str, chunks: int) -> bool:
    """Whether the table of chunks is so long and so empty that HDF5 would need long to go through it."""
    file = Path(path).stat()
    written = file.st_blocks * 512 or file.st_size  # the file itself may have holes
    decoded = chunks * prod(dataset.chunks) * dataset.dtype.itemsize
    return chunks > MANY_CHUNKS and decoded > written * BEST_COMPRESSION


def _table(dataset: h5py.Dataset) -> tuple[Integers, Integers, Integers, Integers]:
    """Corner of each stored chunk, int64[n, axes]; its first byte, its size in bytes and its filter mask, int64[n]."""
    flat = array("Q")  # a list of a million tuples would keep the garbage collector busy

    def visit(chunk: Any) -> None:
        flat.extend((*chunk.chunk_offset, chunk.byte_offset, chunk.size, chunk.filter_mask))

    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(visit)
    else:  # HDF5 before 1.12.3
        for i in range(dataset.id.get_num_chunks()):
            visit(dataset.id.get_chunk_info(i))
    table = np.array(flat, np.uint64).reshape(-1, dataset.ndim + 3)
    if (table >= MOST).any():
        raise ValueError(f"the table of its chunks is damaged: it has a destination or size of {table.max()}")
    offset, nbytes, mask = table[:, dataset.ndim :].T.astype(np.int64)
    return table[:, : dataset.ndim].astype(np.int64), offset, nbytes, mask


def _base(dataset: h5py.Dataset, path: str, corner: Integers, offset: Integers) -> int | None:
    """What to add to the offsets, None if that stays open: HDF5 1.14.2 and before leave out the user block."""
    block: int = dataset.file.userblock_size
    if not block or not len(offset):
        return 0
    with Path(path).open("rb") as file:
        for i in range(min(len(offset), MOST_PROBES)):
            _, stored = dataset.id.read_direct_chunk(tuple(corner[i].tolist()))
            fits = []
            for base in (0, block):
                file.seek(int(offset[i]) + base)
                fits.append(file.read(len(stored)) == bytes(stored))
            if fits[0] != fits[1]:
                return 0 if fits[0] else block
    return None


def _filters(dataset: h5py.Dataset) -> tuple[Filter, ...]:
    plist = dataset.id.get_create_plist()
    steps = [plist.get_filter(i) for i in range(plist.get_nfilters())]
    return tuple(Filter(number, tuple(options)) for number, _, options, _ in steps)


def _decodable(pipeline: Pipeline, mask: Array) -> bool:
    """Whether every filter that some chunk went through is one of ours."""
    return all(can_decode(step) or not (~mask >> i & 1).any() for i, step in enumerate(pipeline.filters))


def _unfiltered(dataset: h5py.Dataset, pipeline: Pipeline, corner: Integers, nbytes: Integers, mask: Integers) -> bool:
    """Whether chunks at the edge may have been left unfiltered without their masks saying so.

    That is an option of the dataset (H5Pset_chunk_opts) which h5py does not tell. Such chunks have their decoded size,
    and are what h5py reads; one that is not was filtered, and then all were.
    """
    over = (corner + np.array(dataset.chunks) > np.array(dataset.shape)).any(axis=1)
    doubtful = np.flatnonzero(over & (nbytes == pipeline.nbytes) & (mask == 0)) if pipeline.filters else EMPTY
    if not len(doubtful):
        return False
    return bool(missing_filters(dataset)) or all(_as_stored(dataset, corner[i]) for i in doubtful[:MOST_PROBES])


def _as_stored(dataset: h5py.Dataset, corner: Integers) -> bool:
    """Whether a chunk that has its decoded size holds just what h5py reads there."""
    _, stored = dataset.id.read_direct_chunk(tuple(corner.tolist()))
    ends = np.minimum(corner + np.array(dataset.chunks), np.array(dataset.shape))
    cell = tuple(slice(start, stop) for start, stop in zip(corner.tolist(), ends.tolist(), strict=True))
    inner = tuple(slice(0, edge.stop - edge.start) for edge in cell)
    chunk = np.frombuffer(stored, np.uint8).reshape(*dataset.chunks, -1)[inner]
    return bool(np.ascontiguousarray(chunk).tobytes() == dataset[cell].tobytes())


def _misplaced(dataset: h5py.Dataset, corner: Integers) -> bool:
    """Whether the corners may be wrong.

    HDF5 numbers the chunks of an extensible array with the unlimited axis first, and gives the corners as if it had
    not (seen in 1.14.6): then none lies beyond the first chunk of the axes before that one.
    """
    if (corner >= np.array(dataset.shape)).any() or (corner % np.array(dataset.chunks)).any():
        return True
    unlimited = [axis for axis, size in enumerate(dataset.maxshape) if size is None]
    if len(unlimited) != 1 or not len(corner):
        return False
    before = slice(0, unlimited[0])
    several = any(n > c for n, c in zip(dataset.maxshape[before], dataset.chunks[before], strict=True))
    return several and not corner[:, before].any()
