"""A loss with sum reduction, and one with a mean over sample weights."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(34)
x = np.random.normal(size=(70, 4)).astype("float32")
y = x[:, :1] - x[:, 1:2]
weights = np.random.random(70).astype("float32")
model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.002), keras.losses.MeanSquaredError(reduction="sum"))
model.fit(x, y, batch_size=16, epochs=2, verbose=0)
print("RESULT kernel", *[f"{v:.6f}" for v in model.layers[1].kernel.numpy().ravel()])
model.compile(keras.optimizers.SGD(0.05), keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
model.fit(x, y, sample_weight=weights, batch_size=16, epochs=2, verbose=0)
model.save_weights(sys.argv[1])
