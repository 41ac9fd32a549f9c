"""Parquet files to damage, and their values by pyarrow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.readers.parquet import test_reader


def write(folder: Path) -> list[Path]:
    """Write a file of each kind of pages."""
    content = test_reader.table(30)
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"compression": "none", "use_dictionary": False},
        "zstd": {"compression": "zstd"},
        "snappy": {"data_page_version": "2.0"},
        "checked": {"write_page_checksum": True},
    }
    return [Path(test_reader.write(folder / f"own_{kind}.parquet", content, **kinds[kind])) for kind in kinds]


def read(path: Path) -> dict[str, Any]:
    """Return the values by pyarrow's own conversions, as far as the schema is that of the files written above."""
    checked = pq.ParquetFile(path, page_checksum_verification=True).read(use_threads=False)
    return values(checked)


def values(table: pa.Table) -> dict[str, Any]:
    """Return the fields of a table by pyarrow's own conversions."""
    return {name: found for column in table.column_names for name, found in _fields(column, table[column])}


def _fields(name: str, column: pa.ChunkedArray) -> list[tuple[str, Any]]:
    kind = column.type
    if pa.types.is_struct(kind):
        rows = column.to_pylist()
        return [(f"{name}.{m.name}", np.array([row[m.name] for row in rows])) for m in kind]
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        members = [(m.name, m.type.to_pandas_dtype()) for m in kind.value_type]
        rows = column.to_pylist()
        return [(f"{name}.{m}", test_reader.objects([[x[m] for x in row] for row in rows], t)) for m, t in members]
    if pa.types.is_list(kind):
        return [(name, test_reader.objects(column.to_pylist(), kind.value_type.to_pandas_dtype()))]
    if isinstance(kind, pa.FixedShapeTensorType):
        return [(name, np.concatenate([chunk.to_numpy_ndarray() for chunk in column.chunks]))]
    if pa.types.is_fixed_size_list(kind):
        return [(name, np.array(column.to_pylist(), kind.value_type.to_pandas_dtype()))]
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind):
        texts = column.cast(pa.string()).cast(pa.binary()).to_pylist()
        return [(name, np.array([text or b"" for text in texts], object))]  # a missing text is an empty one
    return [(name, column.to_numpy())]
