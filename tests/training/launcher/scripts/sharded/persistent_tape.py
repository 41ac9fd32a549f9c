"""A persistent tape with two losses, two optimizers, and a gradient of a gradient."""

import sys

import keras
import numpy as np
import tensorflow as tf

import matex_data as md

keras.utils.set_random_seed(12)
x = np.random.normal(size=(60, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1], x[:, 1:2] ** 2)).batch(12)
inputs = keras.Input((4,))
hidden = keras.layers.Dense(6, activation="tanh")
first, second = keras.layers.Dense(1), keras.layers.Dense(1)
model = keras.Model(inputs, [first(hidden(inputs)), second(hidden(inputs))])
optimizers = keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.05)


@tf.function
def train_step(x, y, z):
    with tf.GradientTape(persistent=True) as tape:
        with tf.GradientTape() as inner:
            inner.watch(x)
            mine, its = model(x, training=True)
        slope = inner.gradient(mine, x)
        loss = tf.reduce_mean(tf.square(mine - y)) + 0.01 * tf.reduce_mean(tf.square(slope))
        other = tf.reduce_mean(tf.square(its - z))
    shared = [*hidden.trainable_variables, *first.trainable_variables]
    mine, its = tape.gradient(loss, shared), tape.gradient(other, second.trainable_variables)
    del tape
    optimizers[0].apply(mine, shared)
    optimizers[1].apply(its, second.trainable_variables)


for _ in range(3):
    for batch in md.training.shard(data):
        train_step(*batch)
print("RESULT iterations", *[int(optimizer.iterations.numpy()) for optimizer in optimizers])
model.save_weights(sys.argv[1])
