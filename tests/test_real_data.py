"""Training on files of other projects: results on several ranks equal those of one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import open_dataset, training
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.ranks import Pools

pytestmark = needs_corpus


def _forecast(comm: MPI.Intracomm, path: str) -> tuple[list[float], list[Any]]:
    """Train a forecast of carbon dioxide columns six hours ahead, on a month of data."""
    import keras

    keras.utils.set_random_seed(1)
    data = open_dataset(path, inputs="tcco2", window=3, horizon=1, comm=comm)
    plain = open_dataset(path, inputs="tcco2", comm=comm)
    frames = keras.Input((3, 161, 320))
    known = keras.layers.Permute((2, 3, 1))(plain.normalization("tcco2", axis=None)(frames))
    hidden = keras.layers.Conv2D(4, 3, padding="same", activation="tanh")(known)
    change = keras.layers.Conv2D(1, 3, padding="same")(hidden)
    model = keras.Model(frames, keras.layers.Permute((3, 1, 2))(change))
    model.compile(keras.optimizers.Adam(3e-3), loss=_scaled(plain.statistics("tcco2")))
    batches = data.tf_dataset(4, shuffle=True, seed=1)
    history = training.fit(model, batches, epochs=2, comm=comm, verbose=0)
    return history.history["loss"], model.get_weights()


def _scaled(found: Any) -> Any:
    import keras

    mean, std = float(found.mean), float(found.std)
    return lambda truth, guess: keras.losses.mean_squared_error((truth - mean) / std, guess)


def test_forecast_the_next_step_of_a_field(ranks: Pools) -> None:
    path = str(CORPUS / "netcdf/iris/SMALL_total_column_co2.nc")
    [(alone, expected)] = ranks(1).run(_forecast, path, timeout=180)
    together = ranks(2).run(_forecast, path, timeout=180)
    assert alone[-1] < 0.9 * alone[0]
    for losses, weights in together:
        np.testing.assert_allclose(losses, alone, rtol=1e-3)
        for found, weight in zip(weights, expected, strict=True):
            np.testing.assert_allclose(found, weight, rtol=1e-3, atol=1e-5)
    for first, second in zip(together[0][1], together[1][1], strict=True):
        np.testing.assert_array_equal(first, second)


def _survivors(comm: MPI.Intracomm, path: str) -> tuple[list[float], list[Any], int]:
    """Train a classifier of living and dead characters of a comic, on numbers with gaps and on categories."""
    import keras

    keras.utils.set_random_seed(1)
    numbers, categories = ["APPEARANCES", "Year"], ["ALIGN", "SEX"]
    data = open_dataset(
        path,
        inputs=[*numbers, *categories],
        targets="ALIVE",
        dtype=dict.fromkeys([*categories, "ALIVE"], "category"),
        missing="drop",
        comm=comm,
    )
    inputs = {name: keras.Input((), name=name, dtype="float32") for name in numbers}
    inputs |= {name: keras.Input((), name=name, dtype="int32") for name in categories}
    parts = [data.normalization(name)(keras.layers.Reshape((1,))(inputs[name])) for name in numbers]
    for name in categories:
        count = len(data.schema[name].attributes["categories"]) + 1
        parts.append(keras.layers.Embedding(count, 3)(inputs[name] + 1))  # -1 stands for missing
    hidden = keras.layers.Dense(16, "relu")(keras.layers.Concatenate()(parts))
    model = keras.Model(inputs, keras.layers.Dense(3, "softmax")(hidden))
    model.compile("adam", "sparse_categorical_crossentropy")
    batches = data.tf_dataset(96, shuffle=True, seed=1).map(lambda x, y: (x, y + 1))
    history = training.fit(model, batches, epochs=2, comm=comm, verbose=0)
    return history.history["loss"], model.get_weights(), len(data)


@pytest.mark.slow  # test_text_table.py has this file on three ranks
def test_a_table_of_numbers_and_categories(ranks: Pools) -> None:
    path = str(CORPUS / "csv/fivethirtyeight/marvel-wikia-data.csv")
    [(alone, expected, rows)] = ranks(1).run(_survivors, path, timeout=180)
    assert 10_000 < rows < 16_376
    assert alone[-1] < 0.9 * alone[0]
    for losses, weights, _ in ranks(3).run(_survivors, path, timeout=180):
        np.testing.assert_allclose(losses, alone, rtol=1e-4)
        for found, weight in zip(weights, expected, strict=True):
            np.testing.assert_allclose(found, weight, rtol=2e-3, atol=1e-5)
