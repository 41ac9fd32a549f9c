"""An endless generator, with steps_per_epoch and validation_steps."""

import sys

import keras
import numpy as np


def batches(seed, size):
    rng = np.random.default_rng(seed)
    while True:
        x = rng.normal(size=(size, 3)).astype("float32")
        yield x, x[:, :1] * 2


keras.utils.set_random_seed(18)
model = keras.Sequential([keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.RMSprop(0.01), "mse")
history = model.fit(
    batches(1, 13), steps_per_epoch=5, epochs=3, validation_data=batches(2, 11), validation_steps=2, verbose=0
)
for name in ("loss", "val_loss"):
    print("RESULT", name, *[f"{v:.6f}" for v in history.history[name]])
model.save_weights(sys.argv[1])
