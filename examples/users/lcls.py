"""Find hits among the shots of runs: mpiexec -n 2 python examples/users/lcls.py FOLDER."""

import sys

import keras
import numpy as np

import matex_data as md

folder = sys.argv[1]
keras.utils.set_random_seed(1)
shots = md.open_dataset(
    f"{folder}/run*.h5",
    inputs="jungfrau/calib",
    targets="hit",
    where="ebeam/photonEnergy > 9450",
    absent={"gmd/energy": np.nan},  # the detector was off in a run
)
train, test = shots.split(0.8, 0.2, seed=1)
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((16, 16)),
        train.normalization("jungfrau/calib"),
        layers.Flatten(),
        layers.Dense(16, "tanh"),
        layers.Dense(1, "sigmoid"),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "bce", metrics=["accuracy"])
md.training.fit(model, train, batch_size=32, epochs=6, verbose=0)
loss, accuracy = md.training.evaluate(model, test, batch_size=32, verbose=0)
md.training.predict(model, test, to=f"{folder}/hits.h5", fields=["event_time", "gmd/energy"])
if md.training.world().rank == 0:
    print(f"RESULT accuracy {accuracy:.3f} loss {loss:.3f}")
