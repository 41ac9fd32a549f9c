"""Predict who survives from a table with texts and missing values, in stratified folds, and draw the curves.

python sample_data/make.py passengers
mpiexec -n 2 python examples/passengers.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import matplotlib.pyplot as plt
import numpy as np

import matex_data as md

FILES = Path(__file__).resolve().parent.parent / "sample_data" / "passengers" / "*.csv"
OPTIONS: dict[str, Any] = {
    "inputs": ["class", "sex", "port", "age", "fare"],
    "one_hot": ["class", "sex"],
    "dtype": {"port": "category"},
    "missing": {"age": "mean", "port": "mode"},  # of the training set of each fold
}


def network(training: md.Dataset) -> keras.Model:
    """Perceptron of one-hot texts, an embedding of the port, and standardized numbers."""
    layers, fields = keras.layers, {name: training.schema[name] for name in OPTIONS["inputs"]}
    inputs = {name: keras.Input(field.shape, dtype=field.dtype.name, name=name) for name, field in fields.items()}
    ports = layers.Embedding(len(fields["port"].attributes["categories"]), 2)(inputs["port"])
    numbers = [training.normalization(name)(layers.Reshape((1,))(inputs[name])) for name in ("age", "fare")]
    features = layers.Concatenate()([inputs["class"], inputs["sex"], ports, *numbers])
    return keras.Model(inputs, layers.Dense(1, "sigmoid")(layers.Dense(16, "tanh")(features)))


def train(files: str, epochs: int = 10, batch_size: int = 48, folds: int = 3, picture: str | None = None) -> Any:
    """Train without each of the folds, and return accuracies, true and predicted values. *Collective*."""
    data, found = md.open_dataset(files, targets="survived", **OPTIONS), []
    for training, held_out in data.kfold(folds, seed=1, stratify="survived"):
        keras.utils.set_random_seed(1)
        model = network(training)
        model.compile(keras.optimizers.Adam(0.01), "bce", metrics=["accuracy"])
        md.training.fit(model, training.tf_dataset(batch_size, shuffle=True, seed=1), epochs=epochs, verbose=0)
        score = md.training.predict(model, held_out, gather=True)[:, 0]
        truth = md.training.allgather(held_out.load()["survived"])
        found.append({"accuracy": float(np.mean((score > 0.5) == truth)), "score": score, "survived": truth})
    if picture and md.training.world().rank == 0:
        for fold in found:
            order = fold["survived"][np.argsort(-fold["score"])]
            plt.plot(np.cumsum(order == 0), np.cumsum(order == 1))  # true over false positives
        plt.savefig(picture)
    return found


if __name__ == "__main__":
    result = train(str(FILES), picture="passengers.png")
    if md.training.world().rank == 0:
        print("accuracy in each fold, see passengers.png:", [round(fold["accuracy"], 3) for fold in result])
