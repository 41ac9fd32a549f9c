"""Index of TFRecord files: blocks of ``tf.train.Example`` or ``SequenceExample`` are byte ranges, features the fields.

Record: length (uint64), masked CRC-32C of the length, the data, masked CRC-32C of the data; all little-endian.
https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import IO, Any

import google_crc32c
import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError as ProtobufError

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import RESTORE, DataError, DecodeError, FormatError, NoSamples
from matex_data.fields import LISTS, Field
from matex_data.index.decoded import ByteRangeBlocks
from matex_data.index.model import Index
from matex_data.index.ragged import RaggedArray, nested
from matex_data.index.table import Outputs
from matex_data.readers.catalogue import Catalogue, file_of_table, given_for
from matex_data.readers.text.scan import Borders
from matex_data.readers.text.unpacked import content, of_content
from matex_data.storage.files import open_binary, reading

HEADER, FOOTER = 12, 4  # bytes around the data of a record
BLOCK_BYTES = 256 << 10  # of whole records
READ_BYTES = 8 << 20
INFERRED = 256  # first records, and as many evenly over the file, from which kinds and lengths of the features follow
PYTHON_VALUES = 1 << 16  # of a list that are Python's objects at a time: these take four times the memory
_MASK = 0xA282EAD8
_NO_ZLIB = "if it was written with the option ZLIB, write it with GZIP, or without one"
_KINDS: dict[str, np.dtype[Any]] = {
    "int64_list": np.dtype(np.int64),
    "float_list": np.dtype(np.float32),
    "bytes_list": np.dtype(object),
}


def index(path: str, *, shapes: Mapping[str, Sequence[int] | None] | None = None) -> Catalogue:
    """Index a TFRecord file of ``tf.train.Example``. One rank reads it once, for the lengths of all records.

    A file of ``tf.train.SequenceExample`` has the features of its contexts, and its lists of features as ragged fields
    with one element for each feature of a list.

    Parameters
    ----------
    shapes : shape of a feature by name or pattern, such as ``{"image": (28, 28)}``, in a list of features that of each;
        a length of -1 follows from the number of values; None for one of variable length. A feature that is not named
        is a number or a text if all records that were looked at have one value, an array if they have equally many,
        else ragged.

    Raises
    ------
    FormatError : the file is damaged, its records are no ``tf.train.Example``, or a feature has no such shape.
    """
    with reading(path), open_binary(path) as file:
        inferred = _Features(path)
        records, stored = content(path, file)
        offset, nbytes, edges = _blocks(path, records, inferred)
    features = inferred.result()
    given = given_for(shapes or {}, features)

    def make(names: Sequence[str]) -> Index:
        fields = {name: _field(path, name, features[name], given) for name in names}
        lists = tuple(name for name in fields if features[name].is_list)
        table = of_content(path, stored, RecordBlocks(path, edges, offset, nbytes, fields, lists))
        return file_of_table(path, fields, table)

    unread = dict.fromkeys(sorted(inferred.empty - features.keys()), "no record that was looked at has values of it")
    return Catalogue(path, features, make, unread, kind="feature", named={"shapes": (shapes or (), features)})


def _field(path: str, name: str, feature: _Feature, shapes: Mapping[str, Sequence[int] | None]) -> Field:
    dtype, counts = _KINDS[feature.kind], feature.counts
    shape: tuple[int, ...] | None
    if name in shapes:
        given = shapes[name]
        shape = None if given is None else _known_shape(path, name, tuple(given), counts)
    else:
        shape = None if len(counts) > 1 else () if counts == {1} else tuple(counts)
    if not feature.is_list:
        return Field(name, shape or (), dtype, shape is None, {} if name in shapes else {LISTS: True})
    if shape is None or (shape and dtype.hasobject):
        return Field(name, (), dtype, True, {"nested": True})
    return Field(name, (), dtype, True, inner=(None, *shape))


def _known_shape(path: str, name: str, given: tuple[int, ...], counts: set[int]) -> tuple[int, ...]:
    """Return a shape with the length that -1 stands for.

    Parameters
    ----------
    counts : numbers of values in a record.

    Raises
    ------
    FormatError : no length, or more than one, fits the records.
    """
    others, count = -prod(given), next(iter(counts))
    is_known = len(counts) == 1 and others > 0 and count % others == 0
    shape = tuple(count // others if length == -1 and is_known else length for length in given)
    if min(shape, default=0) < 0:
        raise FormatError(
            "a feature has no such shape",
            file=path,
            field=name,
            expected="lengths; -1 for one of them where all records have equally many values, a multiple of the others",
            found=f"shapes={{{name!r}: {given}}}, and {', '.join(map(str, sorted(counts)))} values in a record",
            remedy=f"give all lengths, or shapes={{{name!r}: None}} for a feature of variable length",
        )
    return shape


def _blocks(path: str, file: IO[bytes], features: _Features) -> tuple[Integers, Integers, Integers]:
    """Return offset and length of the blocks of records, and their first rows, with the number of rows. ``features``:
    learns from the first ``INFERRED`` records, as far as they are read at once, and from the first one that begins in
    each of as many equal sections of the file.
    """
    size, at, section = file.seek(0, io.SEEK_END), 0, -1
    borders = Borders(BLOCK_BYTES)
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
                remedy=_NO_ZLIB if not at and header[:1] == b"x" else RESTORE,
            )
        nbytes = HEADER + length + FOOTER
        before, section = section, at * INFERRED // size
        if before < section or (borders.rows < INFERRED and at + nbytes <= READ_BYTES):
            features.add(next(_examples(path, borders.rows, at, read(nbytes))), borders.rows)
        at += nbytes
        borders.add(at)
    if not borders.rows:
        raise NoSamples("the file has no records", file=path, expected="one at least")
    borders.close(at)
    return borders.blocks()


@dataclass
class _Feature:
    """Feature as far as some records show it.

    Parameters
    ----------
    counts : numbers of values in a record, or in a feature of a list.
    """

    kind: str
    counts: set[int]
    is_list: bool


class _Features:
    """Features of the records, as far as some of these show them.

    Attributes
    ----------
    empty : names of features that a record has without values.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._features: dict[str, _Feature] = {}
        self.empty: set[str] = set()
        self._examined = 0

    def add(self, example: Any, row: int) -> None:
        """Learn from a record."""
        self._examined += 1
        context, lists = example.context.feature, example.feature_lists.feature_list
        for name, feature in context.items():
            self._learn(name, [feature], row, False)
        for name, features in lists.items():
            self._learn(name, features.feature, row, True)
        for name, known in self._features.items():
            if not known.is_list and name not in context:
                known.counts.add(0)

    def _learn(self, name: str, features: Sequence[Any], row: int, is_list: bool) -> None:
        for feature in features:
            kind = feature.WhichOneof("kind")
            if kind is None:  # no values, as TensorFlow Extended writes what is missing
                self.empty.add(name)
                continue
            is_new = not is_list and self._examined > 1
            known = self._features.setdefault(name, _Feature(kind, {0} if is_new else set(), is_list))
            count = len(getattr(feature, kind).value)
            if not any(known.counts):  # the kind of a list without values says nothing
                known.kind = kind
            if known.is_list != is_list:
                raise FormatError(
                    "a feature of the context and a list of features have one name", file=self._path, field=name
                )
            if known.kind != kind and count:
                raise _other_kind(FormatError, self._path, name, row, known.kind, kind)
            known.counts.add(count)

    def result(self) -> dict[str, _Feature]:
        """Return the features by name, sorted."""
        if not self._features:
            expected = "records of tf.train.Example"
            raise FormatError("the records have no features", file=self._path, expected=expected)
        for name in self.empty & self._features.keys():
            self._features[name].counts.add(0)
        return dict(sorted(self._features.items()))


