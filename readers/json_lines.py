"""Index of JSON Lines: an object on each line, whose members are the fields. Blocks of lines are decoded by pyarrow.

https://jsonlines.org
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from matex_data._types import Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError, FormatError
from matex_data.index.decoded import SelectedBlocks
from matex_data.index.model import Index, ReadRequest
from matex_data.readers.catalogue import Catalogue, file_of_table
from matex_data.readers.parquet.blocks import ArrowBlocks
from matex_data.readers.parquet.members import Leaves, Step, columns_of, dtypes_of, fields_of, leaves_of, numeric
from matex_data.readers.parquet.values import ColumnValues, values_at
from matex_data.readers.text.scan import Borders
from matex_data.readers.text.unpacked import content, of_content
from matex_data.storage.files import open_binary, reading

BLOCK_BYTES = 256 << 10  # of whole lines
READ_BYTES = 8 << 20
MAX_LINE = 256 << 20  # bytes: of a longer one, and of a file without ends of lines, no block can be made
INFERRED = 64  # blocks, evenly over the file, from which the types follow
_LEAST_UNSIGNED = 2**63  # integers from here on are beyond int64
_MICROSECONDS, _NANOSECONDS = pa.timestamp("us"), pa.timestamp("ns")
_FRACTION = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d")  # a time, which is a text if its column has fractions
_CHANGED = re.compile(r"Column\((/[^)]*)\) changed from")  # as pyarrow words it, like the next one
_OTHER_TYPE = re.compile(r"Failed to convert JSON to (\w+), couldn't parse:(.*)", re.DOTALL)
_PARSED_AS = {"f": pa.float64(), "i": pa.int64(), "u": pa.uint64()}  # by the kind of a requested dtype
RATIO = 2.0  # bytes in memory for each byte of a text, about

Located = TypeVar("Located", bound=DataError)


def index(path: str, *, dtype: Mapping[str, Any] | None = None) -> Catalogue:
    """Index a file of JSON Lines. It is read once: for the ends of its lines, and some blocks for the types.

    The fields are the members of the objects, those of inner ones as ``outer.inner``.

    Parameters
    ----------
    dtype : of numbers, by name or pattern, for members whose type shows in few lines: ``{"x": "float64"}``.

    Raises
    ------
    FormatError : the file is damaged, or a member cannot be read.
    """
    with reading(path), open_binary(path) as file:
        types = _Types(path)
        text, stored = content(path, file)
        offset, nbytes, edges = _blocks(path, text, types)
    schema, missing = types.result(dtype or {})

    def make(chosen: Leaves) -> Index:
        members = {name: m.with_missing() if name in missing else m for name, (m, _) in chosen.items()}
        columns = {member.column for member in members.values()}
        wanted = pa.schema([field for field in schema if field.name in columns])
        table = LineBlocks(path, edges, members, offset, nbytes, RATIO, wanted.serialize().to_pybytes())
        return file_of_table(path, fields_of(members), of_content(path, stored, table))

    return columns_of(path, schema, dtype or {}, make)


def _blocks(path: str, file: IO[bytes], types: _Types) -> tuple[Integers, Integers, Integers]:
    """Return offset and length in bytes of the blocks of lines, and their first rows, with the number of rows.

    Parameters
    ----------
    types : learns from the last block, and from the first one in each of ``INFERRED`` equal sections of the file.
    """
    size, begin, at = file.seek(0, io.SEEK_END), 0, 0
    borders, left, section = Borders(BLOCK_BYTES), b"", -1
    while begin + len(left) < size:
        file.seek(begin + len(left))
        data = left + file.read(READ_BYTES)
        is_last = begin + len(data) >= size
        end = len(data) if is_last else data.rfind(b"\n") + 1
        if len(data) == len(left) or (not end and len(data) > MAX_LINE):
            raise FormatError(
                "the file has no ends of lines", file=path, byte=begin, remedy="write an object on each line"
            )
        at = 0
        while at < end:  # a block ends with the line in which it becomes long enough
            stop = end if at + BLOCK_BYTES >= end else data.find(b"\n", at + BLOCK_BYTES, end) + 1 or end
            rows = sum(not line.isspace() for line in data[at:stop].split(b"\n") if line)
            borders.add(begin + stop, rows)
            borders.close(begin + stop)
            if rows:
                before, section = section, (begin + at) * INFERRED // size
                if before < section or begin + stop == size:
                    types.add(begin + at, data[at:stop], rows)
            at = stop
        begin, left = begin + end, data[end:]
    if not borders.rows:
        raise FormatError("the file has no lines", file=path, expected="an object on each line")
    return borders.blocks()


class _Types:
    """Types of the members, as far as some blocks show them.

    Parameters
    ----------
    path : of the file, for errors.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._schemas: list[pa.Schema] = []
        self._missing: set[str] = set()
        self._types: dict[str, list[tuple[str, Sequence[Step], pa.DataType]]] = {}  # which pyarrow does not infer

    def add(self, byte: int, lines: bytes, count: int) -> None:
        """Learn from the block of lines at a byte of the file; ``count``: those that are not blank."""
        try:
            table = _parse(lines, None)
        except (pa.ArrowException, ValueError) as error:
            raise _unparsed(FormatError, error, file=self._path, byte=byte) from error
        if table.num_rows != count:
            raise FormatError(
                "an object is not on a line of its own",
                file=self._path,
                byte=byte,
                expected=f"{count} objects on {count} lines",
                found=f"{table.num_rows} objects",
                remedy="write each object without ends of lines, and one behind it",
            )
        for column, name, steps, _ in _leaves(table.schema):
            values = values_at(table[column], steps)
            if values.null_count:
                self._missing.add(name)
            for kind in _other_types(values):
                try:
                    table = _parse(lines, _with_type(table.schema, column, steps, kind))
                except (pa.ArrowException, ValueError):
                    continue  # some values are not of this type
                self._types.setdefault(name, []).append((column, steps, kind))
                break
        self._schemas.append(table.schema)

    def result(self, dtype: Mapping[str, Any]) -> tuple[pa.Schema, set[str]]:
        """Return the schema, and the names of the fields of which values are missing."""
        known = [list(_leaves(schema)) for schema in self._schemas]
        texts = {(column, steps) for own in known for column, _, steps, kind in own if pa.types.is_string(kind)}
        schemas = list(self._schemas)
        for i, own in enumerate(known):
            for column, _, steps, kind in own:
                if (column, steps) in texts and pa.types.is_timestamp(kind):  # times on some lines, texts on others
                    schemas[i] = _with_type(schemas[i], column, steps, pa.string())
        try:
            schema = pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowException as error:
            raise FormatError("lines differ in the type of a member", file=self._path, found=error) from error
        for found in self._types.values():
            if found[0][:2] not in texts:
                schema = _with_type(schema, *next((one for one in found if one[2] == _NANOSECONDS), found[0]))
        names = [{name for _, name, _, _ in own} for own in known]
        absent = set[str]()
        requested = dtypes_of(dtype, {name: column for column, name, _, _ in _leaves(schema)})
        for column, name, steps, kind in _leaves(schema):
            if None not in steps and any(name not in own for own in names):
                absent.add(name)
            is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)
            given = numeric(requested.get(name, object))
            if is_number and given is not None and given.kind in _PARSED_AS:
                schema = _with_type(schema, column, steps, _PARSED_AS[given.kind])
        return schema, self._missing | absent


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, str, tuple[Step, ...], pa.DataType]]:
    """Yield of each value of the columns its column, its name, the steps that lead to it, and its type."""
    for column in schema:
        for name, steps, kind in leaves_of(column.name, (), column.type):
            yield column.name, name, steps, kind


