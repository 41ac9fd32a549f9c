"""Messages of an Arrow IPC file or stream: where each lies, and where the columns lie in it.

Messages of a stream follow each other. Those of a file are where its footer says, which has the schema, too: polars
writes dictionaries behind the batches. The nodes and buffers of a record batch follow from the schema.
Format: https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import flatbuffers.table
import numpy as np
import pyarrow as pa

from matex_data._types import Integers
from matex_data.declared import declared
from matex_data.errors import FormatError
from matex_data.index.model import EMPTY

MAGIC = b"ARROW1"
BEGIN = 8  # bytes in front of the messages of a file
_END = 4 + len(MAGIC)  # bytes behind the footer: its length and the magic word
_PADDING = 64  # bytes between messages at most; in front of the footer, these and the eight that end a stream
_CONTINUES = b"\xff\xff\xff\xff"
_HEAD = struct.Struct("<I 5H 2x ihBx I 4x")  # of a schema: the place of the table, its fields, and the table itself
_HEAD_REFERS = 24  # byte of the head from which the distance to the schema counts
_GUESS = 8 << 10  # bytes of a message without its body that are read at once
_SCHEMA, _DICTIONARY, _BATCH = 1, 2, 3  # kinds of messages
_DAMAGE = (struct.error, IndexError, ValueError, TypeError, OverflowError)  # of bytes that are no flatbuffer


@declared
@dataclass(frozen=True)
class Message:
    """Message of a stream.

    Parameters
    ----------
    kind : of the message, as the format numbers them.
    offset : its first byte in the file.
    head_bytes : length of its metadata, with the length in front of them; the body follows.
    body_bytes : length of its body.
    rows : of a batch; 0 for others.
    dictionary : number of the dictionary that it holds; -1: none.
    delta : its entries follow those that the dictionary has.
    null_count : int64[nodes], missing values of each node of the schema, depth first.
    buffer_offset, buffer_bytes : int64[buffers], of each buffer in the body.
    variadic : int64[views], number of further buffers of each column of views.
    is_compressed : its buffers are.
    """

    kind: int
    offset: int
    head_bytes: int
    body_bytes: int
    rows: int = 0
    dictionary: int = -1
    delta: bool = False
    null_count: Integers = field(default_factory=lambda: EMPTY)
    buffer_offset: Integers = field(default_factory=lambda: EMPTY)
    buffer_bytes: Integers = field(default_factory=lambda: EMPTY)
    variadic: Integers = field(default_factory=lambda: EMPTY)
    is_compressed: bool = False

    @property
    def end(self) -> int:
        """Return the first byte behind the message."""
        return self.offset + self.head_bytes + self.body_bytes

    @property
    def is_batch(self) -> bool:
        """Return whether the message holds rows."""
        return self.kind == _BATCH

    @property
    def is_dictionary(self) -> bool:
        """Return whether the message holds entries of a dictionary."""
        return self.kind == _DICTIONARY


def read_messages(path: str, file: BinaryIO) -> Iterator[Message]:
    """Return the messages of a file or stream in order, a schema first. Bodies are not read.

    Raises
    ------
    FormatError : the file is damaged or truncated.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    is_file = file.read(len(MAGIC)) == MAGIC
    return _of_file(path, file, size) if is_file else _of_stream(path, file, size)


def _of_stream(path: str, file: BinaryIO, size: int) -> Iterator[Message]:
    position = 0
    while position < size:
        message = _read_message(path, file, position)
        if message is None:
            return
        if message.end > size:
            raise _damaged(path, position, "the file is truncated", f"a message to byte {message.end}")
        if (position == 0) != (message.kind == _SCHEMA):
            raise _damaged(path, position, "the messages are out of order", "a schema first, and no other")
        yield message
        position = message.end


