"""Train digits with JAX: batches are this rank's arrays, and gradients are averaged over the ranks by mpi4py.

python sample_data/make.py digits
mpiexec -n 2 python examples/jax_loop.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from mpi4py import MPI

import matex_data as md

FILES = Path(__file__).resolve().parent.parent / "sample_data" / "digits" / "*.h5"
SIZES = ((64, 64), (64, 10))


def logits(parameters: Any, image: Any) -> Any:
    """Return the output of a perceptron, float32[samples, 10]."""
    (first, bias), (second, offset) = parameters
    return jnp.tanh(image.reshape(len(image), -1) / 16 @ first + bias) @ second + offset


def mean_loss(parameters: Any, image: Any, label: Any) -> Any:
    """Return the mean cross entropy of this rank's rows."""
    chances = jax.nn.log_softmax(logits(parameters, image))
    return -jnp.mean(jnp.take_along_axis(chances, label[:, None], axis=1))


def train(files: str, epochs: int = 8, batch_size: int = 48) -> dict[str, Any]:
    """Train, and return the parameters and the accuracy on held-out digits. *Collective*."""
    comm, rng = MPI.COMM_WORLD, np.random.default_rng(1)
    training, held_out = md.open_dataset(files, inputs="image", targets="label").split(0.8, 0.2, seed=1)
    initial = [(rng.normal(0, rows**-0.5, (rows, columns)), np.zeros(columns)) for rows, columns in SIZES]
    flat, unravel = ravel_pytree(jax.tree.map(jnp.float32, initial))
    gradient = jax.jit(jax.grad(lambda flat, image, label: mean_loss(unravel(flat), image, label)))
    batches = training.batches(batch_size, shuffle=True, seed=1)  # each pass is an epoch
    for _ in range(epochs):
        for image, label in batches:  # equally many rows on all ranks, so the mean of means is that of the batch
            own = np.asarray(gradient(flat, jnp.asarray(image), jnp.asarray(label)))
            flat = flat - 0.5 * comm.allreduce(own) / comm.size
    arrays = held_out.load()
    right = np.sum(np.argmax(logits(unravel(flat), jnp.asarray(arrays["image"])), -1) == arrays["label"])
    return {"parameters": np.asarray(flat), "accuracy": comm.allreduce(int(right)) / len(held_out)}


if __name__ == "__main__":
    result = train(str(FILES))
    if MPI.COMM_WORLD.rank == 0:
        print(f"accuracy on held-out digits: {result['accuracy']:.3f}")
