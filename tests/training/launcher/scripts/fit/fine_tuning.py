"""Keras's guide to transfer learning: a new head on a frozen base, then all of it at a low rate."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(32)
x = np.random.normal(size=(80, 6)).astype("float32")
y = (x[:, 0] > x[:, 1]).astype("float32")
base = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(5, "relu")], name="base")
base.trainable = False
inputs = keras.Input((6,))
model = keras.Model(inputs, keras.layers.Dense(1)(base(inputs, training=False)))
loss = keras.losses.BinaryCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.02), loss, metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)])
first = model.fit(x, y, epochs=2, batch_size=20, verbose=0)
base.trainable = True
model.compile(keras.optimizers.Adam(0.001), loss, metrics=[keras.metrics.BinaryAccuracy(threshold=0.0)])
second = model.fit(x, y, epochs=2, batch_size=30, verbose=0)
print("RESULT first", *[f"{v:.6f}" for v in first.history["loss"]])
print("RESULT second", *[f"{v:.6f}" for v in (*second.history["loss"], *second.history["binary_accuracy"])])
print("RESULT frozen", len(model.trainable_weights))
model.save_weights(sys.argv[1])
