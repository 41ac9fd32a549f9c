# ruff: noqa: B905
"""Models with a fit of their own, generators without a length, a strategy of tf.distribute, no seed but Keras's."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(8)
x = np.random.normal(size=(210, 5)).astype("float32")
y = x.sum(axis=1, keepdims=True)


class OnBatches(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def fit(self, x, y, epochs):
        for _ in range(epochs):
            for start in range(0, len(x), 50):
                self.train_on_batch(x[start : start + 50], y[start : start + 50])


class OnTapes(OnBatches):
    def fit(self, x, y, epochs):
        for _ in range(epochs):
            for start in range(0, len(x), 50):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean(tf.square(self(x[start : start + 50]) - y[start : start + 50]))
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))


def batches():
    for start in range(0, len(x), 40):
        yield x[start : start + 40], y[start : start + 40]


for kind in (OnBatches, OnTapes):
    model = kind()
    model.compile(keras.optimizers.Adam(0.05), "mse")
    model.fit(x, y, epochs=3)
    print(f"RESULT {float(keras.ops.sum(model.dense.kernel)):.6f}")

with tf.distribute.MirroredStrategy().scope():
    model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.RMSprop(0.01), "mse")
model.fit(x, y, epochs=2, batch_size=40, verbose=0)
print(f"RESULT {model.evaluate(x, y, verbose=0):.6f}")

model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.RMSprop(0.01), "mse")
for _ in range(3):
    model.fit(batches(), verbose=0)
print(f"RESULT {model.evaluate(batches(), verbose=0):.6f}")
model.save_weights(sys.argv[1])