def _of_file(path: str, file: BinaryIO, size: int) -> Iterator[Message]:
    """Yield the footer of a file as its schema, then the messages that it lists."""
    begin, footer = _read_footer(path, file, size)
    try:
        root = _root(footer)
        dictionaries, batches = (_vector(root, field, 3) for field in (2, 3))
    except _DAMAGE as error:
        raise _damaged(path, begin, "the footer is damaged", "metadata of Arrow", error) from error
    yield Message(_SCHEMA, begin, len(footer), 0)
    for blocks in (dictionaries, batches):
        blocks[:, 1] &= 0xFFFFFFFF  # an int32, behind which four bytes have no meaning
    first = _first_message(path, file)
    _check_apart(path, None if first is None else first.end, begin, np.concatenate([dictionaries, batches]))
    whole: set[int] = set()
    for block in dictionaries.tolist():
        message = _read_block(path, file, _DICTIONARY, *block)
        if not message.delta and message.dictionary in whole:
            found = f"another one of number {message.dictionary}"
            raise _damaged(path, message.offset, "a dictionary is damaged", "one of each number", found)
        whole.add(message.dictionary)
        yield message
    for block in batches.tolist():
        yield _read_block(path, file, _BATCH, *block)


def _read_block(path: str, file: BinaryIO, kind: int, offset: int, head_bytes: int, body_bytes: int) -> Message:
    """Return a message that the footer lists."""
    file.seek(offset)
    message = _message(path, offset, file.read(head_bytes))
    if (message.kind, message.head_bytes) != (kind, head_bytes) or message.body_bytes > body_bytes:
        expected = f"kind {kind} with {head_bytes} and at most {body_bytes} bytes"
        found = f"kind {message.kind} with {message.head_bytes} and {message.body_bytes} bytes"
        raise _damaged(path, offset, "a message is not the one that the footer lists", expected, found)
    return message


def _read_footer(path: str, file: BinaryIO, size: int) -> tuple[int, bytes]:
    """Return the first byte of the footer of a file, and the footer."""
    file.seek(max(0, size - _END))
    end = file.read(_END)
    if size < BEGIN + _END or not end.endswith(MAGIC):
        raise _damaged(path, size, "the file is truncated", f"{MAGIC!r} at its end")
    length, most = int.from_bytes(end[:4], "little", signed=True), size - BEGIN - _END
    if not 0 < length <= most:
        raise _damaged(path, size - _END, "the length of the footer is damaged", f"1 to {most} bytes", length)
    file.seek(size - _END - length)
    return size - _END - length, file.read(length)


def _first_message(path: str, file: BinaryIO) -> Message | None:
    """Return the schema in front of the messages of a file; None: there is no message, as in files of polars."""
    try:
        message = _read_message(path, file, BEGIN)
    except FormatError:
        return None
    return message if message is not None and message.kind == _SCHEMA else None


def _check_apart(path: str, begin: int | None, end: int, blocks: Integers) -> None:
    """Raise ``FormatError`` unless messages follow each other up to the footer, and none lies in another.

    Parameters
    ----------
    begin : the first byte behind the schema; None: not known.
    end : the first byte of the footer.
    blocks : int64[messages, 3], offset, length of the metadata and length of the body.
    """
    blocks = blocks[np.argsort(blocks[:, 0], kind="stable")]
    is_inside = (blocks >= (BEGIN, 1, 0)).all(axis=1) & (blocks <= end).all(axis=1)  # their sums do not overflow then
    behind = blocks.sum(axis=1)
    if begin is not None:
        behind = np.append(begin, behind)
    gaps = np.append(blocks[:, 0], end)[len(blocks) + 1 - len(behind) :] - behind
    if not is_inside.all() or (gaps < 0).any() or (gaps[:-1] > _PADDING).any() or (gaps[-1:] > _PADDING + 8).any():
        expected = f"messages one behind the other up to byte {end}"
        found = "bytes that are none" if is_inside.all() and not (gaps < 0).any() else "some that are not"
        raise _damaged(path, end, "the footer is damaged", expected, found)


