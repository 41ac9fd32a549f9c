"""Groups as samples, on one rank; `tests/opening/test_samples.py` has those of several ranks."""

from pathlib import Path

import h5py
import pytest
from mpi4py import MPI

import matex_data as md


def test_arrays_that_were_never_written(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=512) as file:
        for number in range(3):
            array = file.create_dataset(f"{number}/x", 4, "f8")
            if number != 1:
                array[:] = number + 1
        expected = [file[f"{number}/x"][...].tolist() for number in range(3)]
    found = md.open_dataset(tmp_path / "a.h5", sample="group", comm=MPI.COMM_SELF).load()
    assert found["x"].tolist() == expected == [[1] * 4, [0] * 4, [3] * 4]


def test_a_group_of_rows_is_an_error(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["run/x"] = [1.0]
    with pytest.raises(md.FormatError, match=r"(?s)sample=None.*inputs="):
        md.open_dataset(tmp_path / "a.h5", group="run", comm=MPI.COMM_SELF)
    with pytest.raises(md.FormatError, match="offsets= has no samples of groups"):
        md.open_dataset(tmp_path / "a.h5", sample="group", offsets={"x": "n"}, comm=MPI.COMM_SELF)
