"""An input that is one number for the whole batch, beside the rows."""

import sys

import keras
import numpy as np
import tensorflow as tf


class Scaled(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        x, temperature = inputs
        return self.dense(x) * temperature


keras.utils.set_random_seed(33)
x = np.random.normal(size=(63, 4)).astype("float32")
temperature = np.float32(0.7)
data = tf.data.Dataset.from_tensor_slices((x, x[:, :2])).batch(16)
data = data.map(lambda x, y: ((x, temperature), y))
model = Scaled()
model.compile(keras.optimizers.SGD(0.1), "mse")
history = model.fit(data, epochs=3, verbose=0)
print("RESULT history", *[f"{v:.6f}" for v in history.history["loss"]])
print("RESULT predicted", *[f"{v:.6f}" for v in model.predict(data, verbose=0).ravel()[:8]])
model.save_weights(sys.argv[1])
