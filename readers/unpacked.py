"""Tables of files that are compressed as a whole: a rank that needs rows of a file unpacks all of it, and keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO

import numpy as np

from matex_data._types import Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError
from matex_data.index.cache import ChunkCache
from matex_data.index.model import EMPTY, ReadRequest, RowSelection
from matex_data.index.table import Outputs, Table
from matex_data.locks import Lock
from matex_data.readers.compression import stored_as, unpacked
from matex_data.readers.kept import kept
from matex_data.storage.files import open_sequential

ITEM, REMEDY = "the unpacked file", "unpack the file: ranks read blocks of it then"
LOCKS = tuple(Lock() for _ in range(16))  # of the files, by their paths: threads that need the same one wait for it


def content(path: str, file: IO[bytes]) -> tuple[IO[bytes], str]:
    """Return a file without its compression, at its begin, and the kind of this; "" for a plain file as it is.

    Parameters
    ----------
    path : of the file, for errors.
    file : open, at its begin.

    Raises
    ------
    DecodeError : the file is damaged.
    PartitionError : the content does not fit into memory.
    """
    stored = stored_as(file.read(16), "")
    file.seek(0)
    if not stored:
        return file, ""
    try:
        return unpacked(file, stored, ITEM, REMEDY), stored
    except DataError as error:
        raise error.at(path, None) from error


def of_content(path: str, stored: str, table: Table) -> Table:
    """Return a table whose byte ranges are those of the content of a file; of a plain one, the table itself.

    Parameters
    ----------
    path : of the file.
    stored : its compression; "": none.
    table : the table.
    """
    return Unpacked(path, stored, table) if stored else table


@declared
@dataclass(frozen=True, eq=False)
class Unpacked(Table):
    """Table whose byte ranges are those of the content of a compressed file.

    Parameters
    ----------
    path : of the file.
    stored : its compression, as ``stored_as`` returns.
    table : of the content.
    """

    path: str
    stored: str
    table: Table

    @property
    def notice(self) -> str:  # type: ignore[override]
        return (
            f"files such as {self.path!r} are stored as {self.stored}, of which no part can be read alone: "
            "every rank that needs rows of one unpacks all of it"
        )

    @property
    def rows(self) -> int:  # type: ignore[override]
        return self.table.rows

    @property
    def block_rows(self) -> int:  # type: ignore[override]
        return max(1, self.rows)

    @property
    def width(self) -> int:  # type: ignore[override]
        return self.table.width

    def borders(self) -> Integers | None:
        return None  # the file is one block

    def stored_bytes(self) -> int:
        return self.table.stored_bytes()

    def inner_bytes(self, name: str) -> int:
        return self.table.inner_bytes(name)

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        whole = []
        for request in self.table.requests(rows, outs, cache):
            if request.total:
                whole.append(request)
            else:
                yield request
        if whole:
            yield ReadRequest(EMPTY, EMPTY, fetch=self._fetch, on_complete=partial(self._pass_on, whole))

    def _fetch(self) -> None:
        """Unpack the file, in a thread that waits for the storage."""
        self._content()

    def _pass_on(self, requests: Sequence[ReadRequest], _: Bytes) -> None:
        text = self._content()
        for request in requests:
            ranges = zip(request.offset.tolist(), request.nbytes.tolist(), strict=True)
            parts = [text[offset : offset + nbytes] for offset, nbytes in ranges]
            if request.on_complete is not None:
                request.on_complete(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def _content(self) -> Bytes:
        with LOCKS[hash(self.path) % len(LOCKS)]:
            return kept.get(self, self._unpack)

    def _unpack(self) -> Bytes:
        try:
            with open_sequential(self.path) as file:
                return np.frombuffer(unpacked(file, self.stored, ITEM, REMEDY).getbuffer(), np.uint8)
        except OSError as error:
            raise DataError("the file cannot be read", file=self.path, found=error) from error
