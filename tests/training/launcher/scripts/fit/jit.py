"""A model compiled with jit_compile=True."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(22)
x = np.random.normal(size=(64, 5)).astype("float32")
model = keras.Sequential([keras.layers.Dense(6, activation="gelu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], jit_compile=True)
history = model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0)
print("RESULT history", *[f"{v:.6f}" for v in (*history.history["loss"], *history.history["mae"])])
print("RESULT evaluate", *[f"{v:.6f}" for v in model.evaluate(x, x[:, :1], verbose=0)])
model.save_weights(sys.argv[1])
