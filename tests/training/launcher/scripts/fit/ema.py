"""An optimizer that keeps a moving average of the weights and assigns it at the end."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(30)
x = np.random.normal(size=(96, 4)).astype("float32")
y = x.prod(axis=1, keepdims=True)
model = keras.Sequential([keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=5, weight_decay=0.01)
model.compile(optimizer, "mse")
history = model.fit(x, y, batch_size=16, epochs=2, validation_data=(x, y), verbose=0)
for name in ("loss", "val_loss"):
    print("RESULT", name, *[f"{v:.6f}" for v in history.history[name]])
model.save_weights(sys.argv[1])
