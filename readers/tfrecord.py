"""Index of TFRecord files with ``tf.train.Example``: blocks of records are byte ranges, and features the fields.

Record: length (uint64), masked CRC-32C of the length, the data, masked CRC-32C of the data; all little-endian.
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, BinaryIO

import google_crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError as ProtobufError

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError, FieldNotFound, FormatError, near_matches
from matex_data.fields import Field
from matex_data.index.decoded import ByteRangeBlocks
from matex_data.index.model import FileIndex, Index
from matex_data.index.ragged import RaggedArray, scatter_lists
from matex_data.index.scatter import RowIndices, scatter
from matex_data.index.table import Column, Outputs
from matex_data.storage.files import open_binary

HEADER, FOOTER = 12, 4  # bytes around the data of a record
BLOCK_BYTES = 256 << 10  # of whole records
READ_BYTES = 8 << 20
INFERRED = 256  # first records, and as many evenly over the file, from which kinds and lengths of the features follow
PYTHON_VALUES = 1 << 16  # of a list that are Python's objects at a time: these take four times the memory
RESTORE = "the file is damaged there: restore it from its source"
_MASK = 0xA282EAD8
_KINDS: dict[str, np.dtype[Any]] = {
    "int64_list": np.dtype(np.int64),
    "float_list": np.dtype(np.float32),
    "bytes_list": np.dtype(object),
}


def index(
    path: str, names: Sequence[str] | None = None, *, shapes: Mapping[str, Sequence[int] | None] | None = None
) -> Index:
    """Index a TFRecord file of ``tf.train.Example``. One rank reads it once, for the lengths of all records.

    Parameters
    ----------
    names : features; None: all.
    shapes : shape of a feature by name, such as ``{"image": (28, 28)}``; None for one of variable length. A feature
        that is not named is a number or a text if all records that were looked at have one value, an array if they have
        equally many, else ragged.

    Raises
    ------
    FieldNotFound : there is no feature of that name.
    FormatError : the file is damaged, compressed as a whole, or its records are no ``tf.train.Example``.
    """
    try:
        with open_binary(path) as file:
            inferred = _Features(path)
            offset, nbytes, edges = _blocks(path, file, inferred)
    except OSError as error:
        raise DataError("the file cannot be read", file=path, found=error) from error
    features = inferred.result()
    for name in names or ():
        if name not in features:
            expected = f"one of {near_matches(name, features)}"
            raise FieldNotFound("the file has no such feature", file=path, field=name, expected=expected)
    given = dict(shapes or {})
    fields = {name: _field(name, *features[name], given) for name in (features if names is None else names)}
    table = RecordBlocks(path, edges, offset, nbytes, fields)
    return Index(fields, [FileIndex(path, table.rows, {name: Column(table, name) for name in fields})])


def _field(name: str, kind: str, counts: set[int], shapes: Mapping[str, Sequence[int] | None]) -> Field:
    dtype = _KINDS[kind]
    if name in shapes and shapes[name] is not None:
        return Field(name, tuple(shapes[name] or ()), dtype)
    if name in shapes or len(counts) > 1:
        return Field(name, (), dtype, True)
    (count,) = counts
    return Field(name, () if count == 1 else (count,), dtype)


def _blocks(path: str, file: BinaryIO, features: _Features) -> tuple[Integers, Integers, Integers]:
    """Return offset and length of the blocks of records, and their first rows, with the number of rows.

    Parameters
    ----------
    features : learns from the first ``INFERRED`` records, as far as they are read at once, and from the first one that
        begins in each of as many equal sections of the file.
    """
    size, at, row, section = file.seek(0, io.SEEK_END), 0, 0, -1
    starts, edges, block = [], [0], 0
    buffer, begin = b"", 0

    def read(nbytes: int) -> bytes:
        """Return the next bytes, of which many are read at once."""
        nonlocal buffer, begin
        if at + nbytes > begin + len(buffer):
            file.seek(at)
            buffer, begin = file.read(min(max(READ_BYTES, nbytes), size - at)), at
        return buffer[at - begin : at - begin + nbytes]

    while at < size:
        header = read(HEADER)
        length = int.from_bytes(header[:8], "little")
        if len(header) < HEADER or at + HEADER + length + FOOTER > size or _crc(header[:8]) != header[8:]:
            raise FormatError(
                "the file is no TFRecord file, or truncated",
                file=path,
                byte=at,
                expected="the length of a record, with its checksum",
                found=repr(header),
                remedy="decompress it" if at == 0 and header[:2] == b"\x1f\x8b" else RESTORE,
            )
        nbytes = HEADER + length + FOOTER
        before, section = section, at * INFERRED // size
        if before < section or (row < INFERRED and at + nbytes <= READ_BYTES):
            features.add(next(_examples(path, row, at, read(nbytes))))
        at, row = at + nbytes, row + 1
        if at - block >= BLOCK_BYTES or at == size:
            starts.append((block, at - block))
            edges.append(row)
            block = at
    if not starts:
        raise FormatError("the file has no records", file=path, expected="one at least")
    offset, nbytes = np.array(starts, np.int64).T.copy()
    return offset, nbytes, np.array(edges, np.int64)


class _Features:
    """Kind and numbers of values of each feature, as far as some records show them.

    Parameters
    ----------
    path : of the file, for errors.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._found: dict[str, tuple[str, set[int]]] = {}
        self._examined = 0

    def add(self, example: Any) -> None:
        """Learn from a record."""
        self._examined += 1
        for name, feature in example.features.feature.items():
            kind = feature.WhichOneof("kind")
            if kind is None:
                continue
            known = self._found.setdefault(name, (kind, set() if self._examined == 1 else {0}))
            if known[0] != kind:
                problem, found = "records differ in the type of a feature", f"{known[0]} and {kind}"
                raise FormatError(problem, file=self._path, field=name, found=found)
            known[1].add(len(getattr(feature, kind).value))
        for name in self._found.keys() - example.features.feature.keys():
            self._found[name][1].add(0)

    def result(self) -> dict[str, tuple[str, set[int]]]:
        """Return kind and numbers of values by the name of the feature, sorted."""
        if not self._found:
            expected = "records of tf.train.Example"
            raise FormatError("the records have no features", file=self._path, expected=expected)
        return dict(sorted(self._found.items()))


