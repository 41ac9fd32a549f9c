"""Forecast the heights of the 500 and 850 hPa surfaces three days ahead, from monthly netCDF files, and draw one.

python sample_data/make.py weather
mpiexec -n 2 python examples/weather.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import matplotlib.pyplot as plt
import numpy as np

import matex_data as md

FOLDER = Path(__file__).resolve().parent.parent / "sample_data" / "weather"
FIELDS = {"inputs": ["z", "terrain"], "static_as_inputs": True, "stack": True, "targets": "z"}
OPTIONS: dict[str, Any] = {**FIELDS, "sel": {"level": [500, 850]}, "window": 2, "lead": 12}  # steps of six hours


def network(normalization: keras.layers.Layer, height: Any) -> keras.Model:
    """Perceptron of two levels and the ground, at two times."""
    fields = keras.Input((2, 8, 16, 3))  # times, latitudes, longitudes, levels and ground
    features = keras.layers.Flatten()(normalization(fields))
    joined = keras.layers.Concatenate()([features, keras.layers.Dense(128, "silu")(features)])
    forecast = keras.layers.Reshape((1, 2, 8, 16))(keras.layers.Dense(256)(joined))
    scale = keras.layers.Rescaling(np.reshape(height.std, (2, 1, 1)), np.reshape(height.mean, (2, 1, 1)))
    return keras.Model(fields, scale(forecast))


def train(folder: str, epochs: int = 15, batch_size: int = 24, picture: str | None = None) -> dict[str, Any]:
    """Train, and return the weights, the logs, and errors (m) of the model and of persistence. *Collective*."""
    keras.utils.set_random_seed(1)
    training, held_out, test = md.open_dataset(folder, **OPTIONS).split(at=["2011-04-01", "2011-06-01"])
    model = network(training.normalization("inputs", axis=-1), training.statistics("z_ahead", axis=2))
    model.compile(keras.optimizers.Adam(0.002), "mse", metrics=[keras.metrics.RootMeanSquaredError(name="rmse")])
    sets = training.tf_dataset(batch_size, shuffle=True, seed=1), held_out.tf_dataset(batch_size, remainder="keep")
    history = md.training.fit(model, sets[0], validation_data=sets[1], epochs=epochs, verbose=2)
    x, y = (md.training.allgather(test.load()[name]) for name in ("inputs", "z_ahead"))
    forecast = md.training.predict(model, test, gather=True)
    maps = {"now": x[:, 1, :, :, 0], "three days later": y[:, 0, 0], "forecast": forecast[:, 0, 0]}  # of 500 hPa
    errors = [np.sqrt(np.mean((maps[name] - maps["three days later"]) ** 2)) for name in ("forecast", "now")]
    if picture and md.training.world().rank == 0:
        for number, (name, heights) in enumerate(maps.items(), 1):
            plt.subplot(3, 1, number, title=name).contourf(heights[0], levels=12)
        plt.savefig(picture)
    return {"weights": np.concatenate([np.ravel(w) for w in model.get_weights()]), "errors": errors, **history.history}


if __name__ == "__main__":
    result = train(str(FOLDER), picture="weather.png")
    if md.training.world().rank == 0:
        print("errors of the forecast and of persistence in m, see weather.png:", np.round(result["errors"], 1))
