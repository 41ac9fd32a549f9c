"""Two zipped sharded datasets of different batch sizes, each of which splits equally."""

import sys

import keras
import numpy as np
import tensorflow as tf

import matex_data as md

keras.utils.set_random_seed(7)
x = np.random.normal(size=(120, 4)).astype("float32")
labelled = tf.data.Dataset.from_tensor_slices((x[:48], x[:48, :1])).batch(12)
unlabelled = tf.data.Dataset.from_tensor_slices(x[48:]).batch(18)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.02)


@tf.function
def train_step(inputs, targets, others):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
        loss += 0.5 * tf.reduce_mean(tf.abs(model(others, training=True) - model(others + 0.1, training=True)))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


steps = 0
for _ in range(3):
    for (inputs, targets), others in zip(md.training.shard(labelled), md.training.shard(unlabelled), strict=True):
        train_step(inputs, targets, others)
        steps += 1
print("RESULT steps", steps)
model.save_weights(sys.argv[1])
