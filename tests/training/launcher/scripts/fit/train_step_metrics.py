# ruff: noqa: B905
"""A train_step with metrics of its own, made from a property, and a value beside them in its dict."""

import sys

import keras
import numpy as np
import tensorflow as tf

loss_fn = keras.losses.MeanSquaredError()


class CustomModel(keras.Model):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.BinaryAccuracy(name="accuracy")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = loss_fn(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        self.accuracy.update_state(y, y_pred)
        norm = tf.linalg.global_norm([v.value for v in self.trainable_variables])
        return {"loss": self.loss_tracker.result(), "accuracy": self.accuracy.result(), "norm": norm}

    @property
    def metrics(self):
        return [self.loss_tracker, self.accuracy]


keras.utils.set_random_seed(4)
inputs = keras.Input(shape=(8,))
model = CustomModel(inputs, keras.layers.Dense(1, "sigmoid")(inputs))
model.compile(optimizer=keras.optimizers.Adam(0.02))
x = np.random.normal(size=(97, 8)).astype("float32")
y = (x[:, :2].sum(axis=1, keepdims=True) > 0).astype("float32")
history = model.fit(x, y, epochs=4, batch_size=30, verbose=0)
for name in ("loss", "accuracy", "norm"):
    print("RESULT", name, *[f"{float(value):.6f}" for value in history.history[name]])
model.save_weights(sys.argv[1])
