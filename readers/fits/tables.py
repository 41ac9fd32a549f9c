"""Fields and layouts of a FITS table; rows of variable length lie anywhere in its heap."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import RESTORE, FormatError
from matex_data.fields import Field
from matex_data.index.cache import ChunkCache
from matex_data.index.interleaved import group_interleaved
from matex_data.index.model import Index, Layout, ReadRequest, RowSelection
from matex_data.index.ragged import scatter_lists
from matex_data.index.scatter import Convert
from matex_data.index.strided import Strided
from matex_data.readers.catalogue import Catalogue, file_of_rows
from matex_data.readers.decoding import narrow
from matex_data.readers.fits.columns import Bits, FitsColumn, binary_columns, text_columns
from matex_data.readers.fits.headers import Unit
from matex_data.readers.text.unpacked import content
from matex_data.storage.files import open_binary
from matex_data.storage.objects import is_url, read_ranges

TILE_BYTES = 4 << 20  # of elements that are read to one array, about


@declared
@dataclass(frozen=True, eq=False)
class HeapRows(Layout):
    """Rows of variable length, each a byte range of its own. Neighbouring ranges are read as one.

    Parameters
    ----------
    begin : position of the heap in the file, in bytes.
    offset : integers[rows], first byte of each row in the heap.
    length : integers[rows], number of elements of each row. Both are held in memory by each rank.
    stored, dtype : of an element in the file, and decoded.
    convert : writes decoded elements for stored ones; None: they are equal.
    is_text : a row is a text.
    """

    rows: int
    begin: int
    offset: Array
    length: Array
    stored: np.dtype[Any]
    dtype: np.dtype[Any]
    convert: Convert | None
    is_text: bool
    block_rows: int = 1

    def stored_bytes(self) -> int:
        return int(self.length.sum(dtype=np.int64)) * self.stored.itemsize

    def inner_bytes(self) -> int:
        return 0 if self.is_text else int(self.length.sum(dtype=np.int64)) * self.dtype.itemsize

    def end(self) -> int:
        ends = self.offset.astype(np.int64) + self.length.astype(np.int64) * self.stored.itemsize
        return self.begin + int(ends.max(initial=0))

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        mean = self.stored_bytes() // max(1, self.rows)
        for tile in rows.tiles(max(1, TILE_BYTES // max(1, mean))):
            numbers = tile.numbers
            length = self.length[numbers].astype(np.int64)
            offset = self.begin + self.offset[numbers].astype(np.int64)
            nbytes = length * self.stored.itemsize
            filled = nbytes > 0
            on_complete = partial(self._scatter, tile.destination, length, out)
            yield ReadRequest(offset[filled], nbytes[filled], on_complete=on_complete)

    def _scatter(self, destination: Integers, length: Integers, out: Array, data: Bytes) -> None:
        edges = np.append(0, np.cumsum(length))
        if self.is_text:
            whole = data.tobytes()
            for row, low, high in zip(destination.tolist(), edges[:-1].tolist(), edges[1:].tolist(), strict=True):
                out[row] = whole[low:high].split(b"\0")[0].rstrip(b" ")
            return
        stored = data.view(self.stored)
        values = stored
        if self.convert is not None:
            values = np.empty(len(stored), self.dtype)
            self.convert(stored, values)
        scatter_lists(out, destination, edges, values)


READ_BYTES, LEAST_ROWS = 8 << 20, 64  # of an object, of which descriptors are read at once
GAP_BYTES = 256 << 10  # between the descriptors of two rows that one request reads


def table_of(path: str, unit: Unit) -> Catalogue:
    """Return the catalogue of the columns of a table; its rows are the samples.

    Raises
    ------
    FormatError : the header is damaged.
    """
    try:
        if len(unit.shape) != 2 or unit.integer("BITPIX") != 8 or unit.integer("GCOUNT", 1) != 1:
            raise ValueError("NAXIS, BITPIX or GCOUNT")
        columns = (binary_columns if unit.kind == "BINTABLE" else text_columns)(unit)
        rows, width = unit.shape
        heap = unit.integer("THEAP", rows * width)
    except ValueError as error:
        raise FormatError(
            "the header of the table is damaged", file=path, byte=unit.begin, found=error, remedy=RESTORE
        ) from error
    counts = Counter(column[0] if isinstance(column, tuple) else column.name for column in columns)
    unread = {column[0]: column[1] for column in columns if isinstance(column, tuple)}
    unread |= {name: "several columns have this name" for name, count in counts.items() if count > 1}
    known = {c.name: c for c in columns if isinstance(c, FitsColumn) and c.name not in unread}

    def make(names: Sequence[str]) -> Index:
        chosen = [known[name] for name in names]
        pairs = dict[str, Integers]()
        pointers = [column for column in chosen if column.pointer_bytes]
        if pointers:
            with open_binary(path) as raw:
                pairs = _descriptors(path, content(path, raw)[0], unit.begin, rows, width, pointers)
        layouts = {column.name: _layout(path, unit, column, pairs.get(column.name), heap) for column in chosen}
        return file_of_rows(path, {column.name: _field(column) for column in chosen}, group_interleaved(layouts))

    return Catalogue(path, known, make, unread, "column")


def _layout(path: str, unit: Unit, column: FitsColumn, pairs: Integers | None, heap: int) -> Layout:
    """Return the layout of a column.

    Parameters
    ----------
    pairs : int64[rows, 2], number of elements and first byte in the heap of each row of variable length; None: of one
        length.
    heap : first byte of the heap, counted from that of the table.

    Raises
    ------
    FormatError : a row lies outside of the heap.
    """
    rows, width = unit.shape
    if pairs is None:
        begin = unit.begin + column.offset
        return Strided(rows, begin, width, column.stored, column.shape, convert=column.convert)
    length, offset = pairs.T
    offset = np.where(length == 0, 0, offset)
    nbytes = max(0, unit.nbytes - heap)
    outside = (length < 0) | (offset < 0) | (length > nbytes) | (offset > nbytes - length * column.stored.itemsize)
    if outside.any():
        row = int(outside.argmax())
        raise FormatError(
            "a row of variable length lies outside of the heap",
            file=path,
            field=column.name,
            row=row,
            expected=f"{nbytes} bytes",
            found=f"{length[row]} elements from byte {offset[row]}",
            remedy=RESTORE,
        )
    kind = column.stored, column.dtype, column.convert, column.is_text
    return HeapRows(rows, unit.begin + heap, narrow(offset), narrow(length), *kind)


def _field(column: FitsColumn) -> Field:
    attributes = {"units": column.unit} if column.unit else {}
    if not column.pointer_bytes:
        shape = (column.convert.count,) if isinstance(column.convert, Bits) else column.shape
        return Field(column.name, shape, column.dtype, attributes=attributes)
    if column.is_text:
        return Field(column.name, (), np.dtype(object), attributes=attributes)
    return Field(column.name, (), column.dtype, True, attributes)


def _descriptors(
    path: str, file: IO[bytes], begin: int, rows: int, width: int, columns: Sequence[FitsColumn]
) -> dict[str, Integers]:
    """Return number of elements and position of each row, int64[rows, 2], of columns of variable length.

    Parameters
    ----------
    begin : byte of the file where the table begins.
    rows, width : number of rows, and bytes of each.
    """
    if not rows:
        return {column.name: np.zeros((0, 2), np.int64) for column in columns}
    low = min(column.offset for column in columns)
    high = max(column.offset + 2 * column.pointer_bytes for column in columns)
    stored = _parts_of_rows(path, file, begin + low, rows, width, high - low)
    found = {}
    for column in columns:
        at, nbytes = column.offset - low, column.pointer_bytes
        pairs = np.ascontiguousarray(stored[:, at : at + 2 * nbytes])
        found[column.name] = pairs.view(f">i{nbytes}").astype(np.int64)
    return found


def _parts_of_rows(path: str, file: IO[bytes], begin: int, rows: int, width: int, nbytes: int) -> Bytes:
    """Return the same bytes of each row, uint8[rows, nbytes]: few are read but these if they lie far from one another.
    ``begin``: byte of the file where those of the first row begin.
    """
    if isinstance(file, io.BytesIO) or not is_url(path):
        length = (rows - 1) * width + nbytes
        memory: Bytes
        if isinstance(file, io.BytesIO):
            memory = np.frombuffer(file.getbuffer(), np.uint8, length, begin)
        else:
            memory = np.memmap(path, np.uint8, "r", begin, (length,))
        return np.lib.stride_tricks.as_strided(memory, (rows, nbytes), (width, 1))
    parts: list[memoryview] = []
    step = max(LEAST_ROWS, READ_BYTES // width)
    for row in range(0, rows, step):
        offset = range(begin + row * width, begin + min(rows, row + step) * width, width)
        parts += read_ranges(path, offset, [nbytes] * len(offset), GAP_BYTES)
    data = np.frombuffer(b"".join(parts), np.uint8)
    if len(data) < rows * nbytes:
        raise FormatError("the file has become shorter while it was read", file=path, remedy=RESTORE)
    return data.reshape(rows, nbytes)
