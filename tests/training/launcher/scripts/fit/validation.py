"""Validation by a split, by data and by frequency, with metrics that hold more than a mean."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(28)
x = np.random.normal(size=(130, 4)).astype("float32")
y = (x[:, :1] + 0.3 * x[:, 1:2] > 0).astype("float32")
model = keras.Sequential([keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1, activation="sigmoid")])
metrics = [keras.metrics.AUC(name="auc", num_thresholds=50), keras.metrics.Precision(name="precision"), "accuracy"]
model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=metrics)
first = model.fit(x, y, batch_size=32, epochs=2, validation_split=0.3, verbose=0)
second = model.fit(
    x[:100], y[:100], batch_size=32, epochs=4, validation_data=(x[100:], y[100:]), validation_freq=2, verbose=0
)
for history in (first, second):
    for name in ("val_loss", "val_auc", "val_precision", "accuracy"):
        print("RESULT", name, *[f"{v:.6f}" for v in history.history[name]])
model.save_weights(sys.argv[1])
