"""Contract for readers of further file formats.

A reader is a function that returns all that it finds in one file: for each name a field, and the function that makes
the `Layout` of its rows; or the reason why it cannot be read. It reads metadata only. The core chooses among the
fields, by name or pattern, and says which are missing or left out; the pipeline reads the rows, each rank its own, and
shuffles and batches them. The following reader is complete. Its files have a header of 8 bytes and records of a label
(int32) and a position (three float32)::

    import numpy as np

    from matex_data.abc import Field, Format, FormatError, Strided, size_of

    MAGIC, RECORD_BYTES = b"POINTS\\0\\1", 16

    def index(path, *, byteorder="<"):
        size = size_of(path) - len(MAGIC)
        if size % RECORD_BYTES:
            raise FormatError("the file is truncated", file=path, expected="whole records", found=f"{size} bytes")
        rows, i4, f4 = size // RECORD_BYTES, np.dtype(f"{byteorder}i4"), np.dtype(f"{byteorder}f4")
        label = Strided(rows, offset=8, stride=RECORD_BYTES, dtype=i4, shape=())
        position = Strided(rows, offset=12, stride=RECORD_BYTES, dtype=f4, shape=(3,))
        return {
            "label": (Field("label", (), np.dtype("i4")), lambda: label),
            "position": (Field("position", (3,), np.dtype("f4")), lambda: position),
        }

    POINTS = Format(index, suffixes=(".points",), magic=((0, MAGIC),), remote=True)

The package registers the format in its ``pyproject.toml``, after which `open_dataset` detects such files by content and
by name, in directories too, and passes keyword options (here ``byteorder=``) to the reader::

    [project.entry-points."matex_data.readers"]
    points = "my_package:POINTS"

Rules
-----
- Layouts are made for chosen fields alone, and strided ones of the same records are read together. Return a
  `Catalogue` in place of the dict for a word such as "column" in messages, for fields that are read only if they are
  named (``listed``), or for one table of all chosen fields. Raise `FormatError`, which names the file, for one that is
  damaged.
- A reader of the form ``index(path, names=None, **options) -> Index`` chooses among the fields itself: it raises
  `FieldNotFound` for an unknown one, for which `near_matches` lists similar names.
- Each field has a layout with as many rows as the file. `Strided`: rows at even distances. `Transposed`: the sample
  axis is not the first. `Chunked`: compressed chunks. `ByteRangeBlocks`: blocks of records that are decoded as one,
  each a byte range. `MemoryRows`: few rows, in the index itself. `LibraryRows`: subclass it for rows that only the
  library of the format can read. `jagged_columns`: samples of variable length, over layouts of their elements.
  `Layout`: the base class, for anything else that has byte ranges.
- ``convert`` of a layout maps stored numbers to those of the field: a function ``(stored, out)`` of a module, or an
  object that can be pickled. An index is broadcast to all ranks, so everything in it must be immutable and picklable.
- ``index=`` of `open_dataset` stores an index for later jobs, and runs nothing that a file names. A layout class of
  another package therefore has the methods ``to_json`` and ``from_json``, see `Layout`; functions and frozen
  dataclasses that layouts refer to are declared by the decorator `declared`. Without them, ``index=`` raises an error.
  The layouts of this package have all that.
- `Field.dtype` is in native byte order. ``Strided.dtype`` may have either. A sample of a ragged field is an array of
  the shape ``Field.inner``, in which None stands for axes that vary. Its layout has ``inner_bytes``, from which the
  sizes of the windows follow. The output takes samples as an object array does; pass lists of numbers to
  `scatter_lists`, many at once: that takes a tenth of the time of an array for each of them.
- A layout raises `DecodeError` for samples that are damaged, in ``on_complete``: ``on_error="skip"`` leaves them out.
- A `Codec` undoes a filter of chunks. It is registered under the entry point group ``matex_data.codecs``, by the number
  of the filter in the registry of HDF5.
- `open_binary`, `read_bytes` and `size_of` take the URLs of object stores as well as paths. A reader that opens its
  files in no other way says so: ``Format(..., remote=True)``.
- A reader of files that name others, by path or by URL, asks `Trust` before it looks at any of them:
  ``trust.beside(path).check(target, path)``. It gets it as its parameter ``trust``: ``Format(..., takes_trust=True)``.
- A large file that all ranks index at once has a second function, ``index_collectively``; see `Format` and
  `IndexingRanks`.
"""

from __future__ import annotations

from matex_data.codecs.pipeline import Codec, Filter, Pipeline
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError, FieldNotFound, FormatError, near_matches
from matex_data.fields import Field, Schema
from matex_data.index.cache import ChunkCache
from matex_data.index.chunked import Chunked
from matex_data.index.decoded import ByteRangeBlocks
from matex_data.index.interleaved import group_interleaved
from matex_data.index.jagged import Content, Jagged, jagged_columns
from matex_data.index.library import LibraryRows, MemoryRows
from matex_data.index.model import FileIndex, Index, Layout, ReadRequest, RowSelection
from matex_data.index.ragged import scatter_lists
from matex_data.index.scatter import Convert, scatter
from matex_data.index.strided import Strided, Transposed
from matex_data.index.table import Column, Table
from matex_data.readers.catalogue import Catalogue
from matex_data.readers.collective import IndexingRanks
from matex_data.readers.formats import Format, Reader
from matex_data.storage.files import open_binary, read_bytes, size_of
from matex_data.storage.trust import Trust

__all__ = [
    "ByteRangeBlocks",
    "Catalogue",
    "ChunkCache",
    "Chunked",
    "Codec",
    "Column",
    "Content",
    "Convert",
    "DataError",
    "DecodeError",
    "Field",
    "FieldNotFound",
    "FileIndex",
    "Filter",
    "Format",
    "FormatError",
    "Index",
    "IndexingRanks",
    "Jagged",
    "Layout",
    "LibraryRows",
    "MemoryRows",
    "Pipeline",
    "ReadRequest",
    "Reader",
    "RowSelection",
    "Schema",
    "Strided",
    "Table",
    "Transposed",
    "Trust",
    "declared",
    "group_interleaved",
    "jagged_columns",
    "near_matches",
    "open_binary",
    "read_bytes",
    "scatter",
    "scatter_lists",
    "size_of",
]
