"""Index of Arrow IPC files and streams, Feather among them: record batches are the blocks, and columns the fields.

Format: Arrow 1.5, https://arrow.apache.org/docs/format/Columnar.html#serialization-and-interprocess-communication-ipc.
pyarrow decodes the batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from matex_data._types import Integers
from matex_data.errors import FormatError
from matex_data.index.model import Index
from matex_data.readers.arrow.messages import (
    Message,
    Nodes,
    column_borders,
    nodes,
    read_messages,
    schema_in_front,
    schema_message,
)
from matex_data.readers.arrow.record_batches import RecordBatches
from matex_data.readers.catalogue import Catalogue, file_of_table
from matex_data.readers.parquet.members import Leaves, columns_of, fields_of, leaf_numbers
from matex_data.storage.files import open_binary, reading

_RATIO = 1 << 16  # more than LZ4 and zstd compress: a block of 128 KiB takes three bytes at least


def index(path: str, *, dtype: Mapping[str, Any] | None = None) -> Catalogue:
    """Index the rows of an Arrow IPC file or stream. The metadata of each record batch are read.

    Parameters
    ----------
    dtype : like that of a Parquet file.

    Raises
    ------
    FormatError : the file is damaged or no file of Arrow, or a column cannot be read.
    """
    with reading(path), open_binary(path) as file:
        messages = list(read_messages(path, file))
        if not messages:
            raise FormatError("the file has no schema of Arrow", file=path, remedy="write the file again")
        head = messages[0]
        file.seek(head.offset)
        stored = schema_message(path, head.offset, file.read(head.head_bytes))
        other = schema_in_front(path, file) if head.offset else None
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(stored))
        first = schema if other is None else pa.ipc.read_schema(pa.py_buffer(other))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise FormatError("the schema is damaged", file=path, byte=head.offset, found=error) from error
    _check_equal(path, first, schema)
    return columns_of(path, schema, dtype or {}, partial(_of_batches, path, schema, messages))


def _check_equal(path: str, schema: pa.Schema, footer: pa.Schema) -> None:
    """Raise ``FormatError`` if the schemas of the first message and of the footer are two: one of them is damaged."""
    if footer == schema:
        return
    begin, end = ([f"{column.name}: {column.type}" for column in columns] for columns in (schema, footer))
    raise FormatError(
        "the schema at the end of the file is another one than at its begin",
        file=path,
        expected=", ".join(column for column in begin if column not in end) or begin,
        found=", ".join(column for column in end if column not in begin) or end,
        remedy="copy or write the file again",
    )


def _of_batches(path: str, schema: pa.Schema, messages: Sequence[Message], chosen: Leaves) -> Index:
    """Return the index of chosen fields. ``chosen``: by name, member and number of the leaf."""
    columns = [nodes(column.type) for column in schema]
    leaves = leaf_numbers(schema)
    batches = [message for message in messages if message.is_batch and message.rows]
    of_field = {name: leaves[leaf] for name, (_, leaf) in chosen.items()}
    numbers = sorted({column for column, _ in of_field.values()})
    ranges = np.array([_ranges(path, schema, batch, columns, numbers) for batch in batches], np.int64)
    ranges = ranges.reshape(len(batches), len(numbers), 2)
    first_node = np.append(0, np.cumsum([len(column.buffers) for column in columns]))
    members = {}
    for name, (member, _) in chosen.items():
        column, leaf = of_field[name]
        above = first_node[column] + np.array(columns[column].leaves[leaf][member.depth :])
        missing = any(batch.null_count[above].any() for batch in batches)
        members[name] = member.with_missing() if missing else member
    edges = np.append(0, np.cumsum([batch.rows for batch in batches])).astype(np.int64)
    preambles, preamble = _preambles(messages, batches)
    table = RecordBatches(
        path,
        edges,
        members,
        ranges[:, :, 0].ravel(),
        ranges[:, :, 1].ravel(),
        1.0,
        np.array(numbers),
        {name: numbers.index(column) for name, (column, _) in of_field.items()},
        np.array([batch.offset for batch in batches], np.int64),
        np.array([batch.head_bytes for batch in batches], np.int64),
        np.array([batch.body_bytes for batch in batches], np.int64),
        preambles,
        preamble,
    )
    return file_of_table(path, fields_of(members), table)


def _ranges(
    path: str, schema: pa.Schema, batch: Message, columns: Sequence[Nodes], numbers: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the byte range of columns in the file; raise ``FormatError`` if the batch does not fit the schema, or
    claims more rows than the bytes of a column can hold.
    """
    borders = column_borders(columns, batch.variadic)
    if borders[-1] != len(batch.buffer_offset) or len(batch.null_count) != sum(len(c.buffers) for c in columns):
        raise FormatError(
            "a record batch does not fit the schema",
            file=path,
            byte=batch.offset,
            expected=f"{borders[-1]} buffers",
            found=f"{len(batch.buffer_offset)} buffers",
        )
    found = []
    for number in numbers:
        own = slice(*borders[number : number + 2])
        offset, end = batch.buffer_offset[own], batch.buffer_offset[own] + batch.buffer_bytes[own]
        begin = int(offset.min(initial=batch.body_bytes))
        nbytes = max(0, int(end.max(initial=0)) - begin)
        most = 8 * nbytes * (_RATIO if batch.is_compressed else 1)  # a row of a column takes a bit at least
        if columns[number].buffers[0] and batch.rows > most:
            raise FormatError(
                "a record batch does not have the rows that it claims",
                file=path,
                field=schema.names[number],
                byte=batch.offset,
                expected=f"at most {most:,} rows in the {nbytes:,} bytes of the column",
                found=f"{batch.rows:,} rows",
                remedy="copy or write the file again",
            )
        found.append((batch.offset + batch.head_bytes + begin, nbytes))
    return found


def _preambles(messages: Sequence[Message], batches: Sequence[Message]) -> tuple[list[Integers], Integers]:
    """Return the messages that batches need, and for each batch the number of its ones.

    These are the schema, and of each dictionary its last whole state and what was added to it since.
    """
    order = {message.offset: i for i, message in enumerate(messages)}  # that of the footer, not of their offsets
    found: list[Integers] = []
    number_of: dict[int, int] = {}
    dictionaries: dict[int, list[Message]] = {}
    is_changed = True
    for message in messages:
        if message.is_dictionary:
            before = dictionaries.get(message.dictionary, [])
            dictionaries[message.dictionary] = [*(before if message.delta else []), message]
            is_changed = True
        elif message.is_batch:
            if is_changed:
                needed = (m for of_one in dictionaries.values() for m in of_one)
                found.append(_byte_ranges([messages[0], *sorted(needed, key=lambda m: order[m.offset])]))
                is_changed = False
            number_of[message.offset] = len(found) - 1
    return found, np.array([number_of[batch.offset] for batch in batches], np.int64)


def _byte_ranges(messages: Sequence[Message]) -> Integers:
    return np.array([(m.offset, m.head_bytes + m.body_bytes) for m in messages], np.int64).ravel()