def schema_in_front(path: str, file: BinaryIO) -> bytes | None:
    """Return the message of the schema that a file has in front of all others, as in a stream; None: there is none."""
    message = _first_message(path, file)
    if message is None:
        return None
    file.seek(message.offset)
    return file.read(message.head_bytes)


def schema_message(path: str, offset: int, stored: bytes) -> bytes:
    """Return the schema of a file or stream as the first message of a stream.

    That of a file is in the footer, to which a head is added that refers to it: pyarrow would number its dictionaries
    anew.

    Parameters
    ----------
    offset, stored : of the first message as ``read_messages`` yields it.

    Raises
    ------
    FormatError : the footer is damaged.
    """
    if not offset:
        return stored
    try:
        root = _root(stored)
        schema = _inner(root, 1)
        if schema is None:
            raise ValueError("no schema")
        version, distance = _number(root, 0, "h"), schema.Pos + _HEAD.size - _HEAD_REFERS
        metadata = _HEAD.pack(16, 10, 12, 4, 6, 8, 12, version, _SCHEMA, distance) + stored
    except _DAMAGE as error:
        raise _damaged(path, offset, "the footer is damaged", "metadata of Arrow", error) from error
    return _CONTINUES + len(metadata).to_bytes(4, "little") + metadata


def _read_message(path: str, file: BinaryIO, position: int) -> Message | None:
    """Return the message at a position of a stream; None: the stream ends."""
    file.seek(position)
    head = file.read(_GUESS)
    prefix, length = _prefix(head)
    if length == 0 and len(head) >= prefix:
        return None
    if length > len(head) - prefix:
        head += file.read(length - len(head) + prefix)
    return _message(path, position, head)


def _message(path: str, position: int, head: bytes) -> Message:
    """Return the message whose first bytes are given, at least up to its body."""
    prefix, length = _prefix(head)
    if not 0 < length <= len(head) - prefix:
        raise _damaged(path, position, "a message is damaged", "its length")
    try:
        return _parse(head[prefix : prefix + length], position, prefix + length)
    except _DAMAGE as error:
        raise _damaged(path, position, "a message is damaged", "metadata of Arrow", error) from error


def _prefix(head: bytes) -> tuple[int, int]:
    """Return the number of bytes in front of the metadata of a message, and that of the metadata."""
    prefix = 8 if head.startswith(_CONTINUES) else 4  # files of versions before 0.15 have the length alone
    return prefix, int.from_bytes(head[prefix - 4 : prefix], "little", signed=True)


def _parse(metadata: bytes, offset: int, head_bytes: int) -> Message:
    root = _root(metadata)
    kind, body = _number(root, 1, "B"), _number(root, 3, "q")
    content = _inner(root, 2)
    if kind not in (_SCHEMA, _DICTIONARY, _BATCH) or content is None or body < 0:
        raise ValueError(f"a message of kind {kind} with {body} bytes")
    if kind == _SCHEMA:
        return Message(kind, offset, head_bytes, body)
    dictionary, delta = -1, False
    if kind == _DICTIONARY:
        dictionary, delta = _number(content, 0, "q"), bool(_number(content, 2, "B"))
        content = _inner(content, 1)
        if content is None:
            raise ValueError("a dictionary without entries")
    nodes, buffers = _vector(content, 1, 2), _vector(content, 2, 2)
    rows, variadic = _number(content, 0, "q"), _vector(content, 4, 1)[:, 0]
    if rows < 0 or (buffers < 0).any() or (buffers.sum(axis=1) > body).any() or (variadic < 0).any():
        raise ValueError("buffers outside of the body")
    columns = nodes[:, 1], buffers[:, 0], buffers[:, 1], variadic
    return Message(kind, offset, head_bytes, body, rows, dictionary, delta, *columns, bool(_field(content, 3)))


