"""Loops of Lightning and Flax on two ranks: the weights are those of one process with the same global batches."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.frameworks import needs
from tests.support.launch import run_script

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


LIGHTNING = """
import sys
import lightning
import numpy as np
import torch
from lightning.pytorch.plugins.environments import MPIEnvironment
import matex_data as md
import matex_data.torch

class Linear(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        torch.nn.init.zeros_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def training_step(self, batch, number):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

world = md.training.world()
data = md.open_dataset(sys.argv[1], inputs="x", targets="y")
loader = torch.utils.data.DataLoader(md.torch.IterableDataset(data, 24, shuffle=True, seed=1), batch_size=None)
several = {"strategy": "ddp", "plugins": [MPIEnvironment()], "use_distributed_sampler": False}
trainer = lightning.Trainer(
    accelerator="cpu", devices=world.size, max_epochs=5, logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False, **(several if world.size > 1 else {}),
)
model = Linear()
trainer.fit(model, loader)
weights = np.append(model.layer.weight.detach().numpy(), model.layer.bias.detach().numpy())
np.save(f"{sys.argv[2]}/{world.size}-{world.rank}.npy", weights)
"""

FLAX = """
import sys
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.flatten_util import ravel_pytree
from mpi4py import MPI
import matex_data as md

comm = MPI.COMM_WORLD
data = md.open_dataset(sys.argv[1], inputs="x", targets="y")
model = nnx.Linear(4, 1, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
gradient = nnx.jit(nnx.grad(lambda model, x, y: jnp.mean((model(x) - y) ** 2)))
batches = data.batches(24, shuffle=True, seed=1)
for epoch in range(5):
    for x, y in batches:
        flat, unravel = ravel_pytree(gradient(model, jnp.asarray(x), jnp.asarray(y)))
        optimizer.update(model, unravel(jnp.asarray(comm.allreduce(np.asarray(flat)) / comm.size)))
weights = np.append(np.asarray(model.kernel[...]), np.asarray(model.bias[...]))
np.save(f"{sys.argv[2]}/{comm.size}-{comm.rank}.npy", weights)
"""


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
    _check(*_weights(LIGHTNING, path, tmp_path), path)


@needs("jax", "flax")
def test_flax(path: Path, tmp_path: Path) -> None:
    _check(*_weights(FLAX, path, tmp_path), path)
