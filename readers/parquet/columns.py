"""Choice of the columns to read, and the leaves of the schema that hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import pyarrow as pa

from matex_data.errors import DataError
from matex_data.fields import Field
from matex_data.index.model import Index
from matex_data.readers.catalogue import Catalogue
from matex_data.readers.parquet.members import Member, UnreadableType, class_names, members, storage

Chosen = dict[str, tuple[Member, int]]
"""By name of the field: its member, and the number of the leaf of the schema that holds it."""


def columns_of(path: str, schema: pa.Schema, dtype: Mapping[str, Any], make: Callable[[Chosen], Index]) -> Catalogue:
    """Return the catalogue of the columns of a schema; ``make`` returns the index of chosen ones."""
    known, unread = _fields(path, schema, dtype)
    return Catalogue(path, known, lambda names: make({name: known[name] for name in names}), unread, "column")


def fields_of(members: Mapping[str, Member]) -> dict[str, Field]:
    """Return the fields of members, by name."""
    return {name: member.field for name, member in members.items()}


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
            error.at(path, column.name)
            raise
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
