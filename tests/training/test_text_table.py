"""Normalize and train on a real table with numbers, categories and missing values, on three ranks as in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from tests.support.corpus import CORPUS, needs_corpus
from tests.support.ranks import Pools

pytestmark = needs_corpus

NUMBERS = ["APPEARANCES", "Year"]
CATEGORIES = ["ALIGN", "SEX", "EYE"]
TARGET = "ALIVE"
BATCH = 1200


def _trained(comm: Any, path: str) -> tuple[list[np.ndarray], dict[str, list[float]], np.ndarray]:
    import keras

    from matex_data import open_dataset, training

    names = [*NUMBERS, *CATEGORIES]
    options = {"inputs": names, "targets": TARGET, "dtype": dict.fromkeys([*CATEGORIES, TARGET], "category")}
    data = open_dataset(path, comm=comm, missing=0, **options)
    found = open_dataset(path, comm=comm, **options).statistics(*NUMBERS)
    keras.utils.set_random_seed(1)
    inputs = {name: keras.Input((), name=name, dtype="float32") for name in names}
    parts = []
    for name in NUMBERS:
        mean, std = float(found[name].mean), float(found[name].std)
        parts.append(keras.layers.Reshape((1,))(keras.layers.Rescaling(1 / std, -mean / std)(inputs[name])))
    for name in CATEGORIES:
        count = len(data.schema[name].attributes["categories"]) + 1
        code = keras.layers.Rescaling(1, 1)(inputs[name])  # that of a missing value is -1
        parts.append(keras.layers.Embedding(count, 3)(code))
    hidden = keras.layers.Dense(8, "tanh")(keras.layers.Concatenate()(parts))
    classes = len(data.schema[TARGET].attributes["categories"]) + 1
    model = keras.Model(inputs, keras.layers.Dense(classes, "softmax")(hidden))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    batches = data.tf_dataset(BATCH, shuffle=True, seed=1).map(lambda x, code: (x, code + 1))
    history = training.fit(model, batches, epochs=3, comm=comm, verbose=0)
    figures = [[getattr(found[name], key) for key in ("count", "missing", "mean", "std")] for name in NUMBERS]
    return model.get_weights(), history.history, np.array(figures, float)


def test_three_ranks_equal_one_process(ranks: Pools) -> None:
    path = str(CORPUS / "csv/fivethirtyeight/marvel-wikia-data.csv")
    ((weights, logs, figures),) = ranks(1).run(_trained, path, timeout=180)
    table = pd.read_csv(path)[NUMBERS]
    np.testing.assert_array_equal(figures[:, :2], np.stack([table.count(), table.isna().sum()], 1))
    np.testing.assert_allclose(figures[:, 2:], np.stack([table.mean(), table.std(ddof=0)], 1), rtol=1e-12)
    assert logs["loss"][-1] < logs["loss"][0]
    for others, history, found in ranks(3).run(_trained, path, timeout=180):
        np.testing.assert_allclose(found, figures, rtol=1e-12)
        np.testing.assert_allclose(history["loss"], logs["loss"], rtol=1e-4)
        for one, other in zip(weights, others, strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-5)
