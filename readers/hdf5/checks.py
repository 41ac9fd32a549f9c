"""Checks of what a dataset needs beside its file: filters, raw data files, and the sources of a virtual dataset."""

from __future__ import annotations

import os
from pathlib import Path

import h5py
import numpy as np

from matex_data._types import Array
from matex_data.errors import FormatError, install_command
from matex_data.machine import check_fits
from matex_data.readers.hdf5.files import RAW_PREFIX, open_indexed, raw_files
from matex_data.readers.hdf5.names import reported
from matex_data.readers.hdf5.rows import missing_filters
from matex_data.readers.hdf5.virtual import PREFIX, SourceFiles, VirtualSource, sources_of
from matex_data.storage.objects import is_url
from matex_data.storage.trust import NO_BASE

HDF5PLUGIN = {307, 32001, 32004, 32008, 32013, 32015, 32017, 32018, 32024, 32026, 32028, 32033}  # its filters
REGISTRY = "https://github.com/HDFGroup/hdf5_plugins"


def check_filters(dataset: h5py.Dataset, path: str, name: str) -> None:
    """Raise ``FormatError`` unless HDF5 has all filters of the dataset, also those of hdf5plugin."""
    missing = missing_filters(dataset)
    if missing:
        in_plugin = HDF5PLUGIN.issuperset(number for number, _ in missing)
        advice = f"{install_command('matex_data[hdf5]')}, or " if in_plugin else ""
        raise FormatError(
            "the dataset is stored with a filter that is not installed",
            file=path,
            field=name,
            expected="a filter that HDF5 has here",
            found=", ".join(f"filter {number} ({text})" for number, text in missing),
            remedy=f"{advice}set HDF5_PLUGIN_PATH to the folder of the filter's plugin, see {REGISTRY}",
        )


def all_values(dataset: h5py.Dataset, path: str) -> Array:
    """Return a dataset beside the samples, such as their offsets, as a whole.

    Raises
    ------
    FormatError : HDF5 has no filter that it was stored with.
    PartitionError : the values, as the file states their number, do not fit into the memory of this rank.
    """
    name = dataset.name.strip("/")
    check_filters(dataset, path, name)
    nbytes = dataset.size * dataset.dtype.itemsize
    check_fits(nbytes, "a dataset beside the samples", file=path, field=name, remedy="restore the file")
    return np.asarray(dataset[...])


def check_raw_files(dataset: h5py.Dataset, path: str, name: str) -> None:
    """Raise ``FormatError`` unless the raw data files of the dataset exist."""
    plist = dataset.id.get_create_plist()
    if is_url(path) and plist.get_external_count():
        raise _external_error(path, name, "raw data in other files")
    for raw in raw_files(plist, os.fsdecode(h5py.h5f.get_name(dataset.id))):
        if not Path(raw).exists():
            raise FormatError(
                "the raw data file of the dataset is missing",
                file=path,
                field=name,
                expected=raw,
                found="no such file",
                remedy=f"restore it, or set {RAW_PREFIX} to its folder: {NO_BASE}",
            )


def _external_error(path: str, name: str, found: str) -> FormatError:
    expected, remedy = "data in the file itself", "copy it to a dataset of its own, or the files to a file system"
    problem = "of a store of objects, only files by themselves are read"
    return FormatError(problem, file=path, field=name, expected=expected, found=found, remedy=remedy)


def check_sources(dataset: h5py.Dataset, path: str, name: str, allow_missing: bool) -> SourceFiles | None:
    """Open the sources of a virtual dataset, and return their files; None if they may be missing.

    Where HDF5 finds no source it gives the fill value, without an error.

    Raises
    ------
    FormatError : a source is missing, cannot be opened, or has a filter that is not installed.
    """
    if is_url(path):
        raise _external_error(path, name, "a virtual dataset")
    sources = list(sources_of(dataset, path))
    pending = dict.fromkeys((source.path, source.name) for source in sources)
    checked = {(path, dataset.name)}
    while pending:
        (at, inner_name), _ = pending.popitem()
        if (at, inner_name) not in checked:
            checked.add((at, inner_name))
            inner = _check_source(at, inner_name, path, name, allow_missing)
            pending |= dict.fromkeys((source.path, source.name) for source in inner)
    return None if allow_missing else SourceFiles.of(sources)


def _check_source(source: str, inner_name: str, path: str, name: str, allow_missing: bool) -> list[VirtualSource]:
    """Check a source of the virtual dataset ``name`` of the file ``path``; return the sources that it has itself."""
    if not Path(source).exists():
        if allow_missing:
            return []
        raise missing_source(path, name, source)
    problem = "a source of the virtual dataset cannot be opened"
    with reported(problem, path, name, expected=source), open_indexed(source) as file:  # asked for as it was opened
        dataset = file.get(inner_name)
        if isinstance(dataset, h5py.Dataset):
            check_filters(dataset, source, inner_name)
            return list(sources_of(dataset, source)) if dataset.is_virtual else []
    if allow_missing:
        return []
    raise missing_source(path, name, source, inner_name)


def missing_source(path: str, name: str, source: str, inner_name: str | None = None) -> FormatError:
    """Return the error for a source that does not exist."""
    return FormatError(
        "a source of the virtual dataset is missing",
        file=path,
        field=name,
        expected=source if inner_name is None else f"a dataset {inner_name!r} in {source}",
        found="no such file" if inner_name is None else "no such dataset",
        remedy=f"restore it, or set {PREFIX} to its folder; allow_missing_sources=True gives fill values",
    )
