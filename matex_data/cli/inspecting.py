"""Command ``matex inspect``: everything that a file says about its samples before they are read."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.table import Table
from rich.tree import Tree

from matex_data.display import FIELD_COLUMNS, described_layout, field_row
from matex_data.errors import DataError
from matex_data.fields import Field
from matex_data.words import counted, nbytes_text, shortened

if TYPE_CHECKING:
    from matex_data.dataset import Dataset


SHOWN = 3  # samples
SMALL_FILE, MANY_FILES = 1 << 20, 1000  # bytes on average, and number, of which opening costs more than reading
LARGE_BLOCK = 64 << 20  # bytes that are decoded for a single sample


def parse_options(texts: Sequence[str]) -> dict[str, Any]:
    """Return options of a reader from texts such as ``sample_dim=time`` or ``size=(64, 64)``.

    Raises
    ------
    DataError : a text has no "=".

    Examples
    --------
    >>> parse_options(["sample_dim=time", "size=(64, 64)", "header=None"])
    {'sample_dim': 'time', 'size': (64, 64), 'header': None}
    """
    options: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise DataError("an option has no value", expected="--option name=value", found=repr(text))
        try:
            options[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # a text without quotation marks
            options[name] = value
    return options


def facts_of(data: Dataset, format: str, batch_size: int) -> dict[str, Any]:
    """Return facts about a data set as plain values, for JSON. A few samples are read.

    Parameters
    ----------
    batch_size : of the quality of the shuffle.
    """
    row_bytes = sum(field.row_bytes for field in data.schema.values())
    first = data.head(SHOWN) if len(data) and row_bytes * SHOWN <= LARGE_BLOCK else {}
    quality = data.shuffle_quality(batch_size)
    return {
        "format": format,
        "files": len(data.paths),
        "samples": len(data),
        "bytes_per_sample": row_bytes,
        "bytes_per_epoch": row_bytes * len(data),
        "layout": described_layout(data._source.index),
        "fields": [dict(zip(FIELD_COLUMNS, field_row(field), strict=True)) for field in data.schema.values()],
        "static": {name: {"shape": list(a.shape), "dtype": str(a.dtype)} for name, a in data.static.items()},
        "first": {name: [_shown(data.schema[name], row) for row in rows] for name, rows in first.items()},
        "shuffle": str(quality),
        "warnings": list(_warnings(data, first, quality.remedy if quality.ratio > 2 else "")),
    }


def tables(facts: dict[str, Any]) -> Iterator[Any]:
    """Yield what the command prints."""
    yield (
        f"{facts['format']}: {counted(facts['samples'], 'sample')} in {counted(facts['files'], 'file')}; "
        f"{nbytes_text(facts['bytes_per_sample'])} a sample, {nbytes_text(facts['bytes_per_epoch'])} an epoch"
    )
    yield f"layout: {facts['layout']}"
    fields = Table(*FIELD_COLUMNS)
    for field in facts["fields"]:
        fields.add_row(*(field[column] for column in FIELD_COLUMNS))
    for name, array in facts["static"].items():
        fields.add_row(name, str(tuple(array["shape"])), array["dtype"], "", "the same for all samples")
    yield fields
    if facts["first"]:
        first = Table("first samples", *map(str, range(len(next(iter(facts["first"].values()))))))
        for name, rows in facts["first"].items():
            first.add_row(name, *rows)
        yield first
    yield f"shuffle: {facts['shuffle']}"
    for warning in facts["warnings"]:
        yield f"warning: {warning}"


def _shown(field: Field, value: Any) -> str:
    """Return a value as text: numbers, or the range of many."""
    array = np.asarray(value)
    if field.dtype == object and array.ndim == 0:
        return shortened(value.decode("utf-8", "replace") if isinstance(value, bytes) else value, 24)
    if array.dtype.kind in "biuf" and array.size > 3:
        return f"{array.min():.4g} to {array.max():.4g}"
    return shortened(array.tolist(), 24)


def _warnings(data: Dataset, first: dict[str, Any], remedy: str) -> Iterator[str]:
    if remedy:
        yield f"shuffle=True mixes sorted files badly. {remedy}"
    files = [Path(path) for path in data.paths[:MANY_FILES]]
    sizes = [path.stat().st_size for path in files if path.is_file()]
    if len(data.paths) >= MANY_FILES and sizes and sum(sizes) < SMALL_FILE * len(sizes):
        yield (
            f"{len(data.paths):,} files of {nbytes_text(sum(sizes) / len(sizes))} on average: opening them costs more "
            "than reading. Join them to files of 100 MB and more, or give index= so that later jobs open none."
        )
    for name, layout in (data._source.index.files[0].layouts if len(data.paths) else {}).items():
        block = layout.block_rows * data.schema[name].row_bytes
        if block > LARGE_BLOCK:
            yield (
                f"{name!r} has blocks of {counted(layout.block_rows, 'row')}, {nbytes_text(block)}, each of which is "
                'read as a whole. Write chunks of 1 to 4 MB, or give cache="memory".'
            )
    for name, rows in first.items():
        array = np.asarray(rows)
        if array.dtype.kind == "f" and np.isnan(array).any():
            yield f"{name!r} has NaNs in its first samples: see missing= of open_dataset."


ENTRIES = 200  # entries


def tree(path: str, format: str) -> Tree | None:
    """Return the groups of a file with what lies in them, or None for a format without groups.

    Raises
    ------
    OSError, RuntimeError, ValueError, KeyError : the library of the format cannot read the file.
    """
    if format not in _ENTRIES:
        return None
    root = Tree(path)
    branches: dict[str, Tree] = {"": root}
    entries = _ENTRIES[format](path)
    for name, description in islice(entries, ENTRIES):
        parent, _, own = name.rpartition("/")
        branches[name] = branches.get(parent, root).add(f"{own}  {description}".rstrip(), highlight=False)
    further = sum(1 for _ in entries)
    if further:
        root.add(f"and {counted(further, 'further entry', 'further entries')}")
    return root


def _hdf5(path: str) -> Iterator[tuple[str, str]]:
    import h5py

    from matex_data.readers.hdf5.files import open_file
    from matex_data.storage.trust import Trust

    found: list[tuple[str, str]] = []

    def visit(name: str, item: Any) -> None:
        found.append((name, _dataset(item) if isinstance(item, h5py.Dataset) else ""))

    with open_file(path, Trust.of_site()) as file:
        file.visititems(visit)
    yield from found


def _dataset(dataset: Any) -> str:
    """Return shape, dtype, chunks and filter of an HDF5 dataset as text."""
    stored = [] if dataset.chunks is None else [f"chunks {dataset.chunks}"]
    stored += [] if dataset.compression is None else [str(dataset.compression)]
    try:
        members = dataset.dtype.names
        dtype = f"table of {', '.join(members)}" if members else str(dataset.dtype)
    except TypeError as error:  # a time, say, for which NumPy has no dtype
        dtype = f"({error})"
    return ", ".join([f"{dataset.shape} {dtype}", *stored])


def _netcdf(path: str) -> Iterator[tuple[str, str]]:
    import netCDF4

    def entries(group: Any, prefix: str) -> Iterator[tuple[str, str]]:
        for name, variable in group.variables.items():
            axes = ", ".join(f"{axis}: {size}" for axis, size in zip(variable.dimensions, variable.shape, strict=True))
            yield prefix + name, f"({axes}) {variable.dtype}"
        for name, child in group.groups.items():
            yield prefix + name, ""
            yield from entries(child, f"{prefix}{name}/")

    with warnings.catch_warnings(action="ignore"), netCDF4.Dataset(path) as file:  # of types that it does not read
        found = list(entries(file, ""))
    yield from found


def _root(path: str) -> Iterator[tuple[str, str]]:
    import uproot

    with uproot.open(path) as file:
        for name, kind in file.classnames(cycle=False).items():
            has_rows = "TTree" in kind or "RNTuple" in kind
            yield name, f"{kind}, {counted(file[name].num_entries, 'entry', 'entries')}" if has_rows else kind


_ENTRIES: dict[str, Callable[[str], Iterator[tuple[str, str]]]] = {
    "hdf5": _hdf5,
    "openpmd": _hdf5,
    "netcdf": _netcdf,
    "root": _root,
}