def _other_types(values: pa.Array) -> tuple[pa.DataType, ...]:
    """Return types that values may have, in order: pyarrow infers int64, floats, whole seconds and texts alone."""
    if pa.types.is_floating(values.type):
        return (pa.uint64(),) if (pc.max(values).as_py() or 0) >= _LEAST_UNSIGNED else ()
    if pa.types.is_timestamp(values.type):
        return (_MICROSECONDS,)  # other lines may have fractions of seconds
    first = values.drop_null()[:1].to_pylist() if pa.types.is_string(values.type) else []
    return (_MICROSECONDS, _NANOSECONDS) if first and _FRACTION.match(first[0]) else ()


def _with_type(schema: pa.Schema, column: str, steps: Sequence[Step], value: pa.DataType) -> pa.Schema:
    """Return a schema with another type of value at the end of the steps from a column."""

    def replaced(kind: pa.DataType, left: Sequence[Step]) -> pa.DataType:
        if not left:
            return value
        if left[0] is None:
            return pa.list_(replaced(kind.value_type, left[1:]))
        inner = (kind.field(i) for i in range(kind.num_fields))
        return pa.struct([f.with_type(replaced(f.type, left[1:])) if f.name == left[0] else f for f in inner])

    number = schema.get_field_index(column)
    return schema.set(number, schema[number].with_type(replaced(schema[number].type, steps)))


