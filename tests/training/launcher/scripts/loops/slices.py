"""Slices of arrays in a custom order."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(10)
x = np.random.normal(size=(85, 4)).astype("float32")
y = np.maximum(x[:, :1], 0)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.02)
mse = keras.losses.MeanSquaredError()
for epoch in range(3):
    order, losses = np.random.permutation(len(x)), []
    for start in range(0, len(x), 20):
        rows = order[start : start + 20]
        with tf.GradientTape() as tape:
            loss = mse(y[rows], model(x[rows], training=True))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        losses.append(loss.numpy())
    print(f"RESULT loss {epoch} {np.mean(losses):.6f}")
model.save_weights(sys.argv[1])
