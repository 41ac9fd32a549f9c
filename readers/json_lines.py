"""Index of JSON Lines: an object on each line, whose members are the fields. Blocks of lines are decoded by pyarrow.

https://jsonlines.org
"""

from __future__ import annotations

import io
import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import json as arrow_json

from matex_data._types import Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError, FormatError, NoSamples
from matex_data.index.model import Index
from matex_data.readers.catalogue import Catalogue, file_of_table
from matex_data.readers.parquet.blocks import ArrowBlocks
from matex_data.readers.parquet.members import (
    Leaves,
    Step,
    columns_of,
    dtypes_of,
    fields_of,
    is_text,
    leaves_of,
    numeric,
)
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
_OTHER_TYPE = re.compile(r"Failed to convert JSON to ([^,]+), couldn't parse:(.*)", re.DOTALL)
_PARSED_AS = {"f": pa.float64(), "i": pa.int64(), "u": pa.uint64()}  # by the kind of a requested dtype
_KINDS = {dict: "objects", list: "arrays", str: "texts", bool: "truth values", int: "numbers", float: "numbers"}
RATIO = 2.0  # bytes in memory for each byte of a text, about

Located = TypeVar("Located", bound=DataError)
Path = tuple[Step, ...]
"""Names of a member and those around it, the outer one first; None: the elements of a list."""


def index(path: str, *, dtype: Mapping[str, Any] | None = None) -> Catalogue:
    """Index a file of JSON Lines. It is read once: for the ends of its lines, and some blocks for the types.

    The fields are the members of the objects, those of inner ones as ``outer.inner``.

    Parameters
    ----------
    dtype : of numbers, by name or pattern, for members whose type shows in few lines: ``{"x": "float64"}``. "str" for
        texts that are no times, though most of them look so.

    Raises
    ------
    FormatError : the file is damaged, or a member cannot be read.
    """
    with reading(path), open_binary(path) as file:
        types = _Types(path)
        text, stored = content(path, file)
        offset, nbytes, edges = _blocks(path, text, types)
    schema, missing, unread = types.result(dtype or {})

    def make(chosen: Leaves) -> Index:
        members = {name: m.with_missing() if name in missing else m for name, (m, _) in chosen.items()}
        columns = {member.column for member in members.values()}
        others = {_path(column, steps) for column, _, steps, _ in _leaves(schema)}
        others -= {_path(member.column, member.steps) for member in members.values()}
        wanted = _without_members(pa.schema([field for field in schema if field.name in columns]), others)
        table = LineBlocks(path, edges, members, offset, nbytes, RATIO, wanted.serialize().to_pybytes())
        return file_of_table(path, fields_of(members), of_content(path, stored, table))

    return columns_of(path, schema, dtype or {}, make, unread)


