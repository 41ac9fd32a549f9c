"""Tell jets of two cores from jets of one by their particles, whose number varies.

    python sample_data/make.py jets
    mpiexec -n 2 python examples/particles.py padded

Four pipelines read the same files. "ragged": a deep set over all particles of a jet, as ``tf.RaggedTensor``. "padded":
a deep set over the 16 particles of the largest momentum, with a mask. "flattened": each particle is a sample. "table":
the columns of a compound table of jets.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from mpi4py import MPI

import matex_data as md

ROOT = Path(__file__).resolve().parent.parent
PARTICLES = ["constituent_pt", "constituent_eta", "constituent_phi"]
SCALE = np.array([20.0, 0.15, 0.15], "f4")  # of pt (GeV), eta and phi
PIPELINES: dict[str, dict[str, Any]] = {
    "ragged": {"inputs": PARTICLES},
    "padded": {
        "inputs": [*PARTICLES, "constituent_pt_mask"],
        "pad": {"constituent_*": 16},
        "keep": "constituent_pt",
        "stack": True,  # of shape (16, 4): the mask is the last column
    },
    "flattened": {"inputs": PARTICLES, "flatten": "constituent_*", "stack": True},
    "table": {"inputs": ["jets/pt", "jets/mass", "jets/constituents"], "stack": True},
}
"""Options of ``open_dataset``."""


class DeepSet(keras.Model):  # type: ignore[misc]
    """Network of the sum over the particles of a jet of a function of each particle (arXiv:1703.06114)."""

    def __init__(self) -> None:
        super().__init__()
        self.particle = keras.Sequential([keras.layers.Dense(32, "tanh"), keras.layers.Dense(16, "tanh")])
        self.jet = keras.Sequential([keras.layers.Dense(32, "tanh"), keras.layers.Dense(1)])

    def call(self, x: Any) -> Any:
        """Return the logits of jets: of a dict of ragged fields, or of an array (jets, particles, fields and mask)."""
        if isinstance(x, dict):
            values = tf.stack([x[name].flat_values for name in PARTICLES], axis=-1) / SCALE
            jet_of = x[PARTICLES[0]].value_rowids()
            return self.jet(tf.math.segment_sum(self.particle(values), jet_of) / SIZE)
        values, mask = x[:, :, :3] / SCALE, x[:, :, 3:]
        return self.jet(tf.reduce_sum(self.particle(values) * mask, axis=1) / SIZE)


SIZE = 16.0  # particles of a jet, about: keeps the sums near 1


def perceptron(scale: Any) -> keras.Model:
    """Return a network for samples of a few numbers, which it divides by ``scale``."""
    layers = keras.layers
    dense = [layers.Dense(32, "tanh"), layers.Dense(16, "tanh"), layers.Dense(1)]
    return keras.Sequential([keras.Input((3,)), layers.Rescaling((1 / np.array(scale)).tolist()), *dense])


NETWORKS: dict[str, Callable[[], keras.Model]] = {
    "ragged": DeepSet,
    "padded": DeepSet,
    "flattened": lambda: perceptron(SCALE),
    "table": lambda: perceptron([300.0, 80.0, 16.0]),
}


def train(
    files: str, pipeline: str, epochs: int = 10, batch_size: int = 48, where: str | None = None
) -> dict[str, Any]:
    """Train on jets with weights, and return the weights of the network and its logs. *Collective*."""
    keras.utils.set_random_seed(1)
    data = md.open_dataset(files, targets="label", weights="weight", where=where, **PIPELINES[pipeline])
    training, held_out = data.split(0.8, 0.2, seed=1)
    model = NETWORKS[pipeline]()
    model.compile(
        keras.optimizers.Adam(0.01),
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
    )
    history = md.training.fit(
        model,
        training.tf_dataset(batch_size, shuffle=True, seed=1),
        validation_data=held_out.tf_dataset(batch_size, remainder="keep"),
        epochs=epochs,
        verbose=2,
    )
    weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    return {"weights": weights, **history.history}


def main() -> None:
    """Read the command line, train, and show the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pipeline", choices=PIPELINES)
    parser.add_argument("--files", default=str(ROOT / "sample_data" / "jets" / "*.h5"), help="default: %(default)s")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=48, help="of all ranks together (default: %(default)s)")
    parser.add_argument("--where", help='condition on the columns of a jet, such as "weight > 0"')
    arguments = parser.parse_args()
    result = train(arguments.files, arguments.pipeline, arguments.epochs, arguments.batch_size, arguments.where)
    if MPI.COMM_WORLD.rank == 0:
        print(f"{arguments.pipeline}: held-out accuracy {result['val_accuracy'][-1]:.3f}")


if __name__ == "__main__":
    main()
