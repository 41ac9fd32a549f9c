# ruff: noqa: B905
"""Gradients clipped by TensorFlow's functions: one process clips those of the whole batch."""

import sys

import keras
import numpy as np
import tensorflow as tf

import matex_data as md

keras.utils.set_random_seed(8)
x = np.random.normal(size=(70, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] * 4)).batch(16)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.2)


@tf.function
def train_step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
    gradients, norm = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.5)
    gradients = [tf.clip_by_value(g, -0.2, 0.2) for g in gradients]
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return norm


for epoch in range(3):
    for inputs, targets in md.training.shard(data):
        norm = train_step(inputs, targets)
    print(f"RESULT norm {epoch} {float(norm):.6f}")
model.save_weights(sys.argv[1])
