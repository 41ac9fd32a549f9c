"""A validation loop over sharded batches after every epoch, with sums over the ranks."""

import sys

import keras
import numpy as np
import tensorflow as tf

import matex_data as md

keras.utils.set_random_seed(5)
x = np.random.normal(size=(95, 4)).astype("float32")
y = np.abs(x[:, :1])
train = tf.data.Dataset.from_tensor_slices((x[:65], y[:65])).batch(20)
valid = tf.data.Dataset.from_tensor_slices((x[65:], y[65:])).batch(10)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.02)


@tf.function
def train_step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


for epoch in range(3):
    for inputs, targets in md.training.shard(train):
        train_step(inputs, targets)
    total, rows = tf.constant(0.0), tf.constant(0.0)
    for inputs, targets in md.training.shard(valid):
        total += tf.reduce_sum(tf.square(model(inputs, training=False) - targets))
        rows += tf.cast(len(inputs), tf.float32)
    total, rows = md.training.allreduce([total, rows], op="sum")
    print(f"RESULT valid {epoch} {float(rows):.0f} {float(total / rows):.6f}")
model.save_weights(sys.argv[1])
