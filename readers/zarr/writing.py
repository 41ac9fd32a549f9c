"""References to the chunks of netCDF and HDF5 files, and to the tiles and strips of TIFF files, as one Zarr store.

xarray and kerchunk open it: https://fsspec.github.io/kerchunk/spec.html
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from matex_data._types import Array
from matex_data.codecs.pipeline import BLOSC, DEFLATE, FLETCHER32, SHUFFLE, ZSTD, Filter
from matex_data.errors import DataError, FormatError
from matex_data.index.chunked import Chunked
from matex_data.index.strided import Strided
from matex_data.readers.catalogue import Unreadable
from matex_data.readers.dimensions.variables import FileContent, Variable
from matex_data.readers.netcdf.reader import open_content
from matex_data.readers.zarr.arrays import DIMENSIONS
from matex_data.readers.zarr.chunks import Grid
from matex_data.storage.files import reading
from matex_data.storage.trust import trees_of

INLINE_BYTES = 1 << 14  # of all values of a variable: smaller ones stand in the references themselves
RECORD_SIZE = 100_000  # chunks of a file of references in Parquet
_CODECS = {DEFLATE: "zlib", FLETCHER32: "fletcher32", ZSTD: "zstd", BLOSC: "blosc"}
_SCHEMA = pa.schema([("path", pa.string()), ("offset", pa.int64()), ("size", pa.int64()), ("raw", pa.binary())])

KeyValue = str | list[Any]
"""Value of a key: its content, or path, offset and length in bytes."""


@dataclass(frozen=True)
class References:
    """References to the chunks of variables.

    Parameters
    ----------
    entries : by key.
    left_out : the reason for each variable that is not among them, by name.
    """

    entries: Mapping[str, KeyValue]
    left_out: Mapping[str, str]

    def trees(self, path: str) -> list[str]:
        """Return what ``trusted=`` of `open_dataset` has to name for references that are written to ``path``."""
        return trees_of((str(entry[0]) for entry in self.entries.values() if isinstance(entry, list)), path)

    def write(self, path: str) -> None:
        """Write the references: to a JSON file, or to a folder of Parquet files if the name ends with ``.parquet`` or
        ``.parq``.

        Raises
        ------
        DataError : the file cannot be written.
        """
        try:
            if path.lower().endswith((".parquet", ".parq")):
                self._write_parquet(Path(path))
            else:
                Path(path).write_text(json.dumps({"version": 1, "refs": self.entries}))
        except OSError as error:
            raise DataError("the references cannot be written", file=path, found=error) from error

    def _write_parquet(self, folder: Path) -> None:
        documents = {key: json.loads(str(value)) for key, value in self.entries.items() if _is_metadata(key)}
        folder.mkdir()
        (folder / ".zmetadata").write_text(json.dumps({"metadata": documents, "record_size": RECORD_SIZE}))
        for name in [key.removesuffix(".zarray").strip("/") for key in documents if key.endswith(".zarray")]:
            array = documents[f"{name}/.zarray"]
            counts = Grid.of(array["shape"], array["chunks"], 0).counts
            (folder / name).mkdir(parents=True)
            keys = product(*map(range, counts))
            for first in range(0, prod(counts), RECORD_SIZE):
                rows = [_row(self.entries.get(_key(name, position))) for position in islice(keys, RECORD_SIZE)]
                table = pa.Table.from_pylist(rows, _SCHEMA)
                pq.write_table(table, folder / name / f"refs.{first // RECORD_SIZE}.parq")


def _is_metadata(key: str) -> bool:
    return key.rpartition("/")[2] in (".zgroup", ".zattrs", ".zarray")


def _row(entry: KeyValue | None) -> dict[str, Any]:
    """Return a reference as fsspec reads it: a chunk that was never written has neither path nor content."""
    path, offset, size = entry if isinstance(entry, list) else (None, 0, 0)
    raw = base64.b64decode(entry.removeprefix("base64:")) if isinstance(entry, str) else None
    return {"path": path, "offset": offset, "size": size, "raw": raw}


def references(paths: Sequence[str], sample_dim: str | None = None) -> References:
    """Return references to the chunks of files, whose samples follow one another.

    Parameters
    ----------
    paths : netCDF or HDF5 files. Variables without the sample dimension are those of the first one.
    sample_dim : dimension that counts the samples. None: as `matex_data.readers.netcdf.reader.index` chooses it.

    Raises
    ------
    FormatError : a file is damaged, or files differ in a way that one store cannot express.
    """
    entries: dict[str, KeyValue] = {".zgroup": json.dumps({"zarr_format": 2})}
    left_out: dict[str, str] = {}
    with ExitStack() as opened:
        contents = [opened.enter_context(open_content(path)) for path in paths]
        first = contents[0]
        dimension = first.sample_dimension(first.variables, sample_dim) if len(contents) > 1 else ""
        others = [{variable.name: variable for variable in content.variables} for content in contents[1:]]
        for variable in first.variables:
            try:
                alike = _alike(variable, first, others, dimension)
                entries.update(_of_variable(alike, [c.path for c in contents[: len(alike)]]))
            except Unreadable as reason:
                left_out[variable.name] = str(reason)
    for key in [key for key in entries if key.endswith(".zarray")]:
        folders = key.split("/")[:-2]
        for depth in range(len(folders)):
            entries["/".join([*folders[: depth + 1], ".zgroup"])] = json.dumps({"zarr_format": 2})
    return References(entries, left_out)


def _alike(
    variable: Variable, content: FileContent, others: Sequence[Mapping[str, Variable]], dimension: str
) -> list[Variable]:
    """Return the variable of all files if it has the sample dimension, else that of the first one; raise
    ``FormatError`` if they differ in more than the number of samples.
    """
    if dimension not in variable.dimensions:
        return [variable]
    found = [variable, *(of_file[variable.name] for of_file in others if variable.name in of_file)]
    same = {(v.dimensions, v.shape[1:], v.dtype, repr(sorted(v.attributes.items(), key=str))) for v in found}
    if len(found) <= len(others) or len(same) > 1 or variable.dimensions[0] != dimension:
        raise FormatError(
            "the files cannot be one store",
            file=content.path,
            field=variable.name,
            expected=f"the same variable in all files, with {dimension!r} as its first dimension, and equal attributes",
            remedy="write the references of each file",
        )
    return found


@dataclass(frozen=True)
class _Chunks:
    """Chunks of a variable in one file, or its values."""

    chunk_shape: tuple[int, ...]
    codecs: tuple[str, ...]
    fill: Any
    entries: Mapping[tuple[int, ...], KeyValue]


def _of_variable(variables: Sequence[Variable], paths: Sequence[str]) -> Iterator[tuple[str, KeyValue]]:
    """Yield the entries of a variable of consecutive files."""
    first = variables[0]
    if first.dtype.kind not in "biufcS" or not first.dtype.itemsize:
        raise Unreadable(f"values of the type {first.dtype}")
    shape = (sum(v.shape[0] for v in variables), *first.shape[1:]) if first.shape else ()
    if prod(shape) * first.dtype.itemsize <= INLINE_BYTES:
        values = np.concatenate([v.values() for v in variables]) if shape else first.values()
        parts = [_inline(np.asarray(values, first.dtype))]
    else:
        rows = math.gcd(*(v.shape[0] for v in variables))
        parts = [_chunks(v, str(Path(path).absolute()), rows) for v, path in zip(variables, paths, strict=True)]
    depth, begin = (parts[0].chunk_shape or (1,))[0], 0
    if len({(part.chunk_shape, part.codecs) for part in parts}) > 1:
        raise Unreadable("its chunks differ between the files")
    if sum(len(part.entries) for part in parts) < prod(Grid.of(shape, parts[0].chunk_shape, 0).counts):
        # Zarr has one value for chunks that are not there, and xarray takes it for that of missing numbers.
        expected = np.asarray(first.attributes.get("_FillValue", np.zeros((), first.dtype)), first.dtype).tobytes()
        fills = [np.asarray(part.fill, first.dtype).tobytes() for part in parts if part.fill is not None]
        if any(fill != expected for fill in fills):
            raise Unreadable("chunks that were never written, whose elements are neither 0 nor missing")
    for number, part in enumerate(parts):
        if begin % depth:
            raise Unreadable(f"chunks of {depth} samples, of which a file has no whole number")
        for position, entry in part.entries.items():
            moved = (position[0] + begin // depth, *position[1:]) if position else ()
            yield _key(first.name, moved), entry
        begin += variables[number].shape[0] if shape and len(parts) > 1 else 0
    attributes = {key: _json(value) for key, value in first.attributes.items()}
    fill = attributes.pop("_FillValue", None)
    array = {
        "zarr_format": 2,
        "shape": shape,
        "chunks": parts[0].chunk_shape,
        "dtype": first.dtype.str,
        "order": "C",
        "fill_value": _fill(fill, first.dtype),
        "compressor": None,
        "filters": [json.loads(codec) for codec in parts[0].codecs] or None,
    }
    yield f"{first.name}/.zarray", json.dumps(array)
    dimensions = [name.rpartition("/")[2] for name in first.dimensions]
    yield f"{first.name}/.zattrs", json.dumps({**attributes, DIMENSIONS: dimensions})


def _inline(values: Array) -> _Chunks:
    content = "base64:" + base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()
    return _Chunks(values.shape, (), None, {(0,) * values.ndim: content} if values.size else {})


def _chunks(variable: Variable, path: str, rows: int) -> _Chunks:
    """Return the chunks of a variable; ``rows``: length of those that are cut from contiguous rows."""
    _, layout = variable.stored_rows(0)
    if isinstance(layout, Strided):
        row_bytes = prod(variable.shape[1:]) * variable.dtype.itemsize
        depth = rows if layout.stride == row_bytes else 1  # records of a classic file lie apart
        starts = range(0, variable.shape[0], depth)
        inner = (0,) * (len(variable.shape) - 1)
        entries: dict[tuple[int, ...], KeyValue] = {
            (start // depth, *inner): [path, int(layout.offset + start * layout.stride), depth * row_bytes]
            for start in starts
        }
        return _Chunks((depth, *variable.shape[1:]), (), None, entries)
    if not isinstance(layout, Chunked) or layout.axis or layout.shape != variable.shape:
        raise Unreadable("its rows are no byte ranges of the file")
    if layout.mask.any():
        raise Unreadable("chunks to which not all filters were applied")
    codecs = tuple(_codec(step, layout.pipeline.itemsize) for step in layout.pipeline.filters)
    grid = Grid.of(layout.shape, layout.chunk_shape, 0)
    columns = (layout.number.tolist(), layout.offset.tolist(), layout.nbytes.tolist())
    stored = {grid.position(number): [path, at, nbytes] for number, at, nbytes in zip(*columns, strict=True)}
    return _Chunks(layout.chunk_shape, codecs, layout.fill, stored)


def _codec(step: Filter, itemsize: int) -> str:
    """Return the configuration of numcodecs for a filter of HDF5, as JSON."""
    if step.number == SHUFFLE:
        return json.dumps({"id": "shuffle", "elementsize": (step.options or (itemsize,))[0]})
    if step.number not in _CODECS:
        raise Unreadable(f"the filter {step.number} of HDF5, which numcodecs has not")
    return json.dumps({"id": _CODECS[step.number]})


def _key(name: str, position: Sequence[int]) -> str:
    return f"{name}/{'.'.join(map(str, position)) or '0'}"


def _json(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, list | tuple):
        return [_json(entry) for entry in value]
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _fill(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a fill value as version 2 of Zarr writes it."""
    if value is None or dtype.kind == "c":
        return None
    if dtype.kind == "S":
        return base64.b64encode(str(value).encode()).decode()
    number = float(value) if dtype.kind == "f" else int(value)
    if isinstance(number, float) and not math.isfinite(number):
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    return number


