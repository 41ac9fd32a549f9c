# ruff: noqa: B905
"""Gradients added up over batches of several sizes before each step."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(7)
x = np.random.normal(size=(75, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, 1:2] ** 2)).batch(16)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
for epoch in range(4):
    added, rows = [tf.zeros_like(v) for v in model.trainable_variables], 0
    for step, (inputs, targets) in enumerate(data):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets)) * len(inputs)
        gradients = tape.gradient(loss, model.trainable_variables)
        added, rows = [a + g for a, g in zip(added, gradients)], rows + len(inputs)
        if step % 2 == 1 or step == len(data) - 1:
            optimizer.apply_gradients(zip([a / rows for a in added], model.trainable_variables))
            added, rows = [tf.zeros_like(v) for v in model.trainable_variables], 0
    print(f"RESULT loss {epoch} {float(loss):.6f}")
model.save_weights(sys.argv[1])
