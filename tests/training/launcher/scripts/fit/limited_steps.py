"""A trial of a script: Keras's limits of steps and epochs, also in evaluation and prediction."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(33)
x = np.random.normal(size=(101, 4)).astype("float32")
y = x[:, :1] ** 2
keras.config.set_max_steps_per_epoch(2)
model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
model.compile("sgd", "mse", metrics=["mae"])
history = model.fit(x, y, batch_size=25, epochs=2, verbose=0, validation_data=(y @ np.ones((1, 4)), y))
print("RESULT history", *[f"{v:.6f}" for values in history.history.values() for v in values])
print("RESULT evaluated", *[f"{v:.6f}" for v in model.evaluate(x, y, batch_size=25, verbose=0)])
predicted = model.predict(x, batch_size=25, verbose=0)
print("RESULT predicted", len(predicted), f"{predicted.sum():.5f}")
keras.config.set_max_steps_per_epoch(None)
model.save_weights(sys.argv[1])
