"""Forecast the height of the 500 hPa surface three days ahead, from monthly netCDF files, and draw a forecast.

python sample_data/make.py weather
mpiexec -n 2 python examples/weather.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import matplotlib.pyplot as plt
import numpy as np
from mpi4py import MPI

import matex_data as md

ROOT = Path(__file__).resolve().parent.parent


def network(normalization: keras.layers.Layer, terrain: Any, mean: float, std: float) -> keras.Model:
    """Perceptron of two levels at two times, and of the static height of the ground."""
    heights = keras.Input((2, 2, 8, 16))  # times, levels, latitudes, longitudes
    features = keras.layers.Flatten()(normalization(heights))
    ground = keras.ops.zeros_like(features[:, :128]) + np.ravel(terrain) / 1000
    hidden = keras.layers.Dense(128, "silu")(keras.layers.Concatenate()([features, ground]))
    forecast = keras.layers.Dense(128)(keras.layers.Concatenate()([features, hidden]))
    return keras.Model(heights, keras.layers.Rescaling(std, mean)(keras.layers.Reshape((1, 8, 16))(forecast)))


def train(folder: str, epochs: int = 15, batch_size: int = 24, picture: str | None = None) -> dict[str, Any]:
    """Train, and return the weights, the logs, and errors (m) of the model and of persistence. *Collective*."""
    keras.utils.set_random_seed(1)
    levels = {"inputs": ["z500", "z850"], "stack": "first"}
    data = md.open_dataset(folder, **levels, targets="z500", window=2, lead=12)  # 12 steps of six hours
    training, held_out, test = data.split(at=["2011-04-01", "2011-06-01"])
    height = training.statistics("z500_ahead")
    model = network(training.normalization("inputs", axis=2), data.static["terrain"], height.mean, height.std)
    model.compile(keras.optimizers.Adam(0.002), "mse", metrics=[keras.metrics.RootMeanSquaredError(name="rmse")])
    sets = training.tf_dataset(batch_size, shuffle=True, seed=1), held_out.tf_dataset(batch_size, remainder="keep")
    history = md.training.fit(model, sets[0], validation_data=sets[1], epochs=epochs, verbose=2)
    x, y = (test.load()[name] for name in ("inputs", "z500_ahead"))
    maps = {"now": x[:, 1, 0], "three days later": y[:, 0], "forecast": model.predict(x, verbose=0)[:, 0]}
    sums = [np.sum((maps[name] - maps["three days later"]) ** 2) for name in ("forecast", "now")]
    errors = np.sqrt(np.array(MPI.COMM_WORLD.allreduce(np.array(sums))) / (len(test) * 128))
    if picture and MPI.COMM_WORLD.rank == 0:
        _, axes = plt.subplots(3, 1, layout="constrained")
        for axis, (name, heights) in zip(axes, maps.items(), strict=True):
            axis.contourf(heights[0], levels=12)
            axis.set_title(name)
        plt.savefig(picture)
    return {"weights": np.concatenate([np.ravel(w) for w in model.get_weights()]), "errors": errors, **history.history}


if __name__ == "__main__":
    found = train(str(ROOT / "sample_data" / "weather"), picture="weather.png")
    if MPI.COMM_WORLD.rank == 0:
        print("errors of the forecast and of persistence in m, see weather.png:", found["errors"].round(1))
