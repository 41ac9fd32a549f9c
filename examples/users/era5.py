"""Forecast temperatures a day ahead from monthly files: mpiexec -n 2 python examples/users/era5.py FOLDER."""

import sys

import keras
import numpy as np

import matex_data as md

keras.utils.set_random_seed(1)
data = md.open_dataset(f"{sys.argv[1]}/t2m_*.nc", inputs="t2m", targets="t2m", window=4, lead=4)
train, test = data.split(at=[np.datetime64("2019-10-01")])
mean, deviation = train.statistics("t2m").mean, train.statistics("t2m").std
fields = keras.Input((4, 5, 8))
change = keras.layers.Dense(40)(
    keras.layers.Flatten()(keras.layers.Rescaling(1 / deviation, -mean / deviation)(fields))
)
model = keras.Model(fields, fields[:, 3:] + keras.layers.Reshape((1, 5, 8))(change))
model.compile(keras.optimizers.Adam(0.002), "mse")
md.training.fit(model, train, batch_size=32, epochs=15, verbose=0)
forecast = md.training.predict(model, test, gather=True)
now, later = (md.training.allgather(test.load()[name]) for name in ("t2m", "t2m_ahead"))
error, persistence = (np.sqrt(np.mean((guess - later) ** 2)) for guess in (forecast, now[:, 3:]))
if md.training.world().rank == 0:
    print(f"RESULT error {error:.3f} persistence {persistence:.3f}")
