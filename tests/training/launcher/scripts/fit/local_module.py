"""A script that imports a module beside it."""

import sys

import keras
import numpy as np
from small_networks import make

keras.utils.set_random_seed(14)
x = np.random.normal(size=(66, 4)).astype("float32")
model = make(depth=2)
model.compile(keras.optimizers.SGD(0.05), "mae")
history = model.fit(x, x[:, :1], batch_size=12, epochs=2, verbose=0)
print("RESULT history", *[f"{v:.6f}" for v in history.history["loss"]])
model.save_weights(sys.argv[1])
