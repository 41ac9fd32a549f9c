"""Index of Zarr stores: arrays along the sample dimension, decoded by the CF conventions as xarray does.

Format: Zarr 2 and 3, https://zarr-specs.readthedocs.io; references of kerchunk, https://fsspec.github.io/kerchunk/spec.html;
Icechunk 1, https://icechunk.io/en/latest/spec/; OME-Zarr 0.4 and 0.5, https://ngff.openmicroscopy.org.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.errors import DataError, FormatError
from matex_data.fields import Field
from matex_data.index.chunked import Chunked
from matex_data.index.model import Index, Layout
from matex_data.index.stamps import Stamp
from matex_data.machine import check_fits
from matex_data.readers.catalogue import shown, warn_of
from matex_data.readers.dimensions.samples import VariableOptions, index_content
from matex_data.readers.dimensions.variables import FileContent, Variable
from matex_data.readers.options import takes
from matex_data.readers.zarr.arrays import TEXT, ArrayMetadata
from matex_data.readers.zarr.chunks import Grid, stored_chunks
from matex_data.readers.zarr.hierarchy import ROOT_NAME, States, named_dimensions, of_level, read_arrays, states_of
from matex_data.readers.zarr.layouts import all_rows, layout_of
from matex_data.readers.zarr.references import JsonReferences, parquet_references
from matex_data.readers.zarr.repositories import open_snapshot
from matex_data.readers.zarr.stores import Directory, Store, ZipFile, is_repository
from matex_data.storage.files import is_folder, open_binary, reading
from matex_data.storage.objects import is_url
from matex_data.storage.trust import NONE, Trust

MOST_OF_ROW = 1 << 22  # chunks of the same samples
MOST_OF_VALUES = 1 << 20  # chunks of an array that is read as a whole, such as a coordinate


@takes(VariableOptions)
def index(
    path: str,
    names: Sequence[str] | None = None,
    *,
    version: str | None = None,
    level: int | None = None,
    trust: Trust | None = None,
    **options: Any,
) -> Index:
    """Index the arrays of a Zarr store along one of their dimensions.

    Parameters
    ----------
    path : of the store: a folder, a group or an array within it, a zip file, references of kerchunk, or an Icechunk
        repository.
    names : arrays; with groups, for example, ``"forecast/t2m"``. None: all that have the sample dimension. An array
        that is the root of its store is named ``"data"``.
    version : of an Icechunk repository: name of a branch or a tag, or identifier of a snapshot. None: the branch
        ``main``. All ranks read the snapshot that it is now, whatever is committed later.
    level : of images of OME-Zarr, whose axes have the names of its metadata: 0 is the full resolution. None: the same;
        arrays of other levels are read if ``names`` has them.
    trust : where bytes may come from beside the store, or the folder of references or of a repository.
    options : those of `matex_data.readers.dimensions.samples.VariableOptions`. Without ``sample_dim`` and a time, the
        first dimension of all arrays counts the samples. Axes without names are called ``dim_0``, ``dim_1``: axes of
        equal length are equal.

    Raises
    ------
    DataError : there is no such version, or the store leads to files that are not trusted.
    FieldNotFound : there is no array of that name.
    FormatError : the metadata are damaged, or do not determine the sample dimension, or an array cannot be read.
    """
    store = open_store(path, version, trust or NONE)
    states: States = {}
    stamp = None if store.folder is None or is_url(store.path) else Stamp.of(store.path)
    arrays, unread, known = read_arrays(store, states)
    arrays = of_level(store.path, arrays, known, level, names)
    for name in names or ():
        if name.strip("/") in unread:
            raise FormatError(
                "the array cannot be read",
                file=store.path,
                field=name,
                found=unread[name.strip("/")],
                remedy="leave it out with inputs= and targets=",
            )
    if names is None and unread and not arrays:
        raise FormatError("no array of the store can be read", file=store.path, found=shown(unread))
    if names is None:
        warn_of(store.path, unread, "array")
    used: set[str] = set()
    found = index_content(_content(store, arrays, used), VariableOptions(**options, names=names))
    if stamp is None:
        return found
    return found.with_stamps({store.path: stamp.with_parts(store.path, states_of(states, used))})


def open_store(path: str, version: str | None = None, trust: Trust = NONE) -> Store:
    """Return the store of a path: a folder, which may be a group or an array of a store, a zip file, references, or an
    Icechunk repository; see `index`.
    """
    if is_repository(path):
        return open_snapshot(path.rstrip("/"), version, trust)
    if version is not None:
        raise DataError(
            "the store has no versions", file=path, expected="an Icechunk repository", remedy="leave out version="
        )
    if is_folder(path):
        return parquet_references(path, trust) or Directory(path.rstrip("/") or "/", trust)
    with reading(path), open_binary(path) as file:
        is_zip = file.read(2) == b"PK"
    return ZipFile(path) if is_zip else JsonReferences(path, trust)


def _content(store: Store, arrays: Mapping[str, ArrayMetadata], used: set[str]) -> FileContent:
    axes = named_dimensions({name: (array.shape, array.dimensions) for name, array in arrays.items()})
    variables = [
        ZarrVariable(
            name=name or ROOT_NAME,
            dimensions=axes[name],
            shape=array.shape,
            dtype=array.dtype,
            attributes=array.attributes,
            store=store,
            folder=name,
            metadata=array,
            used=used,
        )
        for name, array in arrays.items()
    ]
    lengths = {name: n for v in variables for name, n in zip(v.dimensions, v.shape, strict=True)}
    return FileContent(store.path, variables, lengths, [])


@dataclass(frozen=True)
class ZarrVariable(Variable):
    """Array of a store.

    Parameters
    ----------
    folder : of the array in the store.
    used : receives the folders of the arrays that are looked at.
    """

    store: Store
    folder: str
    metadata: ArrayMetadata
    used: set[str]

    def stored_rows(self, axis: int) -> tuple[Field, Layout]:
        self.used.add(self.folder)
        self._check_chunks(MOST_OF_ROW, axis)
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        layout = self._layout(axis, self.store.path)
        return Field(self.name, shape, self._native_dtype, attributes=self.attributes), layout

    def values(self) -> Array:
        self.used.add(self.folder)
        self._check_chunks(MOST_OF_VALUES, None)
        remedy = "leave out the options that need all its values, such as sel="
        check_fits(self.nbytes, "the array", file=self.store.path, field=self.name, remedy=remedy)
        try:
            return all_rows(self._layout(0, ""), self._native_dtype).reshape(self.shape)
        except DataError as error:
            raise error.at(self.store.path, self.name) from error.__cause__

    @property
    def _native_dtype(self) -> np.dtype[Any]:
        return TEXT if self.dtype.kind == "U" else self.dtype.newbyteorder("=")

    def _layout(self, axis: int, path: str) -> Chunked:
        """Return the layout of the rows, see `layout_of`."""
        source = stored_chunks(self.store, self.folder, self.metadata, axis)
        return layout_of(self.metadata, source, axis, path)

    def _check_chunks(self, most: int, axis: int | None) -> None:
        """Raise ``FormatError`` if the shape claims more chunks, of the same samples unless ``axis`` is None."""
        counts = list(Grid.of(self.shape, self.metadata.chunk_shape, 0).counts)
        if axis is not None and counts:
            counts[axis] = 1
        if prod(counts) > most:
            raise FormatError(
                f"the array has too many chunks {'in all' if axis is None else 'of the same samples'}",
                file=self.store.path,
                field=self.name,
                expected=f"at most {most:,}, each of which is looked for",
                found=f"{prod(counts):,} by its shape",
                remedy="write it in larger chunks"
                if axis is None
                else "write it in larger chunks, or name other fields",
            )
