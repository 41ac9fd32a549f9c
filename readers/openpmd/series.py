"""Groups of an openPMD series in an HDF5 file: iterations, species, meshes.

Base standard: https://github.com/openPMD/openPMD-standard/blob/1.1.0/STANDARD.md, version 2.0.0 in the same place. The
extension of accelerator physics: https://github.com/openPMD/openPMD-standard/blob/upcoming-2.0.0/EXT_BeamPhysics.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from matex_data.errors import FormatError
from matex_data.readers.hdf5.names import text_of

MARK = "openPMD"
NUMBER = "%T"
NO_RECORDS = ("particlePatches",)  # groups of a species that are no records


@dataclass(frozen=True)
class Iteration:
    """One iteration of a series.

    Parameters
    ----------
    number : of the iteration; 0 in a file without iterations.
    time : in seconds; NaN if the file does not tell.
    species : records of each species of particles, by name; "" if the file does not name it.
    meshes : mesh records, by name.
    grid : group whose attributes describe the grid of all meshes, in files of external fields.
    """

    number: int
    time: float
    species: Mapping[str, h5py.Group]
    meshes: Mapping[str, h5py.Group | h5py.Dataset]
    grid: h5py.Group | None = None


def is_openpmd(file: h5py.File) -> bool:
    """Return whether an HDF5 file is an openPMD series."""
    return bool(h5py.h5a.exists(file.id, MARK.encode()))


def read_iterations(file: h5py.File, path: str) -> list[Iteration]:
    """Return the iterations of a file, by number.

    Raises
    ------
    FormatError : the file is no openPMD series, or has no iterations.
    """
    if MARK not in file.attrs:
        raise FormatError(
            "the file is no openPMD series",
            file=path,
            expected="the attribute 'openPMD' of the root group",
            found=f"the attributes {sorted(file.attrs)[:8]}",
            remedy="open it with format='hdf5'",
        )
    found = [_iteration(file, number, group) for number, group in _groups(file, "basePath")]
    for number, group in _groups(file, "externalFieldPath"):
        found.append(Iteration(number, np.nan, {}, _members(group, "."), group))
    if not found:
        raise FormatError(
            "the series has no iterations",
            file=path,
            expected="groups below the path that the attribute 'basePath' or 'externalFieldPath' names",
            found=text_of(file.attrs.get("basePath", "no such attribute")),
            remedy="open it with format='hdf5'",
        )
    return sorted(found, key=lambda iteration: iteration.number)


def select_iterations(
    file: h5py.File, path: str, found: Sequence[Iteration], numbers: Sequence[int] | None
) -> list[Iteration]:
    """Return the iterations with these numbers; None: all. A file of a series of many files may have none of them.

    Raises
    ------
    FormatError : the series, which is a single file, lacks one.
    """
    selected = [iteration for iteration in found if numbers is None or iteration.number in numbers]
    missing = sorted(set(numbers or ()) - {iteration.number for iteration in selected})
    if missing and text_of(file.attrs.get("iterationEncoding", "groupBased")) != "fileBased":
        raise FormatError(
            f"the file has no iteration {missing[0]}",
            file=path,
            expected=f"one of {[iteration.number for iteration in found][:20]}",
            remedy="select others with iterations=",
        )
    return selected


def _groups(file: h5py.File, attribute: str) -> Iterator[tuple[int, h5py.Group]]:
    """Yield number and group of each iteration below a path that an attribute of the file names."""
    if attribute not in file.attrs:
        return
    before, mark, after = text_of(file.attrs[attribute]).partition(NUMBER)
    if not mark:
        yield 0, file[before or "/"]
        return
    folder, _, prefix = before.rpartition("/")
    parent = file.get(folder or "/")
    for name in parent if isinstance(parent, h5py.Group) else ():
        number = name.removeprefix(prefix)
        if name.startswith(prefix) and number.isdecimal():
            group = parent[name].get(after.strip("/") or ".")
            if isinstance(group, h5py.Group):
                yield int(number), group


def _iteration(file: h5py.File, number: int, group: h5py.Group) -> Iteration:
    species = _members(group, file.attrs.get("particlesPath"))
    if "position" in species or "momentum" in species:  # without the name of the species
        species = {"": group[_inner(file.attrs["particlesPath"])]}
    time = float(np.ravel(group.attrs.get("time", np.nan))[0]) * float(np.ravel(group.attrs.get("timeUnitSI", 1))[0])
    meshes = _members(group, file.attrs.get("meshesPath"))
    groups = {name: records for name, records in species.items() if isinstance(records, h5py.Group)}
    return Iteration(number, time, groups, {} if meshes.keys() == species.keys() else meshes)


def _inner(path: Any) -> str:
    return text_of(path).strip("/") or "."


def _members(group: h5py.Group, path: Any) -> dict[str, h5py.Group | h5py.Dataset]:
    inner = None if path is None else group.get(_inner(path))
    return {name: inner[name] for name in inner} if isinstance(inner, h5py.Group) else {}


def components(records: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name ``"record"`` or ``"record/component"``, the record, and the component, of each component."""
    for name, record in records.items():
        if name in NO_RECORDS:
            continue
        if is_component(record):
            yield name, record, record
        elif isinstance(record, h5py.Group):
            for part in record:
                if is_component(record[part]):
                    yield f"{name}/{part}", record, record[part]


def is_component(found: Any) -> bool:
    """Return whether an object is a data set, or the group of a constant component."""
    return isinstance(found, h5py.Dataset) or {"value", "shape"} <= set(found.attrs)
