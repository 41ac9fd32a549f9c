"""Eager steps, with a metric that computes with NumPy."""

import sys

import keras
import numpy as np


def largest_error(y_true, y_pred):
    return np.abs(np.asarray(y_true) - np.asarray(y_pred)).max(axis=-1)


keras.utils.set_random_seed(6)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(2)])
model.compile("sgd", "mse", metrics=[largest_error], run_eagerly=True)
x = np.random.normal(size=(60, 8)).astype("float32")
history = model.fit(x, x[:, :2], batch_size=24, epochs=2, verbose=0).history
for name in sorted(history):
    print("RESULT", name, *[f"{value:.6f}" for value in history[name]])
model.save_weights(sys.argv[1])
