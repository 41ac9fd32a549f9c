# ruff: noqa: B905
"""Gradients clipped by TensorFlow's function, and their norm printed."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(17)
x = np.random.normal(size=(70, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] * 4)).batch(16)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.2)


@tf.function
def train_step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
    gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.5)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss, norm


for epoch in range(3):
    for inputs, targets in data:
        values = train_step(inputs, targets)
    print(f"RESULT values {epoch}", *[f"{float(value):.6f}" for value in values])
model.save_weights(sys.argv[1])
