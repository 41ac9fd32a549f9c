"""Importing changes nothing in the process; the first use does what must be done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.launch import ROOT

STATE = """
import csv, ctypes, gc, importlib, logging, os, pkgutil, signal, sys, threading, warnings

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if name == "mallopt":
            calls.append(name)
        return super().__getattr__(name)

calls, ctypes.CDLL = [], Library

def state():
    from numba.core import entrypoints
    return {
        "sys.excepthook": sys.excepthook,
        "threading.excepthook": threading.excepthook,
        "warnings": (list(warnings.filters), warnings.showwarning),
        "environment": dict(os.environ),
        "logging": (list(logging.root.handlers), logging.root.level, logging.getLogger("matex_data").handlers[:]),
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "os": (os._exit, os.fork, os.getcwd(), os.umask(os.umask(0o22) or 0o22)),
        "garbage collection": (gc.isenabled(), gc.get_threshold()),
        "switch interval": sys.getswitchinterval(),
        "threads": threading.active_count(),
        "Numba": (entrypoints._already_initialized, entrypoints.init_all),
        "allocator": list(calls),
        "csv": csv.field_size_limit(),
    }
"""
LIBRARIES = (
    *("tensorflow", "keras", "mpi4py.MPI", "numba", "PIL.Image", "h5py", "netCDF4", "pyarrow", "uproot", "awkward"),
    *(
        "astropy.io.fits",
        "tifffile",
        "typer",
        "pyhepmc",
        "pylhe",
        "imagecodecs",
        "hdf5plugin",
        "rich.console",
    ),
)

IMPORTS = f"""
for name in {LIBRARIES!r}:  # what these change is theirs
    importlib.import_module(name)
sys.modules["torch"] = None  # importing matex_data.torch does without
before = state()
packages = ("matex_data", "matex_data.readers", "matex_data.training")
import matex_data, matex_data.readers, matex_data.training
names = [
    found.name
    for package in packages
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, package + ".")
    if not found.name.endswith("__main__")
]
for name in ("matex_data", *names):
    importlib.import_module(name)
    now = state()
    changed = [what for what in now if now[what] != before[what]]
    assert not changed, (name, changed, [(before[what], now[what]) for what in changed])
print(len(names))
"""

USE = """
import awkward, numba, vector, matex_data
from matex_data.readers.images.decoding.resample import compile_loops
before = state()
for path in sys.argv[1:]:
    data = matex_data.open_dataset(path)
    assert len(data.load()) and len(list(data.batches(4))) == 2
compile_loops()
after = state()
changed = {what for what in after if after[what] != before[what]}
print(sorted(changed - {"threads", "Numba"}), after["Numba"][1] is before["Numba"][1])
"""
RUN = """
from pathlib import Path
from matex_data.training.launcher.run import run
Path(sys.argv[1]).write_text("import matex_data")
run(sys.argv[1])
print(calls)
"""


def _run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", STATE + code, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_no_import_changes_the_process() -> None:
    assert int(_run(IMPORTS)) > 150


def test_opening_and_reading_change_the_hook_for_errors_alone(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.zeros(10)
    (tmp_path / "x.csv").write_text("a,b\n" + "1,'2\n" * 9 + '3,"' + "4" * 200_000 + '"\n')
    changed = "['sys.excepthook'] True"
    assert _run(USE, str(tmp_path / "x.h5"), str(tmp_path / "x.csv")) == changed


def test_the_allocator_is_set_by_matex_run_alone(tmp_path: Path) -> None:
    assert _run(RUN, str(tmp_path / "script.py")).splitlines()[-1] == "['mallopt']"


@pytest.mark.slow  # test_start shows it of ranks
def test_training_starts_mpi_before_it_loads_tensorflow() -> None:
    """The other order hangs in ``MPI_Init`` with MPICH 5 under Slurm."""
    code = "import matex_data; matex_data.training.fit; names = list(sys.modules)\n"
    assert _run(code + "print(names.index('mpi4py.MPI') < names.index('tensorflow'))") == "True"


def test_completion_shows_all_public_names() -> None:
    import matex_data
    from matex_data import training

    assert set(dir(matex_data)) > {*matex_data.__all__, "abc", "readers", "torch"}
    assert set(dir(training)) > set(training.__all__)
