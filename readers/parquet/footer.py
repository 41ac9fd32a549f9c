"""Footer of a Parquet file: the schema, and where the column chunks lie.

Decoding needs the footer, which may have megabytes. So the index has its byte range alone: a rank reads the footers of
the files whose rows it decodes, and keeps those that it has used last.
Format: https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from matex_data._types import Integers
from matex_data.declared import declared
from matex_data.errors import RESTORE, DecodeError, FormatError
from matex_data.lru import LeastRecentlyUsed
from matex_data.storage.files import open_binary, reading
from matex_data.storage.objects import Seekable

MAGIC = b"PAR1"
ENCRYPTED = b"PARE"
TAIL = 8  # bytes at the end: length of the metadata, magic
GUESS = 64 << 10  # bytes at the end of the file, which usually contain the footer
KEPT = 64  # footers in memory
HEADER = 100  # bytes of the header of a page, at most, which parquet-mr did not count before version 1.2.9


@declared
@dataclass(frozen=True)
class Footer:
    """Byte range of a footer.

    Parameters
    ----------
    begin, nbytes : of the metadata and what follows them.
    checksum : CRC-32 of these bytes.
    """

    path: str
    begin: int
    nbytes: int
    checksum: int

    def sources(self) -> Sequence[str]:
        return (self.path,)

    def metadata(self) -> Any:
        """Return the ``FileMetaData``, which is read unless this process has it.

        Raises
        ------
        DecodeError : the bytes are not those that were indexed.
        DataError : the file cannot be read.
        """
        return _footers.made(self, self._read)

    def _read(self) -> Any:
        with reading(self.path), open_binary(self.path) as file:
            file.seek(self.begin)
            data = file.read(self.nbytes)
        if zlib.crc32(data) != self.checksum:
            raise DecodeError(
                "the footer has changed since the file was indexed",
                file=self.path,
                byte=self.begin,
                remedy="open the data set again, and do not write to its files meanwhile",
            )
        return _parsed(data)


_footers = LeastRecentlyUsed[Any](KEPT)  # each counts as one byte


def read_footer(path: str) -> tuple[Footer, Any]:
    """Return the footer of a file, and its ``FileMetaData``.

    Raises
    ------
    FormatError : the file is no Parquet file, or its footer is damaged.
    DataError : it cannot be read.
    """
    with reading(path), open_binary(path) as file:
        size = file.seek(0, os.SEEK_END)
        data = _last(file, size, GUESS)
        length = int.from_bytes(data[-TAIL:-4], "little") + TAIL
        if data[-4:] == MAGIC and len(data) < length <= size - len(MAGIC):
            data = _last(file, size, length)
    if data[-4:] == ENCRYPTED:
        raise FormatError("the footer is encrypted", file=path, remedy="write a copy without encryption")
    if data[-4:] != MAGIC or not TAIL < length <= size - len(MAGIC):
        raise FormatError(
            "the file has no footer of Parquet",
            file=path,
            byte=max(0, size - TAIL),
            expected=f"the length of the metadata and {MAGIC!r}",
            found=repr(data[-TAIL:]),
            remedy="the file may be truncated: copy it again from its source",
        )
    data = data[-length:]
    try:
        metadata = _parsed(data)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError(
            "the footer is damaged", file=path, byte=size - length, found=error, remedy=RESTORE
        ) from error
    return Footer(path, size - length, length, zlib.crc32(data)), metadata


def _last(file: Any, size: int, nbytes: int) -> bytes:
    file.seek(max(0, size - nbytes))
    data: bytes = file.read(nbytes)
    return data


def _parsed(data: bytes) -> Any:
    return pq.read_metadata(pa.BufferReader(MAGIC + data))


@dataclass(frozen=True)
class ColumnChunks:
    """Column chunks of some leaves of the schema in all row groups that have rows.

    Parameters
    ----------
    groups : int64[n], numbers of the row groups.
    edges : int64[n + 1], the first row of each, and the number of rows.
    offset, nbytes, plain_bytes : int64[n, leaves], byte range of each column chunk, and its size without compression.
    missing : bool[leaves], the file counts missing values in the leaf.
    """

    groups: Integers
    edges: Integers
    offset: Integers
    nbytes: Integers
    plain_bytes: Integers
    missing: NDArray[np.bool_]


def column_chunks(footer: Footer, metadata: Any, leaves: Sequence[int]) -> ColumnChunks:
    """Return the column chunks of leaves.

    Parameters
    ----------
    footer : in front of which the chunks lie.
    metadata : its ``FileMetaData``.
    leaves : numbers of the leaves in the schema.

    Raises
    ------
    FormatError : the row groups do not add up, or a chunk lies outside of the file or in another one.
    OSError : the entry of a chunk is damaged.
    """
    path, end = footer.path, footer.begin
    rows = np.array([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)], np.int64)
    if (rows < 0).any() or int(rows.sum()) != metadata.num_rows:
        raise FormatError(
            "the row groups do not add up", file=path, expected=f"{metadata.num_rows} rows", found=rows.sum()
        )
    groups = np.flatnonzero(rows > 0)
    columns = [metadata.schema.column(leaf) for leaf in leaves]
    _check(metadata, groups.tolist(), [column.path for column in columns])
    table = np.zeros((3, len(groups), len(leaves)), np.int64)
    missing = np.zeros(len(leaves), bool)
    for i, group in enumerate(map(metadata.row_group, groups.tolist())):
        for j, leaf in enumerate(leaves):
            chunk = group.column(leaf)
            if chunk.file_path:
                remedy = "open the files with the rows instead"
                raise FormatError("the rows are in other files", file=path, remedy=remedy)
            if chunk.physical_type != columns[j].physical_type:  # its statistics would end the process
                raise OSError(f"a column chunk of {chunk.physical_type} in a column of {columns[j].physical_type}")
            begin = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)), default=0)
            table[:, i, j] = begin, chunk.total_compressed_size, chunk.total_uncompressed_size
            statistics = chunk.statistics
            missing[j] |= bool(statistics is not None and statistics.has_null_count and statistics.null_count)
    offset, nbytes, plain_bytes = table
    outside = (offset < len(MAGIC)) | (nbytes < 0) | (offset > end - nbytes)
    if outside.any():
        i, j = np.argwhere(outside)[0].tolist()
        raise FormatError(
            "a column chunk lies outside of the file",
            file=path,
            field=columns[j].path,
            byte=int(offset[i, j]),
            expected=f"bytes {len(MAGIC)} to {end}",
            found=f"{int(nbytes[i, j])} bytes",
            remedy=RESTORE,
        )
    nbytes = np.minimum(nbytes + _uncounted(metadata.created_by), end + footer.nbytes - offset)
    return ColumnChunks(groups, np.append(0, np.cumsum(rows[groups])), offset, nbytes, plain_bytes, missing)


def _uncounted(writer: str | None) -> int:
    """Return the bytes by which column chunks may be longer than the footer tells (PARQUET-816)."""
    found = re.match(r"parquet-mr(?: version (\d+)\.(\d+)\.(\d+))?", writer or "")
    return HEADER if found and tuple(int(number or 0) for number in found.groups()) < (1, 2, 9) else 0


class _Unreadable(Seekable):
    """File of which no byte can be read. An error of its own would be kept by pyarrow for ever, with all frames."""

    def __init__(self) -> None:
        super().__init__(1 << 62)
        self.is_read = False

    def read(self, size: int = -1) -> bytes:
        self.is_read = True
        return b""


def _check(metadata: Any, groups: Sequence[int], paths: Sequence[str]) -> None:
    """Raise ``OSError`` if the entry of a column chunk is damaged: some end the process in pyarrow's properties.

    A read of all chunks looks at every entry before it reads the first byte. For 30,000 entries it takes 9 ms.
    """
    content = _Unreadable()
    file = pq.ParquetFile(pa.PythonFile(content, "r"), metadata=metadata, pre_buffer=True)
    try:
        file.read_row_groups(list(groups), columns=list(paths), use_threads=False)
    except OSError:
        if not content.is_read:
            raise