@declared
@dataclass(frozen=True, eq=False)
class RecordBlocks(ByteRangeBlocks):
    """Features of records; a block is a range of whole records."""

    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        return int(self.nbytes[block]) * 2

    def copy_rows(self, name: str, block: Any, rows: RowIndices, out: Array, destination: RowIndices) -> None:
        values = block[name]
        if isinstance(values, RaggedArray):
            selected = values[rows]
            scatter_lists(out, destination, selected.offsets, selected.values)
        else:
            scatter(out, destination, values[rows])

    def decode(self, block: int, names: Sequence[str], stored: Bytes) -> Any:
        row, byte = int(self.edges[block]), int(self.offset[block])
        examples = list(_examples(self.path, row, byte, stored.tobytes()))
        return {name: self._values(name, examples, row) for name in names}

    def _values(self, name: str, examples: Sequence[Any], row: int) -> Any:
        """Return the rows of a feature."""
        field = self.fields[name]
        kind = next(kind for kind, dtype in _KINDS.items() if dtype == field.dtype)
        lists = [getattr(example.features.feature[name], kind).value for example in examples]
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        count = int(np.prod(field.shape))
        if not field.ragged and (uneven := lengths != count).any():
            at = int(uneven.argmax())
            raise DecodeError(
                "a record has another number of values",
                file=self.path,
                field=name,
                row=row + at,
                expected=f"{count} values of the type {kind}",
                found=int(lengths[at]),
                remedy=f"shapes={{{name!r}: None}} reads a feature of variable length",
            )
        flat = np.empty(int(lengths.sum()), field.dtype)
        ends = np.cumsum(lengths).tolist()
        for values, begin, end in zip(lists, [0, *ends[:-1]], ends, strict=True):
            for low in range(begin, end, PYTHON_VALUES):
                flat[low : min(end, low + PYTHON_VALUES)] = values[low - begin : low - begin + PYTHON_VALUES]
        if field.ragged:
            return RaggedArray(flat, np.append(0, ends).astype(np.int64))
        return flat.reshape(len(lists), *field.shape)


def _examples(path: str, row: int, byte: int, data: bytes) -> Iterator[Any]:
    """Yield the ``tf.train.Example`` of each record of a block.

    Raises
    ------
    DecodeError : a checksum is wrong, or a record is none.
    """
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        begin, end = at + HEADER, at + HEADER + length
        content = data[begin:end]
        try:
            if end + FOOTER > len(data) or _crc(content) != data[end : end + FOOTER]:
                raise ValueError("its checksum is wrong")
            example = _example_class()()
            example.ParseFromString(content)
        except (ValueError, ProtobufError) as error:
            problem = "a record does not decode as tf.train.Example"
            raise DecodeError(problem, file=path, row=row, byte=byte + at, found=error, remedy=RESTORE) from error
        yield example
        at, row = end + FOOTER, row + 1


def _crc(data: bytes) -> bytes:
    crc = int(google_crc32c.value(data))
    return ((((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF).to_bytes(4, "little")


@cache
def _example_class() -> Any:
    """Return the class of messages ``tf.train.Example``, without TensorFlow.

    https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto
    """
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="matex_data/example.proto", package="matex_data", syntax="proto3")

    def message(name: str, *fields: tuple[str, int, Any]) -> Any:
        made = file.message_type.add(name=name)
        for field, label, kind in fields:
            added = made.field.add(name=field, number=len(made.field) + 1, label=label)
            if isinstance(kind, str):
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".matex_data.{kind}"
            else:
                added.type = kind
        return made

    one, many = kinds.LABEL_OPTIONAL, kinds.LABEL_REPEATED
    message("BytesList", ("value", many, kinds.TYPE_BYTES))
    message("FloatList", ("value", many, kinds.TYPE_FLOAT))
    message("Int64List", ("value", many, kinds.TYPE_INT64))
    feature = message(
        "Feature", ("bytes_list", one, "BytesList"), ("float_list", one, "FloatList"), ("int64_list", one, "Int64List")
    )
    feature.oneof_decl.add(name="kind")
    for field in feature.field:
        field.oneof_index = 0
    features = message("Features", ("feature", many, "Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=one, type=kinds.TYPE_STRING)
    entry.field.add(name="value", number=2, label=one, type=kinds.TYPE_MESSAGE, type_name=".matex_data.Feature")
    message("Example", ("features", one, "Features"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("matex_data.Example"))
