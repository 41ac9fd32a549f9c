"""Frames of atoms: conformance suites of extended XYZ and of trajectories, and errors; values by ASE."""

from __future__ import annotations

import sqlite3
import warnings
from pathlib import Path
from typing import Any

import ase.db
import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from mpi4py import MPI

from matex_data import DataError, FieldNotFound, FormatError, open_dataset
from matex_data.errors import DecodeError, OutOfMemory
from matex_data.readers.atoms import xyz
from tests.readers.text.test_compression import COMPRESSORS
from tests.support.format_suite import Case, FormatSuite, same
from tests.support.ranks import Pool

ROWS = (150, 37, 1, 110)
RAGGED = ("numbers", "positions", "forces", "initial_charges")


def frames(rows: int, first: int = 0) -> list[Atoms]:
    """Return frames of one to five atoms with energies, forces, charges and notes."""
    rng = np.random.default_rng(first)
    found = []
    for i in range(first, first + rows):
        count = 1 + i % 5
        atoms = Atoms(rng.integers(1, 90, count), rng.normal(size=(count, 3)).round(6), cell=[4, 5, 6 + i], pbc=True)
        atoms.set_initial_charges(rng.normal(size=count).round(6))
        forces = rng.normal(size=(count, 3)).round(6)
        atoms.calc = SinglePointCalculator(atoms, energy=float(i) + 0.5, forces=forces)
        atoms.info["run"] = i
        found.append(atoms)
    return found


def expected(every: list[Atoms]) -> dict[str, Any]:
    """Return what ASE says of frames."""

    def of_atoms(name: str) -> Any:
        lists = [atoms.get_forces() if name == "forces" else atoms.arrays[name] for atoms in every]
        out = np.empty(len(lists), object)
        out[:] = lists
        return out

    return {
        **{name: of_atoms(name) for name in RAGGED},
        "cell": np.array([np.asarray(atoms.cell) for atoms in every]),
        "pbc": np.array([atoms.pbc for atoms in every]),
        "energy": np.array([atoms.get_potential_energy() for atoms in every]),
        "run": np.array([atoms.info["run"] for atoms in every]),
    }


def write(folder: Path, suffix: str) -> Case:
    """Write files of different lengths."""
    first = np.cumsum((0, *ROWS[:-1])).tolist()
    paths = [str(folder / f"part{i}{suffix}") for i in range(len(ROWS))]
    for path, rows, at in zip(paths, ROWS, first, strict=True):
        ase.io.write(path, frames(rows, at))
    every = [atoms for path in paths for atoms in ase.io.read(path, index=":")]
    return Case(paths, expected(every), "run")