def _blocks(path: str, file: IO[bytes], types: _Types) -> tuple[Integers, Integers, Integers]:
    """Return offset and length in bytes of the blocks of lines, and their first rows, with the number of rows.
    ``types``: learns from the last block, and from the first one in each of ``INFERRED`` equal sections of the file.
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
        raise NoSamples("the file has no lines", file=path, expected="an object on each line")
    return borders.blocks()


class _Types:
    """Types of the members, as far as some blocks show them."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._schemas: list[pa.Schema] = []
        self._missing: set[str] = set()
        self._types: dict[str, list[tuple[str, Sequence[Step], pa.DataType]]] = {}  # which pyarrow does not infer
        self._kinds: dict[Path, set[str]] = {}  # of values

    def add(self, byte: int, lines: bytes, count: int) -> None:
        """Learn from the block of lines at a byte of the file; ``count``: those that are not blank."""
        try:
            lines, table = self._parsed(lines)
        except (pa.ArrowException, ValueError, RecursionError) as error:
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

    def _parsed(self, lines: bytes) -> tuple[bytes, pa.Table]:
        """Return the lines without members of mixed types, and the table of them."""
        try:
            table = _parse(lines, None)
        except pa.ArrowException as error:
            if not _CHANGED.search(str(error)):
                raise
            rows = [json.loads(line) for line in _lines(lines)]
            self._add_kinds(kind for row in rows for kind in _kinds(row, ()))
            mixed = self._mixed()
            lines = b"\n".join(json.dumps(_without(row, (), mixed)).encode() for row in rows)
            table = _parse(lines, None)
        for column in table.schema:
            self._add_kinds(_kinds_of_type(column.type, (column.name,)))
        return lines, table

    def _add_kinds(self, found: Iterable[tuple[Path, str]]) -> None:
        for path, kind in found:
            self._kinds.setdefault(path, set()).add(kind)

    def _mixed(self) -> dict[Path, str]:
        """Return the kinds of values of each member that has several."""
        mixed: dict[Path, str] = {}
        for path, kinds in self._kinds.items():
            if len(kinds) > 1:
                mixed[_member(path)] = f"values of different types: {', '.join(sorted(kinds))}"
        return mixed

    def result(self, dtype: Mapping[str, Any]) -> tuple[pa.Schema, set[str], dict[str, str]]:
        """Return the schema, the names of the fields of which values are missing, and why others cannot be read."""
        mixed = self._mixed()
        schemas = [_without_members(schema, mixed) for schema in self._schemas]
        known = [list(_leaves(schema)) for schema in schemas]
        texts = {(column, steps) for own in known for column, _, steps, kind in own if pa.types.is_string(kind)}
        for i, own in enumerate(known):
            for column, _, steps, kind in own:
                if (column, steps) in texts and pa.types.is_timestamp(kind):  # times on some lines, texts on others
                    schemas[i] = _with_type(schemas[i], column, steps, pa.string())
        try:
            schema = pa.unify_schemas(schemas, promote_options="permissive")
        except pa.ArrowException as error:
            raise FormatError(
                "lines differ in the type of a member",
                file=self._path,
                found=error,
                remedy="write the member alike on all lines, or leave it out with inputs= and targets=",
            ) from error
        kept = {(column, steps) for column, _, steps, _ in _leaves(schema)} - texts
        for found in self._types.values():
            if found[0][:2] in kept:
                schema = _with_type(schema, *next((one for one in found if one[2] == _NANOSECONDS), found[0]))
        names = [{name for _, name, _, _ in own} for own in known]
        absent = set[str]()
        requested = dtypes_of(dtype, {name: column for column, name, _, _ in _leaves(schema)})
        for column, name, steps, kind in _leaves(schema):
            if None not in steps and any(name not in own for own in names):
                absent.add(name)
            is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_null(kind)
            given = numeric(requested.get(name, object))
            is_written = pa.types.is_timestamp(kind) or pa.types.is_null(kind)
            if is_written and is_text(requested.get(name)):
                schema = _with_type(schema, column, steps, pa.string())
            if is_number and given is not None and given.kind in _PARSED_AS:
                schema = _with_type(schema, column, steps, _PARSED_AS[given.kind])
        unread = {".".join(step for step in path if isinstance(step, str)): reason for path, reason in mixed.items()}
        return schema, self._missing | absent, unread


def _leaves(schema: pa.Schema) -> Iterator[tuple[str, str, tuple[Step, ...], pa.DataType]]:
    """Yield of each value of the columns its column, its name, the steps that lead to it, and its type."""
    for column in schema:
        for name, steps, kind in leaves_of(column.name, (), column.type):
            yield column.name, name, steps, kind


def _lines(data: bytes) -> list[bytes]:
    """Return the lines that are not blank."""
    return [line for line in data.split(b"\n") if line and not line.isspace()]


def _path(column: str, steps: Sequence[Step]) -> Path:
    """Return the path of a member, whose values lie at the end of steps from a column."""
    return _member((column, *steps))


def _member(path: Path) -> Path:
    """Return the path of the member whose values, or elements of whose lists, have a path."""
    while path and path[-1] is None:
        path = path[:-1]
    return path


