"""Files that HDF5 keeps open for rows: a script may open them as well, in whatever way."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from matex_data.opening.open import open_dataset
from tests.support.ranks import Pool


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a file of texts, which h5py reads, so that it stays open."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["text"] = [f"text {i}" for i in range(20)]
        file["n"] = np.arange(20)
    return path


@pytest.mark.parametrize("options", [{}, {"locking": False}, {"locking": True}], ids=str)
def test_a_script_opens_a_file_that_is_being_read(texts: Path, options: dict[str, Any]) -> None:
    data = open_dataset(texts, comm=MPI.COMM_SELF)
    expected = [f"text {i}".encode() for i in range(20)]
    assert data.load()["text"].tolist() == expected
    with h5py.File(texts, "r", **options) as file:
        assert file["text"][...].tolist() == expected
        assert data.load()["text"].tolist() == expected
    assert data.load()["text"].tolist() == expected


@pytest.mark.parametrize("options", [{}, {"locking": False}, {"locking": True}], ids=str)
def test_a_file_is_read_that_a_script_has_opened(texts: Path, options: dict[str, Any]) -> None:
    with h5py.File(texts, "r", **options) as file:
        data = open_dataset(texts, comm=MPI.COMM_SELF)
        assert data.load()["text"].tolist() == file["text"][...].tolist()


def test_sources_of_a_virtual_dataset_open_as_well(texts: Path, tmp_path: Path) -> None:
    path = tmp_path / "virtual.h5"
    with h5py.File(path, "w") as file:
        layout = h5py.VirtualLayout((20,), "i8")
        layout[...] = h5py.VirtualSource(texts.name, "n", (20,))
        file.create_virtual_dataset("n", layout)
    data = open_dataset(path, comm=MPI.COMM_SELF)
    assert data.load()["n"].tolist() == list(range(20))
    for opened in (path, texts):
        with h5py.File(opened, "r") as file:
            assert file["n"][...].tolist() == list(range(20))


def test_damage_by_a_script_that_writes_is_an_error_not_a_crash(texts: Path) -> None:
    data = open_dataset(texts, inputs="n", targets="text", comm=MPI.COMM_SELF)
    assert len(list(data.batches(10))) == 2
    with h5py.File(texts, "r+") as file:
        file["n"][...] = 0
        file["more"] = np.zeros(100)
    with pytest.raises(Exception, match="changed"):
        list(data.batches(10))


def _rewritten(comm: Any, folder: str) -> list[bool]:
    """Open a file as often as rank 0 has written it anew, by another path each time; the former data sets stay."""
    data, right = [], []
    whole = f"{folder}/texts.h5"
    paths = [whole, whole, f"{folder}/./texts.h5", os.path.relpath(whole), f"{folder}/../{Path(folder).name}/texts.h5"]
    for number, (path, chunks) in enumerate(zip(paths, (100, 100, None, 50, 50), strict=True)):
        texts = [f"{number}-{i}" for i in range(1000)]
        comm.Barrier()
        if comm.rank == 0:
            with h5py.File(whole, "w") as file:
                file.create_dataset("s", data=texts, dtype=h5py.string_dtype(), chunks=chunks and (chunks,))
                file["k"] = np.arange(1000)
        comm.Barrier()
        data.append(open_dataset(path, inputs="s", where="k % 2 == 0", comm=comm))
        taken = data[-1].load()["s"].tolist()  # those of this rank
        right.append(len(taken) > 100 and set(taken) < {text.encode() for text in texts})
    return right


@pytest.mark.rank_counts(1, 3)
def test_a_file_that_is_written_anew_has_its_new_rows(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_rewritten, str(tmp_path), timeout=60) == [[True] * 5] * pool.size
