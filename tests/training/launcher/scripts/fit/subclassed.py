"""A subclassed model with layers in a list, fit on arrays, then evaluated and used to predict."""

import sys

import keras
import numpy as np


class Network(keras.Model):
    def __init__(self, units):
        super().__init__()
        self.hidden = [keras.layers.Dense(n, activation="relu") for n in units]
        self.norm = keras.layers.LayerNormalization()
        self.head = keras.layers.Dense(1)

    def call(self, inputs, training=False):
        x = inputs
        for layer in self.hidden:
            x = layer(x)
        return self.head(self.norm(x))


keras.utils.set_random_seed(2)
x = np.random.normal(size=(101, 6)).astype("float32")
y = np.sin(x.sum(axis=1))
model = Network([12, 8])
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="huber", metrics=["mae", "mse"])
history = model.fit(x, y, batch_size=25, epochs=3, verbose=2)
print("RESULT history", *[f"{value:.6f}" for value in history.history["loss"]])
print("RESULT evaluate", *[f"{value:.6f}" for value in model.evaluate(x[:33], y[:33], batch_size=10, verbose=0)])
print("RESULT predict", *[f"{value:.6f}" for value in model.predict(x[:7], batch_size=4, verbose=0).ravel()])
model.save_weights(sys.argv[1])
