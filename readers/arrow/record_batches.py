"""Record batches of an Arrow IPC file: byte ranges of columns, decoded by pyarrow as a stream of one batch."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from matex_data._types import Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.lru import LeastRecentlyUsed
from matex_data.readers.arrow.messages import schema_message
from matex_data.readers.parquet.blocks import ArrowBlocks
from matex_data.readers.parquet.values import ColumnValues
from matex_data.storage.files import open_binary, reading

_preambles = LeastRecentlyUsed[bytes](64 << 20)  # bytes of beginnings of streams in memory


@declared
@dataclass(frozen=True, eq=False)
class RecordBatches(ArrowBlocks):
    """Columns of an Arrow IPC file; a block is a record batch with rows.

    Parameters
    ----------
    numbers : int64[columns], numbers of the stored columns in the schema, ascending.
    column : of each field, the position of its stored column, by name.
    head_offset, head_bytes, body_bytes : int64[blocks], byte range of the metadata, and the length of the body.
    preambles : int64[2 * messages] each, offset and length of the schema, or of the footer that has it, then of each
        message of a dictionary.
    preamble : int64[blocks], number of the preamble that the block needs.
    """

    numbers: Integers
    column: Mapping[str, int]
    head_offset: Integers
    head_bytes: Integers
    body_bytes: Integers
    preambles: Sequence[Integers]
    preamble: Integers
    views = True

    def stored_bytes(self) -> int:
        return int(self.nbytes.sum() + self.head_bytes.sum())

    def end(self) -> int:
        return int((self.head_offset + self.head_bytes + self.body_bytes).max(initial=0))

    def columns(self, names: Sequence[str]) -> list[int]:
        return sorted({self.column[name] for name in names})

    def block_ranges(self, block: int, names: Sequence[str]) -> tuple[Integers, Integers]:
        offset, nbytes = super().block_ranges(block, names)
        return np.append(self.head_offset[block], offset), np.append(self.head_bytes[block], nbytes)

    def fetching(self, block: int) -> Callable[[], Any]:
        return partial(self._preamble, block)

    def decode(self, block: int, names: Sequence[str], stored: Bytes) -> dict[str, ColumnValues]:
        self.check_fits(block, names)
        offset, nbytes = self.block_ranges(block, names)
        head = int(nbytes[0])
        body = self._body(block, offset[1:], nbytes[1:], stored[head:])
        source = pa.PythonFile(_Stream(self._preamble(block), stored[:head], body), "r")
        numbers = self.numbers[self.columns(names)].tolist()
        options = pa.ipc.IpcReadOptions(included_fields=numbers, use_threads=False)
        try:
            batch = pa.ipc.open_stream(source, options=options).read_next_batch()
            batch.validate(full=True)  # Arrow would follow offsets out of the memory
        except (pa.ArrowException, OSError, ValueError, StopIteration) as error:
            raise self.undecodable(block, names, int(offset[0]), error) from error
        return self.values(block, pa.Table.from_batches([batch]), names)

    def _body(self, block: int, offset: Integers, nbytes: Integers, stored: Bytes) -> Bytes:
        """Return the body of the message; what was not read of it is undefined, and not looked at."""
        begin, total = int(self.head_offset[block] + self.head_bytes[block]), int(self.body_bytes[block])
        if len(stored) == total:
            return stored
        body = np.empty(total, np.uint8)
        at = np.cumsum(nbytes) - nbytes
        for low, start, count in zip(at.tolist(), (offset - begin).tolist(), nbytes.tolist(), strict=True):
            body[start : start + count] = stored[low : low + count]
        return body

    def _preamble(self, block: int) -> bytes:
        """Return the messages in front of a batch, which are read unless this process has them."""
        number = int(self.preamble[block])
        return _preambles.made((self, number), partial(self._read, self.preambles[number].reshape(-1, 2)), len)

    def _read(self, ranges: Integers) -> bytes:
        found = []
        with reading(self.path), open_binary(self.path) as file:
            for offset, nbytes in ranges.tolist():
                file.seek(offset)
                found.append(file.read(nbytes))
        if sum(map(len, found)) != int(ranges[:, 1].sum()):
            raise DecodeError("the file has become shorter", file=self.path, remedy="open the data set again")
        return b"".join([schema_message(self.path, int(ranges[0, 0]), found[0]), *found[1:]])


class _Stream(io.RawIOBase):
    """Stream of messages that lie in separate memory.

    Parameters
    ----------
    buffers : of the messages in front, of the metadata of the batch, and of its body.
    """

    def __init__(self, *buffers: Any) -> None:
        self._buffers = [memoryview(buffer) for buffer in buffers]

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> Any:
        """Return a buffer over the next bytes, without a copy. Arrow reads metadata and bodies separately."""
        while self._buffers and not len(self._buffers[0]):
            self._buffers.pop(0)
        if not self._buffers or size < 0:
            return b""
        found, self._buffers[0] = self._buffers[0][:size], self._buffers[0][size:]
        return pa.py_buffer(found)
