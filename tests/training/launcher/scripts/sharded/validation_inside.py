"""Validation on sharded batches of another size between the gradient of a batch and its step."""

import sys

import keras
import numpy as np
import tensorflow as tf

import matex_data as md

keras.utils.set_random_seed(6)
x = np.random.normal(size=(98, 4)).astype("float32")
y = x[:, :1] * x[:, 1:2]
train = tf.data.Dataset.from_tensor_slices((x[:65], y[:65])).batch(20)
valid = tf.data.Dataset.from_tensor_slices((x[65:], y[65:])).batch(5)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.02)
for epoch in range(2):
    for step, (inputs, targets) in enumerate(md.training.shard(train)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
        gradients = tape.gradient(loss, model.trainable_variables)
        if step % 2 == 0:
            errors = [tf.reduce_sum(tf.square(model(x, training=False) - y)) for x, y in md.training.shard(valid)]
            (total,) = md.training.allreduce([tf.add_n(errors)], op="sum")
            print(f"RESULT valid {epoch} {step} {float(total):.6f}")
        optimizer.apply(gradients, model.trainable_variables)
model.save_weights(sys.argv[1])
