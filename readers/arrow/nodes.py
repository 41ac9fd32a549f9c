"""Nodes and buffers of an Arrow schema: which of a record batch belong to a column.

Layouts of the types: https://arrow.apache.org/docs/format/Columnar.html#physical-memory-layout
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from matex_data._types import Integers
from matex_data.declared import declared


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


def column_borders(columns: list[Nodes], variadic: Integers) -> Integers:
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
