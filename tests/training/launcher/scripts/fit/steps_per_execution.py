"""Training with steps_per_execution."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(23)
x = np.random.normal(size=(115, 5)).astype("float32")
y = x[:, :1] * 3 - 1
model = keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True), "mse", steps_per_execution=4)
history = model.fit(x, y, batch_size=12, epochs=2, validation_split=0.2, verbose=0)
for name in ("loss", "val_loss"):
    print("RESULT", name, *[f"{v:.6f}" for v in history.history[name]])
model.save_weights(sys.argv[1])
