"""Index of Parquet files: row groups are the blocks, and columns the fields.

Format: Apache Parquet 2, https://parquet.apache.org/docs/file-format/. pyarrow reads the footer and decodes the pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pyarrow as pa

from matex_data._types import Array
from matex_data.errors import FormatError
from matex_data.index.model import Index, Layout
from matex_data.index.table import Column
from matex_data.readers.catalogue import Catalogue, file_of_rows
from matex_data.readers.parquet.footer import Footer, column_chunks, read_footer
from matex_data.readers.parquet.members import Leaves, columns_of, fields_of
from matex_data.readers.parquet.row_groups import RowGroups

TABLE_BYTES = 4 << 20  # stored bytes of the columns of a row group that one thread decodes, about


def index(path: str, *, dtype: Mapping[str, Any] | None = None) -> Catalogue:
    """Index the rows of a Parquet file. Members of structures are fields called ``"<column>.<member>"``.

    Parameters
    ----------
    dtype : numeric dtypes of fields, by their names or those of the columns, or by pattern, such as ``{"label":
        "int32", "x*": "float32"}``. Others have that of the file; integers and booleans float64, with NaN, if the file
        counts missing values among them.

    Raises
    ------
    FormatError : the file is damaged or no Parquet file, or a column cannot be read.
    """
    footer, metadata = read_footer(path)
    with _damage_of(footer):
        return columns_of(path, metadata.schema.to_arrow_schema(), dtype or {}, partial(_of_columns, footer, metadata))


@contextmanager
def _damage_of(footer: Footer) -> Iterator[None]:
    """Raise ``FormatError`` for what pyarrow raises on a damaged footer."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        if "Cannot decrypt" in str(error):
            remedy = "select the others by inputs=, or write a copy without encryption"
            raise FormatError("columns are encrypted", file=footer.path, found=error, remedy=remedy) from error
        raise FormatError("the footer is damaged", file=footer.path, byte=footer.begin, found=error) from error


def _of_columns(footer: Footer, metadata: Any, chosen: Leaves) -> Index:
    path, leaves = footer.path, [leaf for _, leaf in chosen.values()]
    with _damage_of(footer):
        chunks = column_chunks(footer, metadata, leaves)
    members = {
        name: member.with_missing() if missing and not member.depth else member  # empty lists are counted as missing
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
    return file_of_rows(path, fields_of(members), layouts)


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