def _unparsed(kind: type[Located], error: Exception, **where: Any) -> Located:
    """Return the error for a block of lines that pyarrow does not parse."""
    changed, other = _CHANGED.search(str(error)), _OTHER_TYPE.search(str(error))
    if other is not None:
        return kind(
            "a member has a number of another type than on the lines that were looked at, or than requested",
            expected=other[1],
            found=other[2],
            remedy="give the type that holds all of its numbers, such as dtype={name: 'float64'}",
            **where,
        )
    if changed is None:
        return kind(
            "the lines are no JSON objects",
            expected="an object of JSON in UTF-8 on each line",
            found=error,
            remedy="write the lines so; if the file was copied, copy it again",
            **where,
        )
    where["field"] = changed[1].strip("/").replace("/[]", "").replace("/", ".") or None
    return kind(
        "a member has values of different types",
        expected="values of one type, such as numbers or texts, on all lines",
        found=error,
        remedy="write the member as a text on all lines, or as two members",
        **where,
    )


def _parse(data: Any, schema: pa.Schema | None) -> pa.Table:
    options = arrow_json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
    )
    whole = arrow_json.ReadOptions(use_threads=False, block_size=max(1, len(data)) + 1)
    table = arrow_json.read_json(pa.BufferReader(pa.py_buffer(data)), whole, options)
    table.validate(full=True)  # pyarrow takes texts in other encodings
    return table


@declared
@dataclass(frozen=True, eq=False)
class LineBlocks(ArrowBlocks):
    """Members of the objects on the lines of a file; a block is a range of whole lines.

    Parameters
    ----------
    schema : of the members that are read, serialized.
    """

    schema: bytes

    def columns(self, names: Sequence[str]) -> list[int]:
        return [0]  # a line is read as a whole

    def end(self) -> int:
        return int((self.offset + self.nbytes).max(initial=0))

    def block_requests(self, selection: SelectedBlocks, positions: Integers) -> Iterator[ReadRequest]:
        for i in positions.tolist():
            offset, nbytes = self.ranges(int(selection.blocks.number[i]), [0])
            yield ReadRequest(offset, nbytes, on_complete=partial(self._decode, selection, i))

    def _decode(self, selection: SelectedBlocks, i: int, stored: Bytes) -> None:
        self.decode_block(selection, i, lambda block, names: self._values(block, names, stored))

    def _values(self, block: int, names: Sequence[str], stored: Bytes) -> dict[str, ColumnValues]:
        columns = {self.members[name].column for name in names}
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        try:
            table = _parse(stored, pa.schema([field for field in schema if field.name in columns]))
        except (pa.ArrowException, ValueError) as error:
            field, where = names[0] if len(names) == 1 else None, (int(self.edges[block]), int(self.offset[block]))
            raise _unparsed(DecodeError, error, file=self.path, field=field, row=where[0], byte=where[1]) from error
        return self.values(block, table, names)