def _kinds(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield path and kind of a value, and of all within it, without those that are missing."""
    if value is not None:
        yield path, _KINDS[type(value)]
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _kinds(inner, (*path, name))
    elif isinstance(value, list):
        for inner in value:
            yield from _kinds(inner, (*path, None))


def _kinds_of_type(kind: pa.DataType, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield what `_kinds` does, of a type that pyarrow has inferred from values."""
    if pa.types.is_struct(kind):
        yield path, _KINDS[dict]
        for member in kind:
            yield from _kinds_of_type(member.type, (*path, member.name))
    elif pa.types.is_list(kind):
        yield path, _KINDS[list]
        yield from _kinds_of_type(kind.value_type, (*path, None))
    elif not pa.types.is_null(kind):
        is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
        yield path, _KINDS[int if is_number else bool if pa.types.is_boolean(kind) else str]


def _without(value: Any, path: Path, members: Collection[Path]) -> Any:
    """Return a value of a path without members within it."""
    if isinstance(value, dict):
        kept = {name: inner for name, inner in value.items() if (*path, name) not in members}
        return {name: _without(inner, (*path, name), members) for name, inner in kept.items()}
    return [_without(inner, (*path, None), members) for inner in value] if isinstance(value, list) else value


def _without_members(schema: pa.Schema, members: Collection[Path]) -> pa.Schema:

    def kept(kind: pa.DataType, path: Path) -> pa.DataType:
        if pa.types.is_list(kind):
            return pa.list_(kept(kind.value_type, (*path, None)))
        if not pa.types.is_struct(kind):
            return kind
        return pa.struct([f.with_type(kept(f.type, (*path, f.name))) for f in kind if (*path, f.name) not in members])

    if not members:
        return schema
    return pa.schema([f.with_type(kept(f.type, (f.name,))) for f in schema if (f.name,) not in members])


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
        return pa.struct([f.with_type(replaced(f.type, left[1:])) if f.name == left[0] else f for f in kind])

    number = schema.get_field_index(column)
    return schema.set(number, schema[number].with_type(replaced(schema[number].type, steps)))


def _unparsed(kind: type[Located], error: Exception, **where: Any) -> Located:
    """Return the error for a block of lines that pyarrow does not parse."""
    changed, other = _CHANGED.search(str(error)), _OTHER_TYPE.search(str(error))
    name = repr(where.get("field") or "name")
    if other is not None and other[1].startswith("timestamp"):
        return kind(
            "a text is no time as those on the lines that were looked at",
            expected=f"a date or time in ISO 8601, as {other[1]}",
            found=repr(other[2]),
            remedy=f"give dtype={{{name}: 'str'}}: texts stay texts",
            **where,
        )
    if other is not None:
        return kind(
            "a member has a number of another type than on the lines that were looked at, or than requested",
            expected=other[1],
            found=other[2],
            remedy=f"give the type that holds all of its numbers, such as dtype={{{name}: 'float64'}}",
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
        remedy="write the member as a text on all lines, or as two members; or select others with inputs= and targets=",
        **where,
    )


def _first_fault(data: bytes, schema: pa.Schema) -> tuple[int, str | None, Exception] | None:
    """Return the number of the first line that does not parse, its field and the error; None: each line does."""
    lines = _lines(data)
    counts = range(1, len(lines) + 1)
    first = bisect_left(counts, True, key=lambda count: _failure(b"\n".join(lines[:count]), schema) is not None)
    if first == len(lines):
        return None
    for column, name, steps, kind in _leaves(schema):
        for step in reversed(steps):
            kind = pa.list_(kind) if step is None else pa.struct([(step, kind)])
        if (error := _failure(lines[first], pa.schema([(column, kind)]))) is not None:
            is_of_field = _OTHER_TYPE.search(str(error)) or _CHANGED.search(str(error))
            return first, name if is_of_field else None, error
    return None


def _failure(data: bytes, schema: pa.Schema) -> Exception | None:
    """Return the error that lines do not parse, if they do not."""
    try:
        _parse(data, schema)
    except (pa.ArrowException, ValueError) as error:
        return error
    return None


def _parse(data: Any, schema: pa.Schema | None) -> pa.Table:
    options = arrow_json.ParseOptions(
        explicit_schema=schema, unexpected_field_behavior="infer" if schema is None else "ignore"
    )
    whole = arrow_json.ReadOptions(use_threads=False, block_size=max(1, len(data)) + 1)
    table = arrow_json.read_json(pa.BufferReader(pa.py_buffer(data)), whole, options)
    try:
        table.validate(full=True)  # pyarrow takes texts in other encodings
    except pa.ArrowInvalid:
        if schema is not None:
            raise
        return _parse(data, table.schema)  # where it infers types, it loses what is missing in front of a first element
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

    def decode(self, block: int, names: Sequence[str], stored: Bytes) -> dict[str, ColumnValues]:
        columns = {self.members[name].column for name in names}
        schema = pa.ipc.read_schema(pa.py_buffer(self.schema))
        schema = pa.schema([field for field in schema if field.name in columns])
        try:
            table = _parse(stored, schema)
        except (pa.ArrowException, ValueError) as error:
            line, field, cause = _first_fault(stored.tobytes(), schema) or (0, None, error)
            row, byte = int(self.edges[block]) + line, int(self.offset[block])
            raise _unparsed(DecodeError, cause, file=self.path, field=field, row=row, byte=byte) from error
        return self.values(block, table, names)
