"""A run that is killed and restarted ends with the weights of an uninterrupted run.

Runs that are killed are jobs of their own, the others run in pools.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from tests.support import problems
from tests.support.launch import run_script
from tests.support.ranks import Pools

Weights = list[np.ndarray[Any, Any]]


def train(
    comm: MPI.Intracomm, files: str, folder: str, plain: bool, seed: int | None = None, kill: int | None = None
) -> Weights:
    """Train three epochs with checkpoints in ``folder``; the last rank kills itself after ``kill`` steps.

    Return the weights, and the loss and the accuracy of the last epoch.
    """
    import keras

    import matex_data as md

    steps = 0

    class Kill(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal steps
            steps += 1
            if steps == kill and comm.rank == comm.size - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    keras.backend.clear_session()  # names of layers count from the beginning, as in a job of its own
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]
    if not plain:
        layers[1:1] = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    options = {"batch_size": 24, "shuffle": True, "seed": seed, "remainder": "keep"}
    history = md.training.fit(
        model,
        md.open_dataset(files, inputs="x", targets="y", comm=comm),
        **options,
        epochs=3,
        checkpoint=folder,
        save_every=3,
        callbacks=[Kill()],
        comm=comm,
        verbose=0,
    )
    logs = [history.history[name][-1] for name in ("loss", "accuracy")]
    return [*problems.weights(model), np.array(logs)]


KILLED = """
import sys
from mpi4py import MPI
from tests.training.restart.test_resume import train

files, folder, plain, kill = sys.argv[1:]
train(MPI.COMM_WORLD, files, folder, plain == "True", kill=int(kill))
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "table.h5"
    x, y = problems.table(250)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, chunks=(10, 6))
        file.create_dataset("y", data=y, chunks=(10,))
    return path


def _kill(ranks: int, table: Path, folder: Path, plain: bool, kill: int) -> None:
    done = run_script(ranks, KILLED, str(table), str(folder), str(plain), str(kill), timeout=120)
    assert done.returncode != 0
    assert folder.exists(), done.stderr


@pytest.mark.slow  # test_preemption.py compares bit by bit, too
@pytest.mark.parametrize("kills", [(7,), pytest.param((10, 4), marks=pytest.mark.slow)])
def test_a_restarted_run_is_bitwise_equal(table: Path, tmp_path: Path, ranks: Pools, kills: tuple[int, ...]) -> None:
    broken, straight = str(tmp_path / "broken"), str(tmp_path / "straight")
    for kill in kills:  # the first run draws the seed of the order, and stores it in its checkpoint
        _kill(2, table, Path(broken), False, kill)
    seed = _seed(Path(broken))
    found, *_ = ranks(2).run(train, str(table), broken, False, timeout=120)
    expected, *_ = ranks(2).run(train, str(table), straight, False, seed, timeout=120)
    assert [array.tobytes() for array in found] == [array.tobytes() for array in expected]


@pytest.mark.slow  # without a kill, random runs do
@pytest.mark.openmpi
def test_resumes_on_another_number_of_ranks(table: Path, tmp_path: Path, ranks: Pools) -> None:
    moved, straight = str(tmp_path / "moved"), str(tmp_path / "straight")
    _kill(3, table, Path(moved), True, 7)
    seed = _seed(Path(moved))
    found, *_ = ranks(2).run(train, str(table), moved, True, timeout=120)
    (expected,) = ranks(1).run(train, str(table), straight, True, seed, timeout=120)
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-4, atol=1e-5)


def _seed(folder: Path) -> int:
    """Return the seed that a run has drawn, from its checkpoint."""
    from matex_data.training.restart import checkpoint

    found = checkpoint.read(folder)
    assert found is not None
    return int(found[1]["data"][0]["seed"])
