# ruff: noqa: B905
"""Steps without tf.function, with a last batch of other size, and dicts as elements."""

import sys

import keras
import numpy as np
import tensorflow as tf

import matex_data as md

keras.utils.set_random_seed(4)
x = np.random.normal(size=(53, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices({"image": x, "label": (x[:, 0] > 0).astype("float32")}).batch(12)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)])
optimizer, loss_fn = keras.optimizers.RMSprop(0.01), keras.losses.BinaryCrossentropy(from_logits=True)
for _ in range(3):
    for batch in md.training.shard(data):
        with tf.GradientTape() as tape:
            loss = loss_fn(batch["label"][:, None], model(batch["image"], training=True))
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_weights))
print("RESULT steps", int(optimizer.iterations.numpy()))
model.save_weights(sys.argv[1])
