"""Everything in a file of groups, whether it can be a field or not, for ``matex inspect``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from rich.tree import Tree

from matex_data.words import counted

SHOWN = 200  # entries


def tree(path: str, format: str) -> Tree | None:
    """Return the groups of a file with what lies in them, or None for a format without groups.

    Parameters
    ----------
    path : the file.
    format : its format.

    Raises
    ------
    OSError, RuntimeError, ValueError, KeyError : the library of the format cannot read the file.
    """
    if format not in _ENTRIES:
        return None
    root = Tree(path)
    branches: dict[str, Tree] = {"": root}
    entries = _ENTRIES[format](path)
    for name, description in islice(entries, SHOWN):
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
    members = dataset.dtype.names
    dtype = f"table of {', '.join(members)}" if members else str(dataset.dtype)
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

    with netCDF4.Dataset(path) as file:
        yield from entries(file, "")


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