IMAGE = "image"
"""Name of the array: that of the field of the reader of images."""


def tiff_references(path: str) -> References:
    """Return references to the first series of images in a TIFF file, at full resolution.

    Raises
    ------
    DataError : the file cannot be read, or zarr is not installed.
    FormatError : it is damaged, or its strips are no chunks of equal shape.
    """
    try:
        import tifffile

        with reading(path), tifffile.TiffFile(path, _multifile=False) as file:
            left_out = {f"series {n}: {s.name}": "another series" for n, s in enumerate(file.series) if n}
            found = _of_series(file.series[0], str(Path(path).absolute()))
    except ImportError as error:
        remedy = "python -m pip install tifffile zarr"
        raise DataError(
            "references to TIFF files need tifffile and zarr", file=path, found=error, remedy=remedy
        ) from error
    except (ValueError, IndexError, NotImplementedError, tifffile.TiffFileError) as error:
        remedy = "open the file itself: its images are read in parallel, too"
        raise FormatError(
            "the images have no references", file=path, expected="chunks of equal shape", found=error, remedy=remedy
        ) from error
    return References(found, left_out)


def _of_series(series: Any, path: str) -> dict[str, KeyValue]:
    text = io.StringIO()
    with series.aszarr(level=0) as store:
        store.write_fsspec(text, url="", groupname=IMAGE)
    entries: dict[str, KeyValue] = {}
    for key, entry in json.loads(text.getvalue()).items():
        entries[key] = [path, *entry[1:]] if isinstance(entry, list) else entry
    array = json.loads(str(entries[f"{IMAGE}/.zarray"]))
    entries[f"{IMAGE}/.zarray"] = json.dumps(
        {**array, "fill_value": None}
    )  # xarray takes a fill value for a missing one
    return entries
