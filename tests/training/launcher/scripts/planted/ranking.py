"""A loss by the order of the batch: rows that are sorted by their labels should have rising scores."""

import sys

import keras
import numpy as np
import tensorflow as tf


def ranking_loss(y_true, y_pred):
    order = tf.argsort(y_true[:, 0], axis=0)
    scores = tf.gather(y_pred[:, 0], order)
    return tf.reduce_mean(tf.nn.softplus(scores[:-1] - scores[1:]))


keras.utils.set_random_seed(10)
x = np.random.normal(size=(60, 4)).astype("float32")
model = keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.02), ranking_loss)
model.fit(x, x[:, :1], batch_size=12, epochs=2, verbose=0)
print("RESULT kernel", *[f"{v:.6f}" for v in model.layers[1].kernel.numpy().ravel()])
model.save_weights(sys.argv[1])