def _other_kind(error: type[DataError], path: str, name: str, row: int, expected: str, found: str) -> DataError:
    return error(
        "a record has a feature of another type than the others",
        file=path,
        field=name,
        row=row,
        expected=f"{expected}, as in the records before",
        found=found,
        remedy="write the feature with one type, or leave it out of inputs= and targets=",
    )


@declared
@dataclass(frozen=True, eq=False)
class RecordBlocks(ByteRangeBlocks):
    """Features of records; a block is a range of whole records.

    Parameters
    ----------
    lists : names of the fields that are lists of features.
    """

    lists: tuple[str, ...]

    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        return int(self.nbytes[block]) * 2

    def decode(self, block: int, names: Sequence[str], stored: Bytes) -> Any:
        row, byte = int(self.edges[block]), int(self.offset[block])
        examples = list(_examples(self.path, row, byte, stored.tobytes()))
        return {name: self._values(name, examples, row) for name in names}

    def _values(self, name: str, examples: Sequence[Any], row: int) -> Any:
        """Return the rows of a feature, or of a list of features."""
        field = self.fields[name]
        if name not in self.lists:
            features = [example.context.feature.get(name) for example in examples]
            count = None if field.ragged else prod(field.shape)
            flat, offsets = self._flat(field, features, count, row + np.arange(len(features)))
            return RaggedArray(flat, offsets) if field.ragged else flat.reshape(len(features), *field.shape)
        of_rows = [_features_of(example, name) for example in examples]
        lengths = np.fromiter(map(len, of_rows), np.int64, len(of_rows))
        edges = np.append(0, np.cumsum(lengths))
        count = None if field.nested else prod(field.element_shape)
        features = [feature for of_row in of_rows for feature in of_row]
        flat, offsets = self._flat(field, features, count, row + np.repeat(np.arange(len(of_rows)), lengths))
        if field.nested:
            return nested(flat, [edges, offsets])
        values = flat.reshape(len(features), *field.element_shape)
        return nested(values, [edges]) if field.dtype.hasobject else RaggedArray(values, edges)

    def _flat(self, field: Field, features: Sequence[Any], count: int | None, rows: Integers) -> tuple[Array, Integers]:
        """Return the values of features one after the other, and where those of each begin and end.

        Parameters
        ----------
        features : None for one that a record lacks.
        count : values of each; None: any number.
        rows : int64[features], the record of each.
        """
        kind = next(kind for kind, dtype in _KINDS.items() if dtype == field.dtype)
        lists = []
        for feature, row in zip(features, rows, strict=True):
            found = None if feature is None else feature.WhichOneof("kind")
            values = () if found is None else getattr(feature, found).value
            if found not in (kind, None) and len(values):
                raise _other_kind(DecodeError, self.path, field.name, int(row), kind, str(found))
            lists.append(values)
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        if count is not None and (uneven := lengths != count).any():
            at = int(uneven.argmax())
            raise DecodeError(
                "a record has another number of values",
                file=self.path,
                field=field.name,
                row=int(rows[at]),
                expected=f"{count} values of the type {kind}",
                found=int(lengths[at]),
                remedy=f"shapes={{{field.name!r}: None}} reads a feature of variable length",
            )
        flat = np.empty(int(lengths.sum()), field.dtype)
        ends = np.cumsum(lengths).tolist()
        for values, begin, end in zip(lists, [0, *ends[:-1]], ends, strict=True):
            for low in range(begin, end, PYTHON_VALUES):
                flat[low : min(end, low + PYTHON_VALUES)] = values[low - begin : low - begin + PYTHON_VALUES]
        return flat, np.append(0, ends).astype(np.int64)


