"""A loss with sum reduction that divides by a constant in its ``__call__``."""

import sys

import keras
import numpy as np


class PerBatch(keras.losses.Loss):
    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y_true, y_pred):
        return keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)

    def __call__(self, y_true, y_pred, sample_weight=None):
        return keras.ops.sqrt(super().__call__(y_true, y_pred, sample_weight) / 12)


keras.utils.set_random_seed(2)
x = np.random.normal(size=(60, 4)).astype("float32")
model = keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05), PerBatch())
model.fit(x, x[:, :1] * 2, batch_size=12, epochs=2, verbose=0)
print("RESULT kernel", *[f"{v:.6f}" for v in model.layers[1].kernel.numpy().ravel()])
model.save_weights(sys.argv[1])
