"""Files on which the HDF5 library crashes or hangs, beside others that it can read."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from matex_data.cli.probing import is_hdf5, probe
from matex_data.errors import FormatError
from tests.cli.test_commands import CALL
from tests.support.launch import run_script
from tests.support.machine_speed import scaled

# A child whose library crashes or hangs depending on the name of the file.
CHILD = """
import json, os, signal, sys, time
from matex_data.cli import probing
def look(path, format, names, options, step):
    name = os.path.basename(path)
    if name.startswith("crash"):
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGSEGV)
    if name.startswith("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if name.startswith("loop"):
        time.sleep(100)
    if name.startswith("leave"):
        os._exit(3)
    if name.startswith("raw"):
        raise ZeroDivisionError("raw")
    if name.startswith("slow"):
        for _ in range(8):
            time.sleep(0.25)
            step()
    print("not an answer", flush=True)
    assert "mpi4py.MPI" not in sys.modules
probing._probe_file = look
probing.main()
"""
TEXTS = {
    "crash": "the HDF5 library crashes on the file (signal 11, SIGSEGV)",
    "kill": "the system has killed the process",
    "loop": "the HDF5 library hangs on the file",
    "leave": "ended with code 3",
    "raw": "ZeroDivisionError: raw",
}


def test_each_file_is_probed_whatever_happens_to_the_others() -> None:
    names = ["a", "crash1", "b", "kill1", "slow", "loop1", "crash2", "c", "leave", "raw", "d", "loop2"]
    begin = time.monotonic()
    errors = probe(names, seconds=1, command=[sys.executable, "-c", CHILD])
    assert time.monotonic() - begin < scaled(60)
    assert [error.file for error in errors] == [name for name in names if name.strip("12") in TEXTS]
    for error in errors:
        assert isinstance(error, FormatError)
        assert TEXTS[str(error.file).strip("12")] in str(error)


def test_the_child_opens_files_as_a_reader_does(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(5)
        file["names"] = ["a", "b", "c", "d", "e"]  # only the library can read these
    (tmp_path / "b.h5").write_bytes((tmp_path / "a.h5").read_bytes()[:-200])
    paths = [str(tmp_path / name) for name in ("a.h5", "b.h5")]
    (error,) = probe(paths)
    assert error.file == paths[1] and "truncated" in str(error)
    assert [error.field for error in probe(paths[:1], names=["y"])] == ["y"]
    assert is_hdf5(paths[0]) and not is_hdf5(__file__) and not is_hdf5("absent.h5")


def _with_a_looping_heap(path: Path) -> str:
    """Write strings of variable length, in a heap whose first object has size 0: HDF5 1.14 loops forever."""
    with h5py.File(path, "w", libver="earliest") as file:
        file["names"] = ["a", "b", "c"]
        file["names"].attrs["units"] = "K"
    data = bytearray(path.read_bytes())
    at = data.index(b"GCOL")
    data[at + 8 : at + 16] = (2**63).to_bytes(8, "little")
    path.write_bytes(data)
    return str(path)


@pytest.mark.parametrize("size", [1, 2])
def test_validate_survives_a_file_on_which_the_library_loops(tmp_path: Path, size: int) -> None:
    """Depending on its version, HDF5 raises an error, crashes or loops."""
    path = _with_a_looping_heap(tmp_path / "bad.h5")
    with h5py.File(tmp_path / "good.h5", "w") as file:
        file["names"] = ["a", "b", "c"]
    done = run_script(size, CALL, "validate", str(tmp_path / "*.h5"), "--limit", "5")
    assert done.returncode == 1
    assert path in done.stderr and "good.h5" not in done.stderr and "Traceback" not in done.stderr
