# ruff: noqa: B905
"""Weights that the script changes by hand, as in TensorFlow's guide to basic training loops."""

import sys

import numpy as np
import tensorflow as tf

rng = np.random.default_rng(14)
x = rng.normal(size=(80, 3)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x @ np.array([[3.0], [2.0], [-1.0]], "float32") + 0.5)).batch(30)


class MyModel(tf.Module):
    def __init__(self):
        super().__init__()
        self.w, self.b = tf.Variable(tf.ones((3, 1)) * 5.0), tf.Variable(0.0)

    def __call__(self, x):
        return x @ self.w + self.b


model = MyModel()
for epoch in range(4):
    for inputs, targets in data:
        with tf.GradientTape() as t:
            current_loss = tf.reduce_mean(tf.square(targets - model(inputs)))
        for variable, gradient in zip([model.w, model.b], t.gradient(current_loss, [model.w, model.b])):
            variable.assign_sub(0.1 * gradient)
    print(f"RESULT loss {epoch} {float(current_loss):.6f}")
np.savez(sys.argv[1] + ".npz", model.w.numpy(), model.b.numpy())
