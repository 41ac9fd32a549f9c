"""Index of Parquet files: row groups are the blocks, and columns the fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.table import Column
from matex_data.readers.parquet.chunks import column_chunks
from matex_data.readers.parquet.columns import choose
from matex_data.readers.parquet.footer import read_footer
from matex_data.readers.parquet.row_groups import RowGroups

TABLE_BYTES = 4 << 20  # stored bytes of the columns of a row group that one thread decodes, about


def index(path: str, names: Sequence[str] | None = None, *, dtype: Mapping[str, Any] | None = None) -> Index:
    """Index the rows of a Parquet file.

    Parameters
    ----------
    names : columns; members of structures as ``"<column>.<member>"``; folders of the form ``name=value`` that hold the
        file. None: all; a warning lists the columns that cannot be read.
    dtype : numeric dtypes of columns, by name or pattern, such as ``{"label": "int32", "x*": "float32"}``. Others have
        that of the file; integers and booleans float64, with NaN, if the file counts missing values among them.

    Raises
    ------
    FieldNotFound : there is no column of that name.
    FormatError : the file is damaged or no Parquet file, or a column cannot be read.
    """
    footer, metadata = read_footer(path)
    try:
        chosen = choose(path, metadata.schema.to_arrow_schema(), names, dtype or {})
        leaves = [leaf for _, leaf in chosen.values()]
        chunks = column_chunks(path, metadata, leaves, footer.begin)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        raise FormatError("the footer is damaged", file=path, byte=footer.begin, found=error) from error
    members = {
        name: member.with_missing() if missing else member
        for (name, (member, _)), missing in zip(chosen.items(), chunks.missing.tolist(), strict=True)
    }
    names = list(members)
    layouts: dict[str, Layout] = {}
    for low, high in _tables(chunks.nbytes):
        nbytes = chunks.nbytes[:, low:high]
        table = RowGroups(
            path,
            chunks.edges,
            {name: members[name] for name in names[low:high]},
            chunks.offset[:, low:high].ravel(),
            nbytes.ravel(),
            max(1.0, float(chunks.plain_bytes[:, low:high].sum()) / max(1, int(nbytes.sum()))),
            footer,
            chunks.groups,
            tuple(metadata.schema.column(leaf).path for leaf in leaves[low:high]),
        )
        layouts.update({name: Column(table, name) for name in names[low:high]})
    fields = {name: member.field for name, member in members.items()}
    return Index(fields, [FileIndex(path, int(chunks.edges[-1]), {name: layouts[name] for name in fields})])


def _tables(nbytes: Array) -> Iterator[tuple[int, int]]:
    """Yield the first column and the end of neighbours that are decoded in one go: `TABLE_BYTES` a row group, about."""
    mean = nbytes.sum(axis=0) / max(1, len(nbytes))
    low, total = 0, 0.0
    for column, size in enumerate(mean.tolist()):
        if column > low and total + size > TABLE_BYTES:
            yield low, column
            low, total = column, 0.0
        total += size
    yield low, len(mean)
