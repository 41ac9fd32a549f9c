"""Frames of atoms: conformance suites of extended XYZ and of trajectories, and errors; values by ASE."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from mpi4py import MPI

from matex_data import DataError, DecodeError, FieldNotFound, FormatError, open_dataset
from matex_data.readers.atoms import xyz
from tests.support.format_suite import Case, FormatSuite, same

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


def test_a_field_that_a_frame_lacks_is_an_error_where_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(xyz, "BLOCK_BYTES", 100)
    every = frames(9)
    every[4].calc = None
    ase.io.write(tmp_path / "a.xyz", every, format="extxyz")
    assert len(_load(tmp_path / "a.xyz", "positions")["positions"]) == 9
    with pytest.raises(DecodeError, match="lacks a field") as caught:
        _load(tmp_path / "a.xyz", "energy")
    assert caught.value.row == 4 and caught.value.field == "energy"


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "no XYZ"), ("3\nx\nO 0 0 0\n", "no XYZ"), ("atoms\n", "no XYZ"), ("1\nx\nO 0 0\n", "cannot be read")],
)
def test_what_is_no_xyz_is_told(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.xyz").write_text(text)
    with pytest.raises(FormatError, match=message):
        _load(tmp_path / "a.xyz")


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    ase.io.write(tmp_path / "a.traj", frames(3))
    with pytest.raises(FieldNotFound, match="forces"):
        _load(tmp_path / "a.traj", "force")
    (tmp_path / "b.traj").write_bytes(b"- of UlmASE-Trajectory" + bytes(100))
    with pytest.raises(DataError, match=r"b\.traj"):
        _load(tmp_path / "b.traj")
