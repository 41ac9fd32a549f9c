"""A tf.function with the loop over the dataset."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(13)
x = np.random.normal(size=(70, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] * 2)).batch(16)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.01)
optimizer.build(model.trainable_variables)


@tf.function
def train_epoch(dataset):
    total = 0.0
    for inputs, targets in dataset:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        total += loss
    return total


for epoch in range(3):
    print(f"RESULT total {epoch} {float(train_epoch(data)):.6f}")
model.save_weights(sys.argv[1])
