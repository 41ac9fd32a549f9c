"""Mixed precision: 16 bits in layers, and loss scaling."""

import sys

import keras
import numpy as np

keras.mixed_precision.set_global_policy("mixed_float16")
keras.utils.set_random_seed(21)
x = np.random.normal(size=(72, 6)).astype("float32")
y = x[:, :1] + 0.5
model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1, dtype="float32")])
model.compile(keras.optimizers.SGD(0.05), "mse")
history = model.fit(x, y, batch_size=24, epochs=3, verbose=0)
print("RESULT history", *[f"{v:.6f}" for v in history.history["loss"]])
print("RESULT scale", float(model.optimizer.dynamic_scale.numpy()))
model.save_weights(sys.argv[1])
