"""A run that is killed and restarted ends with the weights of an uninterrupted run."""

from __future__ import annotations

import random
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support import problems
from tests.support.launch import run_script

SCRIPT = """
import os
import signal
import sys

import keras
import numpy as np

import matex_data as md

files, folder, plain, kill = sys.argv[1], sys.argv[2], sys.argv[3] == "plain", int(sys.argv[4])
seed = int(sys.argv[5]) if len(sys.argv) > 5 else None


batches = []  # of this process


class Kill(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        batches.append(batch)
        if len(batches) == kill and md.training.world().rank == md.training.world().size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]
if not plain:
    layers[1:1] = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.2)]
model = keras.Sequential([keras.Input((6,)), *layers])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
data = md.open_dataset(files, inputs="x", targets="y")
history = md.training.fit(
    model, data, batch_size=24, shuffle=True, seed=seed, remainder="keep", epochs=3, checkpoint=folder, save_every=3,
    callbacks=[Kill()], verbose=0,
)
if md.training.world().rank == 0:
    logs = [history.history[name][-1] for name in ("loss", "accuracy")]
    np.savez(folder + ".npz", *model.get_weights(), logs=np.array(logs))
"""


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "table.h5"
    x, y = problems.table(250)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, chunks=(10, 6))
        file.create_dataset("y", data=y, chunks=(10,))
    return path


def _train(ranks: int, table: Path, folder: Path, kind: str, kill: int = 0, *seed: str) -> dict[str, np.ndarray]:
    done = run_script(ranks, SCRIPT, str(table), str(folder), kind, str(kill), *seed, timeout=120)
    if kill:
        assert done.returncode != 0
        return {}
    assert done.returncode == 0, done.stderr
    with np.load(f"{folder}.npz") as file:
        return dict(file)


def test_a_restarted_run_is_bitwise_equal(table: Path, tmp_path: Path) -> None:
    seed = random.Random(0)  # the seed of the shuffled order is drawn by the first run, and kept in its checkpoint
    kills = [seed.randrange(4, 11), seed.randrange(4, 11)]
    for kill in kills:
        _train(2, table, tmp_path / "broken", "all", kill)
    broken = _train(2, table, tmp_path / "broken", "all")
    straight = _train(2, table, tmp_path / "straight", "all", 0, _seed(tmp_path / "broken"))
    assert broken.keys() == straight.keys()
    for name, array in straight.items():
        assert array.tobytes() == broken[name].tobytes(), name


@pytest.mark.openmpi
def test_resumes_on_another_number_of_ranks(table: Path, tmp_path: Path) -> None:
    _train(3, table, tmp_path / "moved", "plain", kill=7)
    moved = _train(2, table, tmp_path / "moved", "plain")
    straight = _train(1, table, tmp_path / "straight", "plain", 0, _seed(tmp_path / "moved"))
    for name, array in straight.items():
        np.testing.assert_allclose(moved[name], array, rtol=1e-4, atol=1e-5)


def _seed(folder: Path) -> str:
    """Return the seed that a run has drawn, from its checkpoint."""
    from matex_data.training.restart import checkpoint

    found = checkpoint.read(folder)
    assert found is not None
    return str(found[1]["data"][0]["seed"])
