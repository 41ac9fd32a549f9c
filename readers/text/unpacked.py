"""Layouts of files that are compressed as a whole: byte ranges of the content, which is kept in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import IO

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import RESTORE, DataError, DecodeError
from matex_data.index.cache import ChunkCache
from matex_data.index.combined import Converted
from matex_data.index.layout import OnComplete, ReadPart, read_elsewhere
from matex_data.index.model import Index, Layout, ReadRequest, RowSelection
from matex_data.index.table import Column, Outputs, Table
from matex_data.readers.kept import kept_file
from matex_data.readers.text.compression import stored_as, unpacked
from matex_data.storage.files import open_sequential, reading

ITEM, CONTENT = "the unpacked file", "the decompressed content"
BLOCK_BYTES = 1 << 20  # of neighbouring rows that are shuffled as one block
REMEDY = "unpack the file, or convert a text to UTF-8: each rank then reads its own rows alone"


def content(path: str, file: IO[bytes], encoding: str | None = "") -> tuple[IO[bytes], str]:
    """Return a file without its compression, at its begin, and the kind of this; "" for a plain file as it is.

    Parameters
    ----------
    file : open, at its begin.
    encoding : of a text, which becomes one in UTF-8 if it is a wide one; None: wide if the first bytes tell that.

    Raises
    ------
    DecodeError : the file is damaged.
    PartitionError : the content does not fit into memory.
    """
    stored = stored_as(file.read(16), encoding)
    file.seek(0)
    if not stored:
        return file, ""
    try:
        return unpacked(file, stored, ITEM, REMEDY), stored
    except DataError as error:
        error.at(path, None)
        raise


@declared
@dataclass(frozen=True, eq=False)
class UnpackedFile:
    """Compressed file, or text in a wide encoding: each rank unpacks those of its rows.

    Parameters
    ----------
    stored : its compression or encoding.
    length : of the content, in bytes, if the file says it; None: what it has.
    is_told : a user is told that reads of the file unpack all of it.
    """

    path: str
    stored: str
    length: int | None = None
    is_told: bool = True

    @property
    def notice(self) -> str:
        """Return what a user should know about reads of the file."""
        text = (
            f"files such as {self.path!r} are stored as {self.stored}, of which no part can be read alone: "
            "every rank that needs rows of one unpacks all of it"
        )
        return text if self.is_told else ""

    def sources(self) -> tuple[str, ...]:
        """Return the path of the file."""
        return (self.path,)

    def content(self) -> Bytes:
        """Return the decompressed content, which is kept for further rows.

        Raises
        ------
        DecodeError : the file is damaged.
        PartitionError : it does not fit into memory.
        """
        return kept_file(self, self._unpack)

    def _unpack(self) -> Bytes:
        try:
            with reading(self.path), open_sequential(self.path) as file:
                found = np.frombuffer(unpacked(file, self.stored, ITEM, REMEDY).getbuffer(), np.uint8)
        except DataError as error:
            raise error.at(self.path, None) from error.__cause__
        if self.length not in (None, len(found)):
            raise wrong_length(self.path, None, self.length, len(found))
        return found

    def request(self, request: ReadRequest) -> ReadRequest:
        """Return the request that takes its byte ranges from the content; the same request if it has none."""
        return read_elsewhere(request.calling(partial(_complete, request.on_complete)), self._fill)

    def _fill(self, parts: Iterable[ReadPart]) -> None:
        content = self.content().data
        size = len(content)
        for offset, memory in parts:
            end = offset + len(memory)
            if end > size:
                problem = "the content has become shorter"
                raise DecodeError(problem, file=self.path, expected=f"{end} bytes", found=f"{size} bytes")
            memory[:] = content[offset:end]


def _complete(on_complete: OnComplete | None, data: Bytes) -> None:
    if on_complete is not None:
        try:
            on_complete(data)
        except DataError as error:
            raise error.within(CONTENT) from error


def wrong_length(path: str, field: str | None, expected: int | None, found: int) -> DecodeError:
    """Return the error for a content that is shorter or longer than its header says, in bytes."""
    return DecodeError(
        "the content is not as long as its header says",
        file=path,
        field=field,
        expected=f"{expected} bytes",
        found=f"{found} bytes",
        remedy=RESTORE,
    )


@declared
@dataclass(frozen=True, eq=False)
class UnpackedRows(Converted):
    """Rows of which the byte ranges are those of the content of a compressed file.

    Parameters
    ----------
    layout : of the rows in its content.
    """

    file: UnpackedFile

    @property
    def notice(self) -> str:  # type: ignore[override]
        return self.file.notice

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return _block_rows(self.layout)

    def end(self) -> int:
        return 0  # of the compressed file, which is read as a whole

    def inner_bytes(self) -> int:
        return self.layout.inner_bytes()

    def requests(self, rows: RowSelection, out: Array, cache: ChunkCache) -> Iterator[ReadRequest]:
        return map(self.file.request, self.layout.requests(rows, out, cache))


@declared
@dataclass(frozen=True, eq=False)
class UnpackedTable(Table):
    """Table in the content of a compressed file.

    Parameters
    ----------
    table : in its content.
    """

    file: UnpackedFile
    table: Table

    @property
    def notice(self) -> str:  # type: ignore[override]
        return self.file.notice

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.table.rows

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return _block_rows(self.table)

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.table.width

    def borders(self) -> Integers | None:
        return self.table.borders()

    def stored_bytes(self) -> int:
        return self.table.stored_bytes()

    def inner_bytes(self, name: str) -> int:
        return self.table.inner_bytes(name)

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        return map(self.file.request, self.table.requests(rows, outs, cache))


def _block_rows(rows: Layout | Table) -> int:
    """Return the rows of a block; more than the layout has, since no row is read alone."""
    if rows.borders() is not None:
        return rows.block_rows
    return max(rows.block_rows, min(rows.rows, BLOCK_BYTES * rows.rows // max(1, rows.stored_bytes())), 1)


def of_content(path: str, stored: str, table: Table) -> Table:
    """Return a table whose byte ranges are those of the content of a file; of a plain one, the table itself.

    Parameters
    ----------
    stored : its compression; "": none.
    """
    return UnpackedTable(UnpackedFile(path, stored), table) if stored else table


def unpacked_index(index: Index, stored: str) -> Index:
    """Return the index of a compressed file, given that of its content.

    Parameters
    ----------
    index : whose layouts have byte ranges of the content.
    stored : compression of the file.
    """
    files = []
    for entry in index.files:
        file, tables = UnpackedFile(entry.path, stored), dict[Table, UnpackedTable]()
        layouts: dict[str, Layout] = {}
        for name, layout in entry.layouts.items():
            if isinstance(layout, Column):
                table = tables.setdefault(layout.table, UnpackedTable(file, layout.table))
                layouts[name] = Column(table, layout.name)
            else:
                layouts[name] = UnpackedRows(layout, file)
        files.append(replace(entry, layouts=layouts))
    return Index(index.fields, files, index.static, index.facts)
