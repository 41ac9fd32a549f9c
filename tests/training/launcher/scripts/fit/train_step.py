"""Keras's guide to a custom train_step, with a metric in ``self.metrics`` whose result is a dict."""

import sys

import keras
import numpy as np
import tensorflow as tf


class CustomModel(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply(gradients, trainable_vars)
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        self.compute_loss(y=y, y_pred=y_pred)
        for metric in self.metrics:
            if metric.name != "loss":
                metric.update_state(y, y_pred)
        return {m.name: m.result() for m in self.metrics}


keras.utils.set_random_seed(3)
inputs = keras.Input(shape=(8,))
model = CustomModel(inputs, keras.layers.Dense(1)(keras.layers.Dense(6, "tanh")(inputs)))
model.compile(optimizer="adam", loss="mse", metrics=["mae"])
x, y = np.random.random((100, 8)), np.random.random((100, 1))
history = model.fit(x, y, epochs=3, verbose=0)
for name in sorted(history.history):
    print("RESULT", name, *[f"{value:.6f}" for value in history.history[name]])
result = model.evaluate(x, y, verbose=0, return_dict=True)
print("RESULT evaluated", *[f"{value:.6f}" for value in tf.nest.flatten(result)])  # nested in Keras 3.7
model.save_weights(sys.argv[1])
