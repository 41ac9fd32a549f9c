"""Weights of classes and of samples, in fit and in evaluate, and a metric that is weighted."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(16)
x = np.random.normal(size=(84, 5)).astype("float32")
y = (x[:, 0] > 0.8).astype("int32")
weights = np.random.random(84).astype("float32")
model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1, activation="sigmoid")])
model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"], weighted_metrics=["mae"])
history = model.fit(x, y, batch_size=22, epochs=2, class_weight={0: 0.5, 1: 3.0}, verbose=0)
print("RESULT class_weight", *[f"{v:.6f}" for v in history.history["loss"]])
history = model.fit(x, y, batch_size=22, epochs=2, sample_weight=weights, verbose=0)
print("RESULT sample_weight", *[f"{v:.6f}" for v in history.history["loss"]])
data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(22)
print("RESULT evaluate", *[f"{v:.6f}" for v in model.evaluate(data, verbose=0)])
model.save_weights(sys.argv[1])
