"""Choice of the columns to read, and the leaves of the schema that hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import pyarrow as pa

from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches
from matex_data.readers import left_out
from matex_data.readers.parquet.members import Member, UnreadableType, class_names, members, storage

Chosen = dict[str, tuple[Member, int]]
"""By name of the field: its member, and the number of the leaf of the schema that holds it."""


def choose(path: str, schema: pa.Schema, names: Sequence[str] | None, dtype: Mapping[str, Any]) -> Chosen:
    """Return the fields of these names; None: all that can be read, with a warning of the others.

    Raises
    ------
    FieldNotFound : there is no column of that name.
    FormatError : it cannot be read.
    """
    known, unread = _fields(path, schema, dtype)
    if names is None:
        if not known:
            raise FormatError(
                "the file has no column that can be read", file=path, expected="numbers", found=left_out.shown(unread)
            )
        if unread:
            left_out.warn(f"{path}: {len(unread)} column{'s' * (len(unread) > 1)}", unread)
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


def _fields(path: str, schema: pa.Schema, dtype: Mapping[str, Any]) -> tuple[Chosen, dict[str, str]]:
    """Return all fields, and the reason for each column that cannot be read."""
    known: Chosen = {}
    unread: dict[str, str] = {}
    labels = class_names(schema.metadata)
    first = 0
    for column in schema:
        leaves = range(first, first := first + _count_leaves(column.type))
        requested = next((kind for pattern, kind in dtype.items() if fnmatchcase(column.name, pattern)), None)
        try:
            of_column = list(members(column, labels.get(column.name), requested))
        except UnreadableType as reason:
            unread[column.name] = str(reason)
            continue
        except DataError as error:
            raise error.at(path, column.name) from error
        known.update({m.field.name: (m, leaf) for m, leaf in zip(of_column, leaves, strict=True)})
    return known, unread


def leaf_numbers(schema: pa.Schema) -> list[tuple[int, int]]:
    """Return for each leaf of a schema the number of its column, and its own number in this column."""
    return [(i, leaf) for i, column in enumerate(schema) for leaf in range(_count_leaves(column.type))]


def _count_leaves(kind: pa.DataType) -> int:
    """Return the number of leaves of a type in the schema of Parquet."""
    kind = storage(kind)
    if isinstance(kind, pa.FixedShapeTensorType):
        return 1
    if pa.types.is_map(kind):
        return _count_leaves(kind.key_type) + _count_leaves(kind.item_type)
    if pa.types.is_struct(kind):
        return sum(_count_leaves(kind.field(i).type) for i in range(kind.num_fields))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _count_leaves(kind.value_type)
    return 1
