"""HDF5 files that another program writes while they are read, or has left without closing them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import matex_data as md
from tests.support.ranks import Pool

WRITER = """
import sys, h5py, numpy as np
file = h5py.File(sys.argv[1], "w", libver="latest")
fields = {
    "x": file.create_dataset("x", (0, 4), maxshape=(None, 4), chunks=(8, 4), dtype="f4", compression="gzip"),
    "number": file.create_dataset("number", (0,), maxshape=(None,), chunks=(8,), dtype="i4"),
    "pair": file.create_dataset("pair", (0,), maxshape=(None,), chunks=(8,), dtype=[("a", "i2"), ("b", "f8")]),
}
text = file.create_dataset("text", (50,), h5py.string_dtype(), chunks=(8,))
text[:] = [f"event {n}" for n in range(50)]
file.swmr_mode = True

def append(name, rows):
    field = fields[name]
    begin = len(field)
    field.resize(begin + rows, axis=0)
    numbers = np.arange(begin, begin + rows)
    if name == "pair":
        field[begin:] = np.array([(n, n / 2) for n in numbers], field.dtype)
    else:
        field[begin:] = numbers if field.ndim == 1 else numbers[:, None] * np.ones(4)
    field.flush()

for _ in range(3):
    append("x", 10)
append("number", 25)
append("pair", 27)
print("written", flush=True)
for line in sys.stdin:
    append("x", 20)
    append("number", 20)
    append("pair", 20)
    print("written", flush=True)
"""
ROWS = 25


class Writer:
    """Program that writes a file, and more rows when it is asked to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._wait()

    def _wait(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "written\n"

    def write(self) -> None:
        """Append 20 rows to each field."""
        assert self._process.stdin is not None
        self._process.stdin.write("more\n")
        self._process.stdin.flush()
        self._wait()

    def kill(self) -> None:
        """End the program without closing the file."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Writer]:
    """Return a program that writes a file."""
    writer = Writer(tmp_path / "a.h5")
    yield writer
    writer.kill()


def _opened(comm: Any, path: Path) -> Any:
    data = md.open_dataset(path, comm=comm, swmr=True)
    return data, data.load(), list(data.batches(6, shuffle=True, seed=1))


def _check(loaded: list[dict[str, Any]], rows: int) -> None:
    found = {name: np.concatenate([part[name] for part in loaded]) for name in loaded[0]}
    number = np.arange(rows)
    np.testing.assert_array_equal(found["number"], number)
    np.testing.assert_array_equal(found["x"], number[:, None] * np.ones((1, 4)))
    np.testing.assert_array_equal(found["pair"]["a"], number)
    assert found["text"].tolist() == [f"event {n}".encode() for n in number]


def _read(comm: Any, path: Path) -> Any:
    _, loaded, _ = _opened(comm, path)
    return loaded


@pytest.mark.rank_counts(1, 3)
def test_samples_are_those_that_all_fields_have(pool: Pool, writer: Writer) -> None:
    _check(pool.run(_read, writer.path), ROWS)
    writer.write()
    _check(pool.run(_read, writer.path), ROWS + 20)
    writer.kill()
    _check(pool.run(_read, writer.path), ROWS + 20)


def test_the_file_may_grow_while_it_is_read(writer: Writer) -> None:
    data, _, batches = _opened(MPI.COMM_SELF, writer.path)
    writer.write()
    again = list(data.batches(6, shuffle=True, seed=1))
    for before, after in zip(batches, again, strict=True):
        np.testing.assert_array_equal(before["x"], after["x"])
    assert len(data) == ROWS and len(md.open_dataset(writer.path, comm=MPI.COMM_SELF, swmr=True)) == ROWS + 20


def test_a_file_as_a_sample_has_whole_arrays(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w", libver="latest") as file:
        file["x"], file["y"] = np.arange(6), np.arange(4)
    found = md.open_dataset(tmp_path / "a.h5", sample="file", swmr=True, comm=MPI.COMM_SELF).load()
    assert found["x"].tolist() == [list(range(6))] and found["y"].tolist() == [list(range(4))]


def test_without_it_a_file_that_is_written_is_an_error_that_names_it(writer: Writer) -> None:
    with pytest.raises(md.FormatError, match="marked as open for writing") as caught:
        md.open_dataset(writer.path, comm=MPI.COMM_SELF)
    assert "swmr=True" in str(caught.value.remedy)


def test_a_crash_without_swmr_is_not_said_to_need_what_was_given(tmp_path: Path) -> None:
    code = "import h5py, os, sys; f = h5py.File(sys.argv[1], 'w', libver='latest'); f['x'] = 1; f.flush(); os._exit(0)"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.h5")], check=True)
    with pytest.raises(md.FormatError, match="marked as open for writing") as caught:
        md.open_dataset(tmp_path / "a.h5", comm=MPI.COMM_SELF, swmr=True)
    assert "h5clear -s" in str(caught.value.remedy) and "swmr=True" not in str(caught.value.remedy)
