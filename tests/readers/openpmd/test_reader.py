"""openPMD series: conformance suite, units, offsets, constant records, iterations, meshes, corpus, and errors.

Expected values come from openPMD-beamphysics, and from h5py by the standard.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from beamphysics import FieldMesh, ParticleGroup
from beamphysics.readers import load_field_attrs
from beamphysics.writers import pmd_init, write_pmd_bunch
from mpi4py import MPI

from matex_data import DataError, FieldNotFound, FormatError, open_dataset
from matex_data.readers import detect
from matex_data.readers.openpmd.reader import ALIASES, index
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.format_suite import Arrays, Case, FormatSuite, same
from tests.support.ranks import Pools
from tests.support.serial import every_row

METRE, MOMENTUM, NONE = (1, 0, 0, 0, 0, 0, 0), (1, 1, -1, 0, 0, 0, 0), (0,) * 7


def begin_series(file: h5py.File, encoding: str = "groupBased") -> None:
    """Write the attributes that the base standard 1.1.0 requires of the root."""
    texts = {
        "openPMD": "1.1.0",
        "basePath": "/data/%T/",
        "meshesPath": "fields/",
        "particlesPath": "particles/",
        "iterationEncoding": encoding,
        "iterationFormat": "/data/%T/" if encoding == "groupBased" else "data_%T.h5",
    }
    for name, text in texts.items():
        file.attrs[name] = np.bytes_(text)
    file.attrs["openPMDextension"] = np.uint32(0)


def iteration(file: h5py.File, number: int) -> h5py.Group:
    group = file.create_group(f"data/{number}")
    group.attrs.update({"time": float(number), "dt": 1.0, "timeUnitSI": 1e-15})
    return group


def record(group: h5py.Group, name: str, dimension: Sequence[float], parts: Mapping[str, Any], unit: float) -> None:
    """Write a record; a part is an array, or ``(value, shape)`` of a constant component."""
    for part, values in parts.items():
        where = f"{name}/{part}".strip("/")
        if isinstance(values, tuple):
            component = group.create_group(where)
            component.attrs.update({"value": values[0], "shape": np.array(values[1], np.uint64)})
        else:
            chunked = (
                {"chunks": (min(64, len(values)),), "compression": "gzip"} if part == "y" and values.ndim == 1 else {}
            )
            component = group.create_dataset(where, data=values, **chunked)
        component.attrs["unitSI"] = unit
    group[name].attrs.update({"unitDimension": np.array(dimension, float), "timeOffset": 0.0})
    group[name].attrs.update({"macroWeighted": np.uint32(0), "weightingPower": 1.0})


def electrons(group: h5py.Group, first: int, count: int, name: str = "electrons") -> None:
    rng = np.random.default_rng(first)
    species = group.create_group(f"particles/{name}")
    axes = {axis: rng.normal(size=count).astype("f4") for axis in "xyz"}
    record(species, "position", METRE, axes, 1e-6)
    offsets = {"x": rng.normal(size=count), "y": (3.0, [count]), "z": (0.0, [count])}
    record(species, "positionOffset", METRE, offsets, 1e-3)
    record(species, "momentum", MOMENTUM, {"x": (2.5, [count]), "y": rng.normal(size=count), "z": axes["x"]}, 9e-31)
    record(species, "weighting", NONE, {"": rng.integers(1, 9, count).astype("f4")}, 1.0)
    record(species, "charge", (0, 0, 1, 1, 0, 0, 0), {"": (-1.0, [count])}, 1.602176634e-19)
    record(species, "id", NONE, {"": np.arange(first, first + count, dtype="u8")}, 1.0)


def by_hand(path: Path, species: str = "electrons", numbers: Sequence[int] | None = None) -> list[Arrays]:
    """Return the records of a species in each iteration, in units of the SI, by the rules of the standard."""

    def values(component: Any) -> Any:
        if isinstance(component, h5py.Dataset):
            stored = component[...]
        else:
            stored = np.full(component.attrs["shape"], component.attrs["value"])
        return stored if component.attrs["unitSI"] == 1 else stored.astype(float) * component.attrs["unitSI"]

    found: list[Arrays] = []
    with h5py.File(path) as file:
        for number in sorted(int(name) for name in file["data"]):
            if numbers is not None and number not in numbers:
                continue
            group = file[f"data/{number}/particles/{species}"]
            fields: Arrays = {}
            for name in ("position", "momentum"):
                for axis in "xyz":
                    fields[ALIASES[f"{name}/{axis}"]] = values(group[f"{name}/{axis}"])
            for axis in "xyz":
                fields[axis] = fields[axis] + values(group[f"positionOffset/{axis}"])
            fields |= {name: values(group[name]) for name in ("weighting", "charge", "id")}
            found.append(fields)
    return found


def joined(found: Sequence[Arrays]) -> Arrays:
    return {name: np.concatenate([fields[name] for fields in found]) for name in found[0]}


def ragged(found: Sequence[Arrays], name: str) -> Any:
    rows = np.empty(len(found), object)
    rows[:] = [fields[name] for fields in found]
    return rows


def series(path: Path, counts: Mapping[int, int], first: int = 0, encoding: str = "groupBased") -> Path:
    with h5py.File(path, "w") as file:
        begin_series(file, encoding)
        for number, count in counts.items():
            electrons(iteration(file, number), first, count)
            first += count
    return path


class TestParticles(FormatSuite):
    def write(self, folder: Path) -> Case:
        paths = [
            series(folder / "data_1.h5", {100: 400, 20: 1, 3: 600}),
            series(folder / "data_2.h5", {5: 200}, 2000),
        ]
        expected = [fields for path in paths for fields in by_hand(path)]
        return Case(str(folder / "*.h5"), joined(expected), "id")

    def damage(self, folder: Path) -> Case:
        path = series(folder / "data.h5", {1: 100})
        with h5py.File(path) as file:
            chunk = file["data/1/particles/electrons/position/y"].id.get_chunk_info(0)
        data = bytearray(path.read_bytes())
        data[chunk.byte_offset + 2 : chunk.byte_offset + 12] = b"\xff" * 10
        path.write_bytes(data)
        return Case(str(path), {}, "id")


def rows_of(path: Path | str, **options: Any) -> Arrays:
    found = index(str(path), **options)
    return {name: every_row(found, name) for name in found.fields}


def check(found: Arrays, wanted: Arrays) -> None:
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        same(found[name], values)


def bunch(count: int, seed: int) -> ParticleGroup:
    rng = np.random.default_rng(seed)
    data = {name: rng.normal(size=count) for name in ("x", "px", "y", "py", "z", "pz", "t")}
    data |= {"status": np.ones(count, int), "weight": np.full(count, 1e-15), "id": np.arange(count) + 1000 * seed}
    return ParticleGroup(data={**data, "species": "electron"})


NAMES = ("x", "px", "y", "py", "z", "pz", "t", "status", "weight", "id")


def test_a_particle_group(tmp_path: Path) -> None:
    path = tmp_path / "bunch.h5"
    bunch(500, 1).write(str(path), t_offset=2.5)
    assert detect(str(path), path.read_bytes()[:4096]) == "openpmd"
    wanted = ParticleGroup(str(path))
    check(rows_of(path, units="beamphysics"), {name: wanted[name] for name in NAMES})
    found = index(str(path))
    assert found.fields["px"].attributes["units"] == "kg m/s"
    assert found.fields["weight"].attributes["units"] == "C"
    assert index(str(path), units="beamphysics").fields["px"].attributes["units"] == "eV/c"
    with h5py.File(path) as file:
        component = file["particles/electron/momentum/x"]
        same(every_row(found, "px"), component[...] * component.attrs["unitSI"])
        same(rows_of(path, names=["px"], units="stored")["px"], component[...])


def test_iterations_of_particle_groups(tmp_path: Path) -> None:
    path = tmp_path / "bunches.h5"
    groups = [bunch(count, seed) for seed, count in enumerate((30, 7, 90))]
    with h5py.File(path, "w") as file:
        pmd_init(file, basePath="/data/%T/", particlesPath="./")
        for number, group in enumerate(groups):
            write_pmd_bunch(file.create_group(f"data/{number}"), group)
    found = rows_of(path, units="beamphysics")
    check(found, {name: np.concatenate([group[name] for group in groups]) for name in NAMES})
    found = rows_of(path, units="beamphysics", iterations=[2, 0], sample="iteration")
    assert found["iteration"].tolist() == [0, 2]
    same(found["px"], ragged([{"px": groups[i]["px"]} for i in (0, 2)], "px"))


def test_units_as_stored(tmp_path: Path) -> None:
    path = series(tmp_path / "data.h5", {1: 100})
    found = index(str(path), units="stored")
    with h5py.File(path) as file:
        group = file["data/1/particles/electrons"]
        same(every_row(found, "x"), group["position/x"][...])
        same(every_row(found, "positionOffset/x"), group["positionOffset/x"][...])
        same(every_row(found, "charge"), np.full(100, -1.0))
    assert found.fields["x"].dtype == np.float32
    assert found.fields["x"].attributes["unitSI"] == 1e-6
    assert found.fields["x"].attributes["units"] == "1e-06 m"
    converted = index(str(path)).fields
    assert "positionOffset/x" not in converted
    assert (converted["x"].dtype, converted["weighting"].dtype) == (np.float64, np.float32)
    assert converted["x"].attributes["units"] == "m"
    assert converted["charge"].attributes["units"] == "C"
    assert converted["weighting"].attributes["macroWeighted"] == 0


def test_iterations_as_samples(tmp_path: Path) -> None:
    path = series(tmp_path / "data.h5", {3: 20, 10: 7, 7: 1})
    with h5py.File(path, "a") as file:
        for number in (3, 7, 10):
            fields = file[f"data/{number}"].create_group("fields")
            grid = np.arange(24.0).reshape(2, 3, 4) + number
            record(fields, "E", NONE, {"x": grid, "z": (float(number), [2, 3, 4])}, 2.0)
            record(fields, "rho", NONE, {"": grid[0]}, 1.0)
            fields["E"].attrs.update({"gridUnitSI": 1e-6, "axisLabels": np.array([b"z", b"y", b"x"])})
    found = rows_of(path, sample="iteration")
    wanted = by_hand(path)
    for name in wanted[0]:
        same(found[name], ragged(wanted, name))
    grids = np.array([np.arange(24.0).reshape(2, 3, 4) + number for number in (3, 7, 10)])
    same(found["E/x"], 2 * grids)
    same(found["E/z"], 2 * np.array([3.0, 7.0, 10.0])[:, None, None, None] * np.ones((2, 3, 4)))
    same(found["rho"], grids[:, 0])
    same(found["time"], np.array([3.0, 7.0, 10.0]) * 1e-15)
    assert found["iteration"].tolist() == [3, 7, 10]
    fields = index(str(path), sample="iteration").fields
    assert fields["E/x"].attributes["gridUnitSI"] == 1e-6
    assert fields["E/x"].attributes["axisLabels"] == ["z", "y", "x"]
    assert set(rows_of(path, sample="iteration", names=["E/x", "px"])) == {"E/x", "px"}
    with h5py.File(path, "a") as file:
        del file["data/7/fields/rho"]
    with pytest.warns(UserWarning, match="rho"):
        assert "rho" not in index(str(path), sample="iteration").fields
    with pytest.raises(FormatError, match="iteration 7 lacks a record"):
        index(str(path), ["rho"], sample="iteration")


def test_a_stored_offset_of_a_constant_record(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        begin_series(file)
        species = iteration(file, 0).create_group("particles/e")
        record(species, "position", METRE, {"x": (0.5, [1]), "y": (0.25, [4])}, 1.0)
        record(species, "positionOffset", METRE, {"x": np.arange(4.0), "y": np.arange(4.0)}, 2.0)
    same(rows_of(path)["x"], 0.5 + 2 * np.arange(4.0))
    same(rows_of(path)["y"], 0.25 + 2 * np.arange(4.0))
    with h5py.File(path, "a") as file:
        del file["data/0/particles/e/positionOffset"]
        record(file["data/0/particles/e"], "positionOffset", METRE, {"x": np.arange(4.0), "y": np.arange(3.0)}, 2.0)
    with pytest.raises(FormatError, match="differ in length"):
        index(str(path))


def test_a_virtual_record_is_converted(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "source.h5", "w") as file:
        file["x"] = np.array([10.0, 20.0])
    layout = h5py.VirtualLayout((2,), "f8")
    layout[:] = h5py.VirtualSource(tmp_path / "source.h5", "x", (2,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        begin_series(file)
        x = iteration(file, 0).create_group("particles/e/position").create_virtual_dataset("x", layout)
        x.attrs["unitSI"] = 0.5
    same(rows_of(tmp_path / "a.h5")["x"], np.array([5.0, 10.0]))


def test_species(tmp_path: Path) -> None:
    path = series(tmp_path / "data.h5", {1: 20, 2: 5})
    with h5py.File(path, "a") as file:
        electrons(file["data/2"], 50, 9, "ions")
    with pytest.raises(FormatError, match=r"more than one species(.|\n)*species='electrons'"):
        index(str(path))
    check(rows_of(path, species="electrons"), joined(by_hand(path)))
    check(rows_of(path, species=["ions"]), joined(by_hand(path, "ions", [2])))
    both = rows_of(path, sample="iteration")
    assert [len(row) for row in both["ions/x"]] == [0, 9]
    same(both["electrons/x"], ragged(by_hand(path), "x"))
    with pytest.raises(FormatError, match=r"no species 'protons'(.|\n)*electrons"):
        index(str(path), species="protons")


def test_a_file_for_each_iteration(tmp_path: Path) -> None:
    paths = [
        series(tmp_path / f"data_{number}.h5", {number: 10 * number}, 100 * number, "fileBased")
        for number in (1, 2, 12)
    ]
    data = open_dataset(str(tmp_path), comm=MPI.COMM_SELF)
    check(data.load(), joined([fields for path in paths for fields in by_hand(path)]))
    data = open_dataset(str(tmp_path), comm=MPI.COMM_SELF, iterations=[12, 1])
    check(data.load(), joined([*by_hand(paths[0]), *by_hand(paths[2])]))
    data = open_dataset(str(tmp_path), comm=MPI.COMM_SELF, sample="iteration", inputs=["iteration", "x"])
    found = data.load()
    assert found["iteration"].tolist() == [1, 2, 12]
    assert [len(row) for row in found["x"]] == [10, 20, 120]
    for sample in ("iteration", "particle"):
        with pytest.raises(FormatError, match=r"iterations= names samples (.|\n)*data_1.h5', (.|\n)*data_12.h5'"):
            open_dataset(str(tmp_path), comm=MPI.COMM_SELF, iterations=[3], sample=sample)


def _load(comm: MPI.Intracomm, path: str, **options: Any) -> Arrays:
    return open_dataset(path, comm=comm, **options).load()


@needs_corpus
def test_meshes_of_the_corpus(ranks: Pools) -> None:
    path = CORPUS / "particle/openpmd/example-femm-3d.h5"
    solenoid = CORPUS / "particle/openpmd_beamphysics/solenoid.h5"
    for size in (1, 3):
        found = [load for load in ranks(size).run(_load, str(path), sample="iteration") if len(load["time"])]
        with h5py.File(path) as file:
            for axis in "xyz":
                same(found[0][f"B/{axis}"][0], file[f"data/1/meshes/B/{axis}"][...])
                same(found[0][f"E/{axis}"][0], np.zeros((47, 47, 47)))
        found = [load for load in ranks(size).run(_load, str(solenoid), sample="iteration") if len(load["time"])]
        mesh = FieldMesh(str(solenoid))
        for name, values in mesh.components.items():
            same(found[0][name][0], values)
    fields = index(str(solenoid), sample="iteration").fields
    with h5py.File(solenoid) as file:
        attributes, _ = load_field_attrs(file["ExternalFieldPath/1"].attrs)
    assert tuple(fields["magneticField/z"].attributes["gridSize"]) == tuple(attributes["gridSize"])
    assert fields["magneticField/z"].attributes["gridGeometry"] == "cylindrical"
    assert fields["magneticField/z"].attributes["units"] == "T"
    for wrong in (path, solenoid):
        with pytest.raises(FormatError, match=r"no particles(.|\n)*sample='iteration'"):
            index(str(wrong))
        assert open_dataset(str(wrong), format="hdf5", comm=MPI.COMM_SELF).schema


def test_options_and_names(tmp_path: Path) -> None:
    path = str(series(tmp_path / "data.h5", {1: 10}))
    with pytest.raises(FieldNotFound, match="'px'"):
        index(path, ["pxx"])
    with pytest.raises(FormatError, match="has no such value"):
        index(path, units="cgs")
    with pytest.raises(FormatError, match=r"no such samples(.|\n)*'particle', 'iteration', 'file'"):
        open_dataset(path, sample="event", comm=MPI.COMM_SELF)
    with pytest.raises(FormatError, match=r"no iteration 2(.|\n)*\[1\]"):
        index(path, iterations=2)
    with pytest.raises(FormatError, match="no such value"):
        open_dataset(path, iterations="1", comm=MPI.COMM_SELF)


def _break(path: Path, kind: str) -> None:
    with h5py.File(path, "a") as file:
        group = file["data/2/particles/electrons"]
        if kind == "no record":
            del group["weighting"]
        elif kind == "another length":
            del group["id"]
            group["id"] = np.arange(3)
        elif kind == "text":
            del group["id"]
            group["id"] = np.array([b"a"] * 5)
        elif kind == "no base path":
            del file.attrs["basePath"]
        elif kind == "no iterations":
            del file["data"]
        elif kind == "no mark":
            del file.attrs["openPMD"]
        else:
            group["position/x"].attrs["unitSI"] = 2.0


ERRORS = {
    "no record": "iteration 2 lacks a record",
    "another length": "iteration 2 differ in length",
    "text": "no numbers",
    "no base path": "no iterations",
    "no iterations": "no iterations",
    "no mark": "no openPMD series",
}


@pytest.mark.parametrize("kind", ERRORS)
def test_series_that_break_the_standard(tmp_path: Path, kind: str) -> None:
    path = series(tmp_path / "data.h5", {1: 10, 2: 5})
    _break(path, kind)
    with pytest.raises(DataError, match=re.escape(ERRORS[kind])) as caught:
        index(str(path))
    assert caught.value.file == str(path)


def test_units_that_differ_between_iterations(tmp_path: Path) -> None:
    path = series(tmp_path / "data.h5", {1: 10, 2: 5})
    _break(path, "unit")
    with h5py.File(path) as file:
        group = file["data/2/particles/electrons"]
        x = group["position/x"][...].astype(float) * 2.0 + group["positionOffset/x"][...] * 1e-3
    same(rows_of(path)["x"][10:], x)
    with pytest.raises(FormatError, match=r"do not agree on the unit(.|\n)*units='si'"):
        index(str(path), units="stored")


def test_truncated_files(tmp_path: Path) -> None:
    path = series(tmp_path / "data.h5", {1: 2000})
    data = path.read_bytes()
    for size in (len(data) // 2, 3000, 100):
        path.write_bytes(data[:size])
        with pytest.raises(DataError) as caught:
            open_dataset(str(path), format="openpmd", comm=MPI.COMM_SELF).load()
        assert caught.value.file == str(path)
