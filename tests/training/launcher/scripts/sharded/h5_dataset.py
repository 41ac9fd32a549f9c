"""A loop over a dataset of this package, which is sharded already."""

import sys

import h5py
import keras
import numpy as np
import tensorflow as tf

import matex_data as md

keras.utils.set_random_seed(13)
x = np.random.normal(size=(64, 4)).astype("float32")
if md.training.world().rank == 0:
    with h5py.File("rows.h5", "w") as file:
        file["x"], file["y"] = x, x[:, :1] * 3
data = md.open_dataset("rows.h5", inputs="x", targets="y")
batches = data.tf_dataset(12, shuffle=True, seed=13, remainder="keep")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.02)


@tf.function
def train_step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


steps = 0
for _ in range(3):
    for inputs, targets in batches:
        train_step(inputs, targets)
        steps += 1
print("RESULT steps", steps, len(data))
model.save_weights(sys.argv[1])
