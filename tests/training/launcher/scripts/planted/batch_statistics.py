"""A layer that normalizes by the mean and the deviation of the batch."""

import sys

import keras
import numpy as np
from keras import ops


class Standardize(keras.layers.Layer):
    def call(self, x):
        return (x - ops.mean(x, axis=0)) / (ops.std(x, axis=0) + 1e-3)


keras.utils.set_random_seed(6)
x = np.random.normal(size=(60, 4)).astype("float32")
layers = [keras.layers.Dense(6, activation="tanh"), Standardize(), keras.layers.Dense(1)]
model = keras.Sequential([keras.Input((4,)), *layers])
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(x, x[:, :1], batch_size=12, epochs=2, verbose=0)
print("RESULT kernel", *[f"{v:.6f}" for v in layers[0].kernel.numpy().ravel()[:6]])
model.save_weights(sys.argv[1])
