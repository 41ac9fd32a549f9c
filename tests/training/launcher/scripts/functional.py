"""A functional model with two inputs, callbacks, class weights, and a custom metric in a callback."""

import sys
from pathlib import Path

import keras
import numpy as np

keras.utils.set_random_seed(4)
rng = np.random.default_rng(1)
numbers = rng.normal(size=(400, 4)).astype("float32")
words = rng.integers(0, 20, size=(400, 3))
y = (numbers[:, 0] + (words[:, 0] > 10) > 0.5).astype("float32")

first = keras.Input((4,), name="numbers")
second = keras.Input((3,), dtype="int32", name="words")
embedded = keras.layers.Flatten()(keras.layers.Embedding(20, 2)(second))
hidden = keras.layers.Dense(8, activation="relu")(keras.layers.Concatenate()([first, embedded]))
model = keras.Model([first, second], keras.layers.Dense(1, activation="sigmoid")(hidden))
model.compile(keras.optimizers.Adam(0.01, clipnorm=0.5), "binary_crossentropy", metrics=["AUC"])


class Spread(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["spread"] = float(self.model.predict([numbers, words], verbose=0).std())


folder = Path(sys.argv[1]).parent
callbacks = [
    Spread(),
    keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True),
    keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.3, patience=1),
    keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True, monitor="val_loss"),
    keras.callbacks.CSVLogger(folder / "log.csv"),
]
history = model.fit(
    {"numbers": numbers[:300], "words": words[:300]},
    y[:300],
    batch_size=32,
    epochs=4,
    validation_data=({"numbers": numbers[300:], "words": words[300:]}, y[300:]),
    class_weight={0: 1.0, 1: 2.0},
    callbacks=callbacks,
    verbose=2,
)
best = keras.models.load_model(folder / "best.keras").evaluate([numbers[300:], words[300:]], y[300:], verbose=0)
print(f"RESULT {len(history.epoch)} {history.history['spread'][-1]:.6f} {best[0]:.6f}")
model.save_weights(sys.argv[1])