class TestXyz(FormatSuite):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def small_blocks(cls) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xyz, "BLOCK_BYTES", 2000)
            yield

    def write(self, folder: Path) -> Case:
        return write(folder, ".xyz")

    def damage(self, folder: Path) -> Case:
        case = self.write(folder)
        text = Path(case.paths[0]).read_text().splitlines(keepends=True)
        text[len(text) // 2 + 2] = "what is this\n"
        Path(case.paths[0]).write_text("".join(text))
        return case


class TestTrajectory(FormatSuite):
    def write(self, folder: Path) -> Case:
        return write(folder, ".traj")

    def damage(self, folder: Path) -> Case:
        case = self.write(folder)
        data = Path(case.paths[0]).read_bytes()
        Path(case.paths[0]).write_bytes(data[: len(data) // 2])
        return case


def _load(path: Path, *names: str) -> dict[str, Any]:
    return open_dataset(path, inputs=list(names) or None, comm=MPI.COMM_SELF).load()


def test_plain_xyz_has_positions_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.xyz").write_text("2\nwater?\nO 0 0 0\nH 0 0 1\n1\nanother one\nHe 1 2 3.5\n\n")
    found = _load(tmp_path / "a.xyz", "numbers", "positions")
    same(found["numbers"], np.array([np.array([8, 1]), np.array([2])], object))
    assert found["positions"][1].tolist() == [[1, 2, 3.5]]


def _loaded(comm: MPI.Intracomm, path: str, options: dict[str, Any]) -> tuple[dict[str, Any], int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = open_dataset(path, comm=comm, **options)
    parts = comm.allgather(data.load())
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return whole, sum("lack are missing there" in str(one.message) for one in caught)


@pytest.mark.parametrize("suffix", [".extxyz", ".traj"])
@pytest.mark.parametrize("lone", [0, 20])
def test_an_isolated_atom_without_energy(tmp_path: Path, pool: Pool, suffix: str, lone: int) -> None:
    """Read the files of MACE: its reference atoms have neither energy nor forces, and a text beside."""
    every = frames(30)
    every[lone].calc = None
    every[lone].info["config_type"] = "IsolatedAtom"
    every[lone].set_tags([7] * len(every[lone]))
    ase.io.write(tmp_path / f"a{suffix}", every)
    found = pool.run(_loaded, str(tmp_path), {})
    assert [said for _, said in found] == [1] + [0] * (pool.size - 1)
    for rows, _ in found:
        for i, atoms in enumerate(ase.io.read(tmp_path / f"a{suffix}", index=":")):
            energy = np.nan if i == lone else atoms.get_potential_energy()
            forces = np.full((len(atoms), 3), np.nan) if i == lone else atoms.get_forces()
            np.testing.assert_array_equal(rows["energy"][i], energy)
            np.testing.assert_array_equal(rows["forces"][i], forces)
            assert rows["config_type"][i].decode() == atoms.info.get("config_type", "")
    kept = pool.run(_loaded, str(tmp_path), {"inputs": ["run", "energy"], "missing": "drop"})[0][0]
    assert sorted(kept["run"].tolist()) == [i for i in range(len(every)) if i != lone]
    masked = pool.run(_loaded, str(tmp_path), {"missing": "mask"})[0][0]
    assert masked["energy"][lone] == 0
    assert masked["energy_mask"].tolist() == [i != lone for i in range(len(every))]


@pytest.mark.parametrize("suffix", [".extxyz", ".traj"])
def test_a_number_that_is_whole_in_most_frames(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(xyz, "BLOCK_BYTES", 500)
    every = frames(60)
    for i, atoms in enumerate(every):
        atoms.info["q"] = 0.5 if i == 30 else i
    ase.io.write(tmp_path / f"a{suffix}", every)
    found = _load(tmp_path / f"a{suffix}", "q", "run")
    same(found["q"], np.array([0.5 if i == 30 else i for i in range(60)]))
    same(found["run"], np.arange(60))


@pytest.mark.parametrize("suffix", [".extxyz", ".traj", ".db"])
def test_integers_that_may_be_missing_are_exact(tmp_path: Path, suffix: str) -> None:
    every = frames(20)
    del every[5].info["run"]
    for largest in (2**53, 2**53 + 1):
        every[7].info["run"] = largest
        path = tmp_path / f"{largest}{suffix}"
        if suffix == ".db":
            write_database(path, every)
        else:
            ase.io.write(path, every)
        if largest == 2**53:
            assert _load(path, "run")["run"][7] == largest
        else:
            with pytest.raises(DecodeError, match=r"not exact as float64.*field 'run', row 7"):
                _load(path, "run")


def test_a_field_of_other_shapes_is_left_out(tmp_path: Path) -> None:
    every = frames(4)
    every[2].info["run"] = [1, 2, 3]
    every[0].info["note"] = {"kind": "relaxed"}
    ase.io.write(tmp_path / "a.xyz", every, format="extxyz")
    with pytest.warns(UserWarning, match="'run'"):
        assert not {"run", "note"} & _load(tmp_path / "a.xyz").keys()
    with pytest.raises(FormatError, match=r"'run'(.|\n)*differ"):
        _load(tmp_path / "a.xyz", "run")


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no XYZ"), ("3\nx\nO 0 0 0\n", "no XYZ"), ("atoms\n", "no XYZ"), ("1\nx\nO 0 0\n", "cannot be read")],
)
def test_what_is_no_xyz_is_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.xyz").write_text(text)
    with pytest.raises(FormatError, match=message):
        _load(tmp_path / "a.xyz")


def test_a_label_that_is_no_element_is_not_called_damage(tmp_path: Path) -> None:
    (tmp_path / "grains.xyz").write_text("1\n\nW1 0 0 0\n")
    with pytest.raises(FormatError, match="the frames cannot be read") as caught:
        open_dataset(str(tmp_path / "grains.xyz"))
    assert "W1" in str(caught.value) and "damaged" not in str(caught.value)


def test_a_frame_that_claims_more_columns_than_it_has(tmp_path: Path) -> None:
    path = tmp_path / "a.xyz"
    path.write_text("1\nProperties=species:S:1:pos:R:2147483647\nH 0 0 0\n")
    with pytest.raises(FormatError, match=r"no more columns than the lines have(.|\n)*2147483648"):
        open_dataset(path, comm=MPI.COMM_SELF)


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    ase.io.write(tmp_path / "a.traj", frames(3))
    with pytest.raises(FieldNotFound, match="forces"):
        _load(tmp_path / "a.traj", "force")
    (tmp_path / "b.traj").write_bytes(b"- of UlmASE-Trajectory" + bytes(100))
    with pytest.raises(DataError, match=r"b\.traj"):
        _load(tmp_path / "b.traj")


@pytest.mark.parametrize(("end", "stored"), [(".gz", "gzip"), (".bz2", "bz2"), (".xz", "xz"), (".zst", "zstd")])
def test_compressed_frames_are_read_like_plain_ones(tmp_path: Path, end: str, stored: str) -> None:
    ase.io.write(tmp_path / "plain.xyz", frames(40), format="extxyz")
    packed = tmp_path / f"packed.xyz{end}"
    packed.write_bytes(COMPRESSORS[stored]((tmp_path / "plain.xyz").read_bytes()))
    plain = open_dataset(tmp_path / "plain.xyz", comm=MPI.COMM_SELF).load()
    with pytest.warns(UserWarning, match="no part can be read alone"):
        found = open_dataset(packed, comm=MPI.COMM_SELF).load()
    assert list(found) == list(plain)
    for name, values in plain.items():
        same(found[name], values)
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"packed\.xyz"):
        open_dataset(packed, comm=MPI.COMM_SELF)


def write_database(path: Path, every: list[Atoms], **data: Any) -> None:
    """Write rows with their notes as key-value pairs, and arrays beside; rows that are deleted again leave gaps."""
    with ase.db.connect(path) as database:
        for row, atoms in enumerate(every):
            beside = {name: values[row] for name, values in data.items()}
            gone = database.write(atoms) if row % 10 == 7 else None
            database.write(atoms, key_value_pairs=dict(atoms.info), data=beside)
            if gone is not None:
                database.delete([gone])


def of_database(path: Path) -> list[Atoms]:
    """Return the rows as ASE makes frames of them."""
    with ase.db.connect(path) as database:
        rows = list(database.select())
    every = [row.toatoms() for row in rows]
    for atoms, row in zip(every, rows, strict=True):
        atoms.info = row.key_value_pairs
    return every


class TestDatabase(FormatSuite):
    def write(self, folder: Path) -> Case:
        first = np.cumsum((0, *ROWS[:-1])).tolist()
        paths = [folder / f"part{i}.db" for i in range(len(ROWS))]
        for path, rows, at in zip(paths, ROWS, first, strict=True):
            write_database(path, frames(rows, at))
        every = [atoms for path in paths for atoms in of_database(path)]
        return Case(str(folder), expected(every), "run")

    def damage(self, folder: Path) -> Case:
        case = self.write(folder)
        with sqlite3.connect(folder / "part0.db") as connection:
            connection.execute("UPDATE systems SET positions = x'0102' WHERE id = (SELECT MAX(id) - 70 FROM systems)")
        connection.close()
        return case


def test_what_lies_in_the_data_of_a_database(tmp_path: Path) -> None:
    """As SchNetPack keeps its properties: arrays in ``data``, for each atom if they are as long as the frame."""
    every, rng = frames(40), np.random.default_rng(0)
    forces = [rng.normal(size=(len(atoms), 3)).astype("f4") for atoms in every]
    gap = rng.normal(size=(40, 1))
    notes = [{"nested": True}] * 40
    for i, atoms in enumerate(every):
        atoms.calc = None
        atoms.info = {"set": f"train{i}", "good": bool(i % 2), "kelvin": 300} if i else {"set": "x", "kelvin": 1.5}
        atoms.pbc = [True, False, bool(i % 2)]
    write_database(
        tmp_path / "a.db", every, **{"own forces": forces, "gap": gap, "tuple": [[1, 2]] * 40, "notes": notes}
    )
    data = open_dataset(tmp_path / "a.db", comm=MPI.COMM_SELF)
    found = data.load()
    with ase.db.connect(tmp_path / "a.db") as database:
        rows = list(database.select())
    for i, row in enumerate(rows):
        same(found["data.own forces"][i], row.data["own forces"])
        same(found["positions"][i], row.positions)
        assert found["data.gap"][i].tolist() == row.data["gap"].tolist() and found["data.tuple"][i].tolist() == [1, 2]
        assert found["set"][i].decode() == row.set and found["kelvin"][i] == row.kelvin
        assert found["pbc"][i].tolist() == row.pbc.tolist()
    assert data.schema["data.own forces"].dtype == np.float32 and "data.notes" not in data.schema
    assert np.isnan(found["good"][0]) and found["good"][1] == 1


def _sql(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


VIRTUAL = (  # as a module of SQLite writes it, which need not be there
    "ALTER TABLE systems RENAME TO other",
    "PRAGMA writable_schema = 1",
    "INSERT INTO sqlite_master VALUES ('table', 'systems', 'systems', 0, 'CREATE VIRTUAL TABLE systems USING fts5(n)')",
)
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id FROM n"


@pytest.mark.parametrize(
    ("statements", "message"),
    [
        (("ALTER TABLE systems RENAME TO other", f"CREATE VIEW systems AS {ENDLESS}"), "no table of ASE"),
        (VIRTUAL, "no table of ASE"),
        (("ALTER TABLE systems ADD COLUMN x AS (length(positions))",), "computed columns"),
        (("ALTER TABLE systems DROP COLUMN positions",), "cannot be read"),
        (("UPDATE information SET value = 4 WHERE name = 'version'",), "ase.db.convert"),
        (("UPDATE systems SET data = x'ffffffffffffff7f'",), "cannot be read"),
        (("UPDATE systems SET forces = 'text'",), "cannot be read"),
        (("UPDATE systems SET energy = zeroblob(1000000)",), "cannot be read"),
        (('UPDATE systems SET data = \'{"a": {"__ndarray__": [[100000000000], "float64", [1]]}}\'',), "cannot be read"),
        (("DELETE FROM systems",), "no rows"),
    ],
)
def test_nothing_in_a_database_runs_or_is_trusted(
    tmp_path: Path, statements: tuple[str, ...], message: str | None
) -> None:
    path = tmp_path / "a.db"
    write_database(path, frames(5))
    _sql(path, *statements)
    with pytest.raises(FormatError, match=message):
        open_dataset(path, format="asedb", comm=MPI.COMM_SELF)


def test_a_database_that_is_being_written(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    write_database(path, frames(5))
    before = path.read_bytes()
    Path(f"{path}-journal").write_bytes(b"x" * 512)
    with pytest.raises(FormatError, match=r"being written[\s\S]*a\.db-journal"):
        open_dataset(path)
    Path(f"{path}-journal").write_bytes(b"")
    assert len(open_dataset(path)) == 5 and path.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.db", "a.db-journal"]


def test_lack_of_memory_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a file is opened, and as it is read."""
    ase.io.write(tmp_path / "a.xyz", frames(3), format="extxyz")
    data = open_dataset(tmp_path / "a.xyz", comm=MPI.COMM_SELF)

    def fail(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(xyz, "_parsed", fail)
    for read in (data.load, lambda: open_dataset(tmp_path / "a.xyz", comm=MPI.COMM_SELF)):
        with pytest.raises(OutOfMemory, match="memory ran out"):
            read()
