"""Index of openPMD series in HDF5: a sample is a particle, or a whole iteration.

Format: openPMD 1.1 and 2.0, https://github.com/openPMD/openPMD-standard; see `series`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import h5py
import numpy as np

from matex_data.errors import DataError, FormatError
from matex_data.fields import Field
from matex_data.index.combined import Concatenated, with_shared_blocks
from matex_data.index.library import Constant, MemoryRows
from matex_data.index.model import FileIndex, Index, Layout
from matex_data.index.whole import Rows, whole
from matex_data.locks import cached_property
from matex_data.readers.catalogue import check_known
from matex_data.readers.hdf5.files import open_file
from matex_data.readers.hdf5.names import HDF5_ERRORS
from matex_data.readers.openpmd.components import UNITS, Component, read_component
from matex_data.readers.openpmd.series import Iteration, components, read_iterations, select_iterations
from matex_data.storage.files import undecodable
from matex_data.storage.trust import Trust
from matex_data.warning import warn

ALIASES = {
    **{f"{record}/{axis}": prefix + axis for record, prefix in (("position", ""), ("momentum", "p")) for axis in "xyz"},
    **{f"electricField/{axis}": f"E{axis}" for axis in "xyz"},
    **{f"magneticField/{axis}": f"B{axis}" for axis in "xyz"},
    "time": "t",
    "particleStatus": "status",
}
"""Names of openPMD-beamphysics for components of particles; other components are called ``"record/component"``."""
OFFSET = "Offset"


def index(
    path: str,
    names: Sequence[str] | None = None,
    *,
    sample: str = "particle",
    species: str | Sequence[str] | None = None,
    iterations: int | Sequence[int] | None = None,
    units: str = "si",
    trust: Trust | None = None,
) -> Index:
    """Index the particles or the iterations of an openPMD file.

    Parameters
    ----------
    names : fields; None: all. Components of particles are called as in openPMD-beamphysics (``x``, ``px``, ``t``,
        ``weight``, ...), others ``"record/component"``.
    sample : "particle": the particles of one species, of all iterations one after the other. "iteration": one sample
        for each iteration; components of particles are of variable length, meshes are arrays of fixed shape.
    species : particles to read; None: all, of which ``sample="particle"`` allows one. With more than one, the fields
        are called ``"species/x"``.
    iterations : numbers of the iterations to read; None: all.
    units : "si": units of the SI. "beamphysics": the same, but momenta in eV/c. "stored": numbers as stored.
    trust : where bytes may come from beside the folder of the file.

    Raises
    ------
    DataError : the file leads to another one that is not trusted.
    FieldNotFound : there is no such field.
    FormatError : the file is no openPMD series or damaged, it lacks a species or an iteration, or iterations differ
        in their records.
    """
    if units not in UNITS:
        raise FormatError("the option units= has no such value", expected=f"one of {UNITS}", found=repr(units))
    asked = (species,) if isinstance(species, str) else tuple(species or ())
    numbers = None if iterations is None else [int(n) for n in np.ravel(np.asarray(iterations, np.int64))]
    try:
        with open_file(path, trust) as file:
            found = read_iterations(file, path)
            series = _Series(path, found, select_iterations(file, path, found, numbers), asked, units, names)
            fields, layouts = _particles(series) if sample == "particle" else _iterations(series)
    except DataError:
        raise
    except HDF5_ERRORS as error:
        problem, expected = "the openPMD series cannot be read", "an HDF5 file by the standard"
        raise undecodable(FormatError, problem, path, error, expected=expected, found=error, remedy=None) from error
    rows = next(iter(layouts.values())).rows
    return Index(fields, [FileIndex(path, rows, layouts)])


@dataclass(frozen=True)
class _Series:
    """Iterations of an open file, and what is asked of them.

    Parameters
    ----------
    found, chosen : all iterations, and those that are read.
    asked : species; (): all.
    units, names : of the fields, as of `index`.
    """

    path: str
    found: Sequence[Iteration]
    chosen: Sequence[Iteration]
    asked: Sequence[str]
    units: str
    names: Sequence[str] | None

    @cached_property
    def species(self) -> list[str]:
        """Return the names of the species that are asked for."""
        known = list(dict.fromkeys(name for iteration in self.found for name in iteration.species))
        for name in self.asked:
            if name not in known:
                raise FormatError(
                    f"the file has no species {name!r}",
                    file=self.path,
                    expected=f"one of {known}",
                    remedy="correct species=, or leave it out",
                )
        return [name for name in known if not self.asked or name in self.asked]


def _particles(series: _Series) -> tuple[dict[str, Field], dict[str, Layout]]:
    """Return fields and layouts of the particles of one species, of all chosen iterations."""
    path, known = series.path, series.species
    if not known:
        raise FormatError(
            "the file has no particles",
            file=path,
            expected="a species of particles",
            found=f"the meshes {sorted({name for one in series.found for name in one.meshes})}",
            remedy="open it with sample='iteration': each iteration is a sample, and its meshes are fields",
        )
    if len(known) > 1:
        raise FormatError(
            "the file has more than one species of particles",
            file=path,
            expected="one species",
            found=f"{known}",
            remedy=f"give species={known[0]!r}, or sample='iteration'",
        )
    having = [one for one in series.found if known[0] in one.species]
    used = [one for one in series.chosen if known[0] in one.species]
    read = [_read_particles(series, one.species[known[0]], series.names) for one in used or having[:1]]
    counts = [_count(path, one, one.species[known[0]], parts) for one, parts in zip(used, read, strict=False)]
    fields, layouts = dict[str, Field](), dict[str, Layout]()
    for name in _selected(path, read, series.names):
        parts = _of_all(path, name, used or having, read)
        fields[name] = _field(path, name, parts, parts[0].shape[1:])
        rows = [part.rows(count, fields[name].dtype) for part, count in zip(parts, counts, strict=False) if count]
        layouts[name] = rows[0] if len(rows) == 1 else Concatenated(tuple(rows))
    if not fields:
        raise FormatError("the species has no records", file=path, field=known[0], expected="a record with numbers")
    return fields, with_shared_blocks(layouts)


def _iterations(series: _Series) -> tuple[dict[str, Field], dict[str, Layout]]:
    """Return fields and layouts of whole iterations: the particles of all species, meshes, number and time."""
    path, chosen = series.path, series.chosen
    used = chosen or series.found[:1]
    fields, layouts = dict[str, Field](), dict[str, Layout]()
    particles = [_all_particles(series, one) for one in used]
    for name in _selected(path, particles, None):
        present = [parts[name][0] if name in parts else None for parts in particles]
        if any(present):
            fields[name] = replace(_field(path, name, [part for part in present if part], ()), ragged=True)
            rows = [
                Constant(0, 0) if part is None else part.rows(parts[name][1], fields[name].dtype)
                for part, parts in zip(present, particles, strict=True)
            ]
            layouts[name] = _wholes(rows[: len(chosen)], fields[name].dtype)
    for name, (field, layout) in _meshes(series, used, set(fields)).items():
        fields[name], layouts[name] = field, layout
    times = np.array([one.time for one in chosen])
    for name, values in (("iteration", np.array([one.number for one in chosen], np.int64)), ("time", times)):
        if name not in fields:
            fields[name] = Field(name, (), values.dtype, attributes={"units": "s"} if name == "time" else {})
            layouts[name] = MemoryRows(values)
    selected = _selected(path, [fields], series.names)
    return {name: fields[name] for name in selected}, {name: layouts[name] for name in selected}


def _all_particles(series: _Series, iteration: Iteration) -> dict[str, tuple[Component | None, int]]:
    """Return the components of all species in an iteration, each with the number of particles, by field name."""
    found: dict[str, tuple[Component | None, int]] = {}
    names = series.names
    for species in series.species:
        if species in iteration.species:
            group, prefix = iteration.species[species], f"{species}/" if len(series.species) > 1 else ""
            wanted = None if names is None else [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
            read = _read_particles(series, group, wanted)
            count = _count(series.path, iteration, group, read)
            found |= {prefix + name: (part, count) for name, part in read.items()}
    return found


def _meshes(series: _Series, used: Sequence[Iteration], taken: Collection[str]) -> dict[str, tuple[Field, Layout]]:
    """Return field and layout of each mesh component that has the same shape in all iterations."""
    path, names = series.path, series.names
    stored = [{name: (record, part) for name, record, part in components(one.meshes)} for one in used]
    found: dict[str, tuple[Field, Layout]] = {}
    for name in stored[0] if stored else ():
        field_name = f"meshes/{name}" if name in taken else name
        if names is not None and field_name not in names:
            continue
        read = [
            {name: read_component(path, name, *meshes[name], series.units, grid=one.grid)} if name in meshes else {}
            for one, meshes in zip(used, stored, strict=True)
        ]
        try:
            parts = _of_all(path, name, used, read)
            _check_shapes(path, name, used, parts)
        except FormatError as error:
            if names is not None:
                raise
            warn(f"{path}: the mesh {name!r} is left out: {error}")
            continue
        field = replace(_field(path, field_name, parts, parts[0].shape), name=field_name)
        rows = [part.rows(part.shape[0], field.dtype) for part in parts[: len(series.chosen)]]
        found[field_name] = field, _wholes(rows, field.dtype, parts[0].shape[1:])
    return found


def _wholes(rows: Sequence[Layout], dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> Concatenated:
    """Return the layout of which all rows, of a shape, of each iteration are one."""
    return Concatenated(tuple(whole(Rows(one, shape, dtype)) for one in rows))


def _check_shapes(path: str, name: str, used: Sequence[Iteration], parts: Sequence[Component]) -> None:
    for iteration, part in zip(used, parts, strict=True):
        if part.shape != parts[0].shape:
            raise FormatError(
                "the mesh has not the same shape in all iterations",
                file=path,
                field=name,
                expected=f"{parts[0].shape}, as in iteration {used[0].number}",
                found=f"{part.shape} in iteration {iteration.number}",
                remedy="select iterations of equal shape with iterations=",
            )


def _read_particles(series: _Series, group: h5py.Group, names: Sequence[str] | None) -> dict[str, Component | None]:
    """Return the components of a species by field name; None: of a field that is not in ``names``.

    Offsets belong to their records, unless numbers are delivered as stored.
    """
    path, units = series.path, series.units
    stored = {name: (record, component) for name, record, component in components(group)}
    found: dict[str, Component | None] = {}
    for name, (record, component) in stored.items():
        record_name, slash, axis = name.partition("/")
        base = record_name.removesuffix(OFFSET) + slash + axis
        if units != "stored" and base != name and base in stored:
            continue
        field = ALIASES.get(name, name)
        if names is not None and field not in names:
            found[field] = None
            continue
        offset = None if units == "stored" else stored.get(record_name + OFFSET + slash + axis)
        added = None if offset is None else read_component(path, record_name + OFFSET, *offset, units)
        found[field] = read_component(path, name, record, component, units, added)
    return found


def _count(path: str, iteration: Iteration, group: h5py.Group, read: Mapping[str, Component | None]) -> int:
    """Return the number of particles of a species in an iteration; constant components may be shorter."""
    parts = {name: part for name, part in read.items() if part is not None}
    offsets = {f"the offset of {name}": part.offset for name, part in parts.items() if part.offset is not None}
    stored = {name: part for name, part in {**parts, **offsets}.items() if part.layout is not None}
    lengths = {name: part.shape[0] for name, part in stored.items()}
    if "numParticles" in group.attrs:
        lengths["the attribute 'numParticles'"] = int(np.ravel(group.attrs["numParticles"])[0])
    if not lengths:
        lengths = {name: part.shape[0] for name, part in parts.items()}
    if len(set(lengths.values())) > 1:
        raise FormatError(
            f"the records of iteration {iteration.number} differ in length",
            file=path,
            expected="a number for each particle",
            found=", ".join(f"{count} in {name}" for name, count in list(lengths.items())[:8]),
        )
    return next(iter(lengths.values()), 0)


def _selected(path: str, read: Sequence[Mapping[str, Any]], names: Sequence[str] | None) -> list[str]:
    """Return the names of all fields, or ``names``."""
    known = list(dict.fromkeys(name for parts in read for name in parts))
    check_known(path, names or (), known)
    return known if names is None else list(names)


def _of_all(
    path: str, name: str, used: Sequence[Iteration], read: Sequence[Mapping[str, Component | None]]
) -> list[Component]:
    """Return the component of that name in each iteration; raise ``FormatError`` if an iteration lacks it."""
    found = []
    for iteration, parts in zip(used, read, strict=False):
        part = parts.get(name)
        if part is None:
            raise FormatError(
                f"iteration {iteration.number} lacks a record that others have",
                file=path,
                field=name,
                expected=f"as in iteration {used[0].number}",
                found=", ".join(sorted(parts)),
                remedy="select other fields with inputs=, or iterations with iterations=",
            )
        found.append(part)
    return found


def _field(path: str, name: str, parts: Sequence[Component], shape: tuple[int, ...]) -> Field:
    """Return the field of a component; raise ``FormatError`` if the iterations differ in its unit."""
    first = parts[0].attributes
    for part in parts:
        if part.attributes.get("units") != first.get("units"):
            raise FormatError(
                "the iterations do not agree on the unit of a record",
                file=path,
                field=name,
                expected=first.get("units"),
                found=part.attributes.get("units"),
                remedy="open it with units='si', which converts the numbers",
            )
    return Field(name, shape, np.result_type(*(part.dtype for part in parts)), attributes=first)
