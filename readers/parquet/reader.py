"""Index of Parquet files: row groups are the blocks, and columns the fields."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pyarrow as pa

from matex_data._types import Integers
from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.table import Column
from matex_data.readers.parquet.footer import MAGIC, read_footer
from matex_data.readers.parquet.members import Member, UnreadableType, class_names, members, storage
from matex_data.readers.parquet.row_groups import RowGroups

TABLE_BYTES = 4 << 20  # stored bytes of the columns of a row group that one thread decodes, about
MAX_SHOWN = 8  # columns in an error or a warning


def index(path: str, names: Sequence[str] | None = None, *, dtype: Mapping[str, Any] | None = None) -> Index:
    """Index the rows of a Parquet file.

    Parameters
    ----------
    names : columns; members of structures as ``"<column>.<member>"``. None: all; a warning lists the columns that
        cannot be read.
    dtype : numeric dtypes of columns, by name or pattern, such as ``{"label": "int32", "x*": "float32"}``. Others have
        that of the file; integers and booleans float64, with NaN, if the file counts missing values among them.

    Raises
    ------
    FieldNotFound : there is no column of that name.
    FormatError : the file is damaged or no Parquet file, or a column cannot be read.
    """
    footer, metadata = read_footer(path)
    try:
        schema = metadata.schema.to_arrow_schema()
        if metadata.num_row_groups and metadata.row_group(0).num_columns and metadata.row_group(0).column(0).file_path:
            raise FormatError("the rows are in other files", file=path, remedy="open the files with the rows instead")
        groups = _Groups.of(path, metadata, footer.begin)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise FormatError("the footer is damaged", file=path, byte=footer.begin, found=error) from error
    chosen = _select(path, schema, groups, names, dtype or {})
    layouts: dict[str, Layout] = {}
    for several in _tables(chosen, groups):
        leaves = sorted({leaf for name in several for leaf in chosen[name][1]})
        offset, nbytes = groups.offset[:, leaves], groups.nbytes[:, leaves]
        position = {leaf: i for i, leaf in enumerate(leaves)}
        table = RowGroups(
            path,
            groups.edges,
            footer,
            groups.number,
            {name: chosen[name][0] for name in several},
            {name: tuple(position[leaf] for leaf in chosen[name][1]) for name in several},
            tuple(groups.paths[leaf] for leaf in leaves),
            offset,
            nbytes,
            max(1.0, float(groups.plain[:, leaves].sum()) / max(1, int(nbytes.sum()))),
        )
        layouts.update({name: Column(table, name) for name in several})
    fields = {name: member.field for name, (member, _) in chosen.items()}
    return Index(fields, [FileIndex(path, int(groups.edges[-1]), {name: layouts[name] for name in fields})])


@dataclass(frozen=True)
class _Groups:
    """Row groups that have rows.

    Parameters
    ----------
    number : int64[n], of each of them.
    edges : int64[n + 1], the first row of each, and the number of rows.
    offset, nbytes, plain : int64[n, leaves], byte range of each column chunk, and its size without compression.
    missing : bool[leaves], a column chunk counts missing values.
    paths : names of the leaves in the schema.
    """

    number: Integers
    edges: Integers
    offset: Integers
    nbytes: Integers
    plain: Integers
    missing: Any
    paths: Sequence[str]

    @classmethod
    def of(cls, path: str, metadata: Any, end: int) -> _Groups:
        """Collect the columns of a footer, and check that they lie in front of it, at byte ``end``."""
        leaves = metadata.num_columns
        rows = np.array([metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)], np.int64)
        number = np.flatnonzero(rows > 0)
        if (rows < 0).any() or int(rows.sum()) != metadata.num_rows:
            raise FormatError(
                "the row groups do not add up", file=path, expected=f"{metadata.num_rows} rows", found=rows.sum()
            )
        table = np.zeros((3, len(number), leaves), np.int64)
        missing = np.zeros(leaves, bool)
        for i, group in enumerate(map(metadata.row_group, number.tolist())):
            for leaf in range(leaves):
                chunk = group.column(leaf)
                first = chunk.dictionary_page_offset
                begin = chunk.data_page_offset if not first else min(first, chunk.data_page_offset)
                table[:, i, leaf] = begin, chunk.total_compressed_size, chunk.total_uncompressed_size
                statistics = chunk.statistics
                missing[leaf] |= bool(statistics is not None and statistics.has_null_count and statistics.null_count)
        offset, nbytes, plain = table
        outside = (offset < len(MAGIC)) | (nbytes < 0) | (offset + nbytes > end)
        if outside.any():
            i, leaf = np.argwhere(outside)[0].tolist()
            raise FormatError(
                "a column chunk lies outside of the file",
                file=path,
                field=metadata.schema.column(leaf).path,
                byte=int(offset[i, leaf]),
                expected=f"bytes {len(MAGIC)} to {end}",
                found=f"{int(nbytes[i, leaf])} bytes",
                remedy="the file is damaged: restore it from its source",
            )
        edges = np.append(0, np.cumsum(rows[number]))
        paths = [metadata.schema.column(leaf).path for leaf in range(leaves)]
        return cls(number, edges, offset, nbytes, plain, missing, paths)


_Chosen = dict[str, tuple[Member, Sequence[int]]]
"""By name of the field: its member, and the leaves of the schema that hold it."""


def _select(
    path: str, schema: pa.Schema, groups: _Groups, names: Sequence[str] | None, dtype: Mapping[str, Any]
) -> _Chosen:
    known: _Chosen = {}
    unread: dict[str, str] = {}
    labels = class_names(schema.metadata)
    first = 0
    for column in schema:
        leaves = range(first, first := first + _count_leaves(column.type))
        missing = bool(groups.missing[list(leaves)].any())
        requested = next((kind for pattern, kind in dtype.items() if fnmatchcase(column.name, pattern)), None)
        try:
            found = list(members(column, missing, labels.get(column.name), requested))
        except UnreadableType as reason:
            unread[column.name] = str(reason)
            continue
        except DataError as error:
            raise error.at(path, column.name) from error
        each = _leaves_of(found, leaves)
        known.update({member.field.name: (member, of) for member, of in zip(found, each, strict=True)})
    if names is None:
        if not known:
            raise FormatError(
                "the file has no column that can be read", file=path, expected="numbers", found=_shown(unread, "; ")
            )
        if unread:
            warnings.warn(
                f"{path}: {len(unread)} column{'s' * (len(unread) > 1)} cannot be read and are left out\n  "
                f"{_shown(unread)}\n  select the fields with inputs= and targets=",
                stacklevel=2,
            )
        return known
    for name in names:
        if name in unread:
            raise FormatError(
                "the column cannot be read",
                file=path,
                field=name,
                expected="numbers, texts, times, or lists and structures of these",
                found=unread[name],
                remedy="select other columns with inputs= and targets=, or convert it before you write the file",
            )
        if name not in known:
            raise FieldNotFound(
                "the file has no such column",
                file=path,
                field=name,
                expected=f"one of {near_matches(name, [*known, *unread])}",
                found=f"{len(known) + len(unread)} columns",
            )
    return {name: known[name] for name in names}


def _leaves_of(found: Sequence[Member], leaves: range) -> list[Sequence[int]]:
    """Return the leaves of each member of a column: one each, or all of them for a column without structures."""
    return [[leaf] for leaf in leaves] if len(found) == len(leaves) else [list(leaves)] * len(found)


def _count_leaves(kind: pa.DataType) -> int:
    """Return the number of leaves of a type in the Parquet schema."""
    kind = storage(kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        return 1
    if pa.types.is_struct(kind) or pa.types.is_map(kind):
        inner = (
            [kind.field(i).type for i in range(kind.num_fields)]
            if pa.types.is_struct(kind)
            else [kind.key_type, kind.item_type]
        )
        return sum(map(_count_leaves, inner))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _count_leaves(kind.value_type)
    return 1


def _tables(chosen: _Chosen, groups: _Groups) -> Iterator[list[str]]:
    """Yield the names of fields that are decoded in one go: neighbours with about `TABLE_BYTES` a row group."""
    mean = groups.nbytes.mean(axis=0) if len(groups.nbytes) else np.zeros(len(groups.paths))
    several: list[str] = []
    nbytes = 0.0
    for name, (_, leaves) in chosen.items():
        if several and nbytes + mean[list(leaves)].sum() > TABLE_BYTES:
            yield several
            several, nbytes = [], 0.0
        several.append(name)
        nbytes += float(mean[list(leaves)].sum())
    if several:
        yield several


def _shown(unread: Mapping[str, str], separator: str = "\n  ") -> str:
    lines = [f"{name!r}: {reason}" for name, reason in list(unread.items())[:MAX_SHOWN]]
    return separator.join(lines + ([f"and {len(unread) - MAX_SHOWN} more"] if len(unread) > MAX_SHOWN else []))
