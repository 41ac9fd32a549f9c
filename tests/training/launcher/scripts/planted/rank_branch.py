"""A loss that depends on the rank, so that one process has no such weights."""

import sys

import keras
import numpy as np
from keras import ops

import matex_data as md

factor = 1.0 if md.training.world().rank == 0 else 0.5


def loss(y_true, y_pred):
    return factor * ops.mean(ops.square(y_true - y_pred), axis=-1)


keras.utils.set_random_seed(8)
x = np.random.normal(size=(60, 4)).astype("float32")
model = keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), loss)
model.fit(x, x[:, :1], batch_size=12, epochs=2, verbose=0)
print("RESULT kernel", *[f"{v:.6f}" for v in model.layers[1].kernel.numpy().ravel()])
model.save_weights(sys.argv[1])
