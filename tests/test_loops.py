"""Loops of Lightning and Flax on two ranks: the weights are those of one process with the same global batches."""

from __future__ import annotations

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.frameworks import needs
from tests.support.launch import ROOT, run_script

ROWS, BATCH = 96, 24


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("loops") / "x.h5"
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("f4")
    with h5py.File(path, "w") as file:
        file["x"] = x
        file["y"] = x @ rng.normal(size=(4, 1)).astype("f4")
    return path


SAVE = 'np.save(f"{sys.argv[2]}/{size}-{rank}.npy", weights)'
LIGHTNING_WEIGHTS = f"""
weights = np.append(model.layer.weight.detach().numpy(), model.layer.bias.detach().numpy())
rank, size = world.rank, world.size
{SAVE}
"""
FLAX_WEIGHTS = f"""
weights = np.append(np.asarray(model.kernel[...]), np.asarray(model.bias[...]))
rank, size = comm.rank, comm.size
{SAVE}
"""
LIGHTNING, FLAX = re.findall("```py\n(.*?)```", (ROOT / "docs/guides/lightning_flax.md").read_text(), re.DOTALL)
"""Scripts of the guide."""


def _weights(script: str, path: Path, folder: Path) -> list[np.ndarray]:
    """Return the weights of one process, and those of both of two ranks."""
    for ranks in (1, 2):
        done = run_script(ranks, script, str(path), str(folder), timeout=240)
        assert done.returncode == 0, done.stderr
    return [np.load(folder / f"{name}.npy") for name in ("1-0", "2-0", "2-1")]


def _check(alone: np.ndarray, first: np.ndarray, second: np.ndarray, path: Path) -> None:
    np.testing.assert_allclose(first, alone, rtol=0, atol=1e-6)
    assert np.array_equal(first, second)
    with h5py.File(path) as file:
        x, y = file["x"][:], file["y"][:]
    assert np.mean((x @ alone[:4, None] + alone[4] - y) ** 2) < 0.1 * np.mean(y**2)


@needs("torch", "lightning")
def test_lightning(path: Path, tmp_path: Path) -> None:
    _check(*_weights(LIGHTNING + LIGHTNING_WEIGHTS, path, tmp_path), path)


@needs("jax", "flax")
def test_flax(path: Path, tmp_path: Path) -> None:
    _check(*_weights(FLAX + FLAX_WEIGHTS, path, tmp_path), path)
