"""A metric as a loss: one minus the soft F1 of the batch, a ratio of sums."""

import sys

import keras
import numpy as np
from keras import ops


def soft_f1(y_true, y_pred):
    hits = ops.sum(y_true * y_pred, axis=0)
    f1 = 2 * hits / (ops.sum(y_true, axis=0) + ops.sum(y_pred, axis=0) + 1e-7)
    return 1 - ops.mean(f1)


keras.utils.set_random_seed(7)
x = np.random.normal(size=(60, 4)).astype("float32")
y = (x[:, :2] > 0.4).astype("float32")
model = keras.Sequential([keras.layers.Dense(6, activation="relu"), keras.layers.Dense(2, activation="sigmoid")])
model.compile(keras.optimizers.Adam(0.02), soft_f1)
model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
print("RESULT kernel", *[f"{v:.6f}" for v in model.layers[1].kernel.numpy().ravel()])
model.save_weights(sys.argv[1])
