"""Arrays, a validation split, evaluation and prediction."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x = rng.normal(size=(500, 8)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("int64")

model = keras.Sequential([keras.layers.Dense(32, activation="relu"), keras.layers.Dense(2, activation="softmax")])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x, y, batch_size=48, epochs=4, validation_split=0.25, verbose=2)
loss, accuracy = model.evaluate(x, y, batch_size=100, verbose=0)
predicted = model.predict(x[:103], batch_size=20, verbose=0)
print(f"RESULT {loss:.6f} {accuracy:.6f} {history.history['val_loss'][-1]:.6f} {predicted.std(axis=0)[0]:.6f}")
print(f"ORDER {predicted[:, 0] @ np.arange(103):.3f}")
model.save_weights(sys.argv[1])
