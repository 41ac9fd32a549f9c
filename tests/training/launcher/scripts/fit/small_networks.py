"""Imported by ``local_module.py``."""

import keras


class Residual(keras.layers.Layer):
    def build(self, shape):
        self.dense = keras.layers.Dense(shape[-1], activation="tanh")
        self.dense.build(shape)

    def call(self, x):
        return x + self.dense(x)


def make(depth):
    return keras.Sequential([*[Residual() for _ in range(depth)], keras.layers.Dense(1)])
