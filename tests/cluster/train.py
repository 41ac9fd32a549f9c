"""Keras script that knows nothing of ranks. Arguments: the file of its results, and a number of its job, if any."""

import os
import sys
import time
from pathlib import Path

import keras
import numpy as np


class Pause(keras.callbacks.Callback):
    """Let steps take a while, and tell how many there were."""

    def on_train_batch_end(self, batch, logs=None):
        time.sleep(float(os.environ.get("PAUSE", "0")))
        if "PROGRESS" in os.environ:
            with Path(os.environ["PROGRESS"]).open("a") as file:
                file.write(".")


keras.utils.set_random_seed(int(sys.argv[2]) if len(sys.argv) > 2 else 1)
x = np.random.normal(size=(240, 8)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, activation="tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01), "mse")
history = model.fit(x, y, batch_size=24, epochs=3, validation_split=0.2, callbacks=[Pause()], verbose=0)
np.savez(sys.argv[1], *model.get_weights(), np.array([history.history["loss"], history.history["val_loss"]]))
print("trained", flush=True)
