"""Many ways in one script: train_on_batch, a loop over arrays, two optimizers, mixed precision, fit again."""

import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(6)
x = np.random.normal(size=(120, 4)).astype("float32")
y = (x[:, :1] * 2 + 1).astype("float32")

model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
for start in range(0, 120, 33):
    result = model.train_on_batch(x[start : start + 33], y[start : start + 33], return_dict=True)
print(f"RESULT {result['loss']:.6f} {result['mae']:.6f}")
model.fit(x, y, batch_size=32, epochs=1, verbose=0)
model.fit(x, y, batch_size=30, epochs=1, verbose=0)
model.save(Path(sys.argv[1]).parent / "model.keras")
again = keras.models.load_model(Path(sys.argv[1]).parent / "model.keras")
print(f"RESULT {again.evaluate(x, y, verbose=0)[0]:.6f}")

weight, shift = tf.Variable(0.5), tf.Variable(0.0)
first, second = keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1)
for start in range(0, 120, 40):
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_mean(tf.square(weight * x[start : start + 40, 0] + shift - y[start : start + 40, 0]))
    first.apply_gradients([(tape.gradient(loss, weight), weight)])
    second.apply_gradients([(tape.gradient(loss, shift), shift)])
print(f"RESULT {float(weight):.6f} {float(shift):.6f}")

keras.mixed_precision.set_global_policy("mixed_float16")
small = keras.Sequential([keras.layers.Dense(1)])
small.compile("sgd", "mse")
small.fit(x, y, batch_size=40, epochs=2, verbose=0)
print(f"RESULT {float(small.optimizer.dynamic_scale.numpy()):.1f}")
model.save_weights(sys.argv[1])
