"""One process without an MPI library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from matex_data.machine import without_rank
from tests.support.launch import ROOT

SCRIPT = """
import sys
import matex_data as md

data = md.open_dataset(sys.argv[1], inputs="x", targets="y")
print(sum(len(x) for x, y in data.batches(48, shuffle=True, seed=1)), data.statistics("y")["y"].max)

import keras

model = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
batches = data.tf_dataset(48)
history = md.training.fit(model, batches, validation_data=batches, epochs=2, verbose=0)
print(len(history.epoch), *md.training.world(), float(md.training.allreduce([2.0])[0]))
print("mpi4py.MPI" in sys.modules)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("library") / "x.h5")
    with h5py.File(path, "w") as file:
        file["x"] = np.random.default_rng(0).random((960, 8))
        file["y"] = np.arange(960.0)
    return path


def _run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python where mpi4py finds no MPI library."""
    env = without_rank() | {"MPI4PY_LIBMPI": "/nonexistent/libmpi.so", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command], env=env | environment, capture_output=True, text=True, timeout=180, cwd=os.sep
    )


def test_one_process_needs_no_mpi_library(path: str) -> None:
    done = _run("-c", SCRIPT, path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["960 959.0", "2 0 1 0 2.0", "False"]


@pytest.mark.parametrize("command", ["script", "inspect", "run"])
def test_several_ranks_without_an_mpi_library_are_one_line(path: str, command: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('unreachable')")
    arguments = {"script": ["-c", SCRIPT, path], "inspect": ["-m", "matex_data", "inspect", path]}
    arguments["run"] = ["-m", "matex_data", "run", str(tmp_path / "script.py")]
    done = _run(*arguments[command], PMI_RANK="0", PMI_SIZE="2")
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "2 ranks need an MPI library" in done.stderr and "pip install mpich" in done.stderr


def test_only_one_rank_prints_that_line(path: str) -> None:
    done = _run("-c", SCRIPT, path, OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2")
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")
