"""Groups as samples in files with a user block; `tests/opening/test_samples.py` has those of one rank and of three."""

from pathlib import Path

import h5py
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