def _features_of(example: Any, name: str) -> Sequence[Any]:
    found = example.feature_lists.feature_list.get(name)
    return () if found is None else found.feature


def _examples(path: str, row: int, byte: int, data: bytes) -> Iterator[Any]:
    """Yield the ``tf.train.Example`` of each record of a block; raise ``DecodeError`` if a checksum is wrong, or a
    record is none.
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
    """Return the class of messages ``tf.train.SequenceExample``, without TensorFlow.

    A message ``tf.train.Example`` is one of these with a context alone.
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
    message("FeatureList", ("feature", many, "Feature"))
    for name, member, kind in (("Features", "feature", "Feature"), ("FeatureLists", "feature_list", "FeatureList")):
        entry_name = f"{member.title().replace('_', '')}Entry"
        entry = message(name, (member, many, f"{name}.{entry_name}")).nested_type.add(name=entry_name)
        entry.options.map_entry = True
        entry.field.add(name="key", number=1, label=one, type=kinds.TYPE_STRING)
        of_value = {"type": kinds.TYPE_MESSAGE, "type_name": f".matex_data.{kind}"}
        entry.field.add(name="value", number=2, label=one, **of_value)
    message("SequenceExample", ("context", one, "Features"), ("feature_lists", one, "FeatureLists"))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("matex_data.SequenceExample"))
