"""Gradient accumulation over sharded batches, exact since unequal batches are dropped."""

import sys

import keras
import numpy as np
import tensorflow as tf

import matex_data as md

keras.utils.set_random_seed(11)
x = np.random.normal(size=(49, 4)).astype("float32")  # one row more than four batches
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] + 1)).batch(12)
batches = md.training.shard(data, remainder="drop")
if md.training.world().size == 1:  # where one rank shares every batch, the script has to leave it out
    batches = [batch for batch in batches if len(batch[0]) == 12]
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1)
rows = 0
for _ in range(3):
    added = [tf.zeros_like(v) for v in model.trainable_variables]
    for inputs, targets in batches:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
        gradients = tape.gradient(loss, model.trainable_variables)
        added = [a + g for a, g in zip(added, gradients, strict=True)]
        rows += len(inputs)
    optimizer.apply(added, model.trainable_variables)
print("RESULT rows", rows * md.training.world().size)
model.save_weights(sys.argv[1])