def _root(metadata: bytes) -> Any:
    return flatbuffers.table.Table(metadata, int.from_bytes(metadata[:4], "little"))


def _field(table: Any, number: int) -> int:
    """Return the position of a field of a table; 0 if it has the default."""
    offset = table.Offset(4 + 2 * number)
    return int(table.Pos + offset) if offset else 0


def _number(table: Any, number: int, code: str) -> int:
    position = _field(table, number)
    return int(struct.unpack_from(f"<{code}", table.Bytes, position)[0]) if position else 0


def _inner(table: Any, number: int) -> Any:
    position = _field(table, number)
    return flatbuffers.table.Table(table.Bytes, table.Indirect(position)) if position else None


def _vector(table: Any, number: int, width: int) -> Integers:
    """Return a vector of structures of ``width`` int64."""
    if not _field(table, number):
        return np.zeros((0, width), np.int64)
    offset = table.Offset(4 + 2 * number)
    count, position = table.VectorLen(offset), table.Vector(offset)
    return np.frombuffer(table.Bytes, "<i8", count * width, position).reshape(-1, width).astype(np.int64)


def _damaged(path: str, byte: int, problem: str, expected: str, found: object = None) -> FormatError:
    remedy = "copy or write the file again"
    return FormatError(problem, file=path, byte=byte, expected=expected, found=found, remedy=remedy)


@declared
@dataclass(frozen=True)
class Nodes:
    """Nodes of a column in a record batch, depth first.

    Parameters
    ----------
    buffers : number of buffers of each node.
    views : number of nodes whose buffers are followed by a variable number of others.
    leaves : of each value in the column, the numbers of the nodes that may miss it: itself, and those around it.
    """

    buffers: tuple[int, ...]
    views: int
    leaves: tuple[tuple[int, ...], ...]


def nodes(kind: pa.DataType) -> Nodes:
    """Return the nodes of a column of a type.

    >>> nodes(pa.struct({"a": pa.int8(), "b": pa.list_(pa.string())}))
    Nodes(buffers=(1, 2, 2, 3), views=0, leaves=((0, 1), (0, 2, 3)))
    """
    counts: list[int] = []
    views: list[int] = []
    leaves = tuple(_walk(kind, (), counts, views))
    return Nodes(tuple(counts), len(views), leaves)


def _walk(kind: pa.DataType, above: tuple[int, ...], counts: list[int], views: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield the nodes around each value; append the number of buffers of each node, and the nodes of views."""
    while isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    path = (*above, len(counts))
    counts.append(_buffers(kind))
    if pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        views.append(path[-1])
    children = [] if pa.types.is_dictionary(kind) else [kind.field(i).type for i in range(kind.num_fields)]
    if not children:
        yield path
    for child in children:
        yield from _walk(child, path, counts, views)


def _buffers(kind: pa.DataType) -> int:
    """Return the number of buffers of a node: validity, offsets, sizes, values."""
    if pa.types.is_null(kind) or pa.types.is_run_end_encoded(kind):
        return 0
    if pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind):
        return 1
    if pa.types.is_union(kind):
        return 2 if kind.mode == "dense" else 1
    is_binary = pa.types.is_string(kind) or pa.types.is_binary(kind)
    is_large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    is_view = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    return 3 if is_binary or is_large or is_view else 2


def column_borders(columns: Sequence[Nodes], variadic: Integers) -> Integers:
    """Return the number of the first buffer of each column in a record batch, and their number.

    Parameters
    ----------
    columns : nodes of each column.
    variadic : int64[views], number of further buffers of each node of views.
    """
    fixed = np.array([sum(column.buffers) for column in columns], np.int64)
    first = np.append(0, np.cumsum([column.views for column in columns]))
    further = np.append(0, np.cumsum(variadic))
    return np.append(0, np.cumsum(fixed + np.diff(further[np.minimum(first, len(further) - 1)])))
