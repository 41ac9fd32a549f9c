"""Keras's example of a siamese network: two inputs, shared weights, a contrastive loss of each pair."""

import sys

import keras
import numpy as np
from keras import layers, ops


class Distance(layers.Layer):
    def call(self, vectors):
        x, y = vectors
        return ops.sqrt(ops.maximum(ops.sum(ops.square(x - y), axis=1, keepdims=True), 1e-6))


def contrastive(margin=1.0):
    def contrastive_loss(y_true, y_pred):
        return ops.mean((1 - y_true) * ops.square(y_pred) + y_true * ops.square(ops.maximum(margin - y_pred, 0)))

    return contrastive_loss


keras.utils.set_random_seed(7)
left, right = np.random.normal(size=(2, 88, 10)).astype("float32")
y = (np.abs(left[:, :1] - right[:, :1]) > 1).astype("float32")

inputs = keras.Input((10,))
embedding = keras.Model(inputs, layers.Dense(4, activation="tanh")(layers.Dense(8, activation="tanh")(inputs)))
first, second = keras.Input((10,)), keras.Input((10,))
outputs = layers.Dense(1, activation="sigmoid")(Distance()([embedding(first), embedding(second)]))
siamese = keras.Model([first, second], outputs)
siamese.compile(loss=contrastive(margin=1), optimizer=keras.optimizers.RMSprop(0.005), metrics=["accuracy"])
history = siamese.fit(
    [left[:64], right[:64]],
    y[:64],
    validation_data=([left[64:], right[64:]], y[64:]),
    batch_size=16,
    epochs=3,
    verbose=0,
)
for name in ("loss", "val_loss", "val_accuracy"):
    print("RESULT", name, *[f"{value:.6f}" for value in history.history[name]])
siamese.save_weights(sys.argv[1])
