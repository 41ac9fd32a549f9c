"""Callbacks that use the logs: a schedule, a plateau, early stopping, and a custom one."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(11)
x = np.random.normal(size=(120, 4)).astype("float32")
y = x[:, :1] * x[:, 1:2]


class Rates(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates = []

    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate.value) * (1 + logs["loss"]))


rates = Rates()
model = keras.Sequential([keras.layers.Dense(10, activation="relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.02), "mse")
history = model.fit(
    x,
    y,
    batch_size=32,
    epochs=10,
    validation_split=0.25,
    callbacks=[
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.05 if epoch < 2 else rate),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1, min_lr=1e-4),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
        keras.callbacks.TerminateOnNaN(),
        rates,
    ],
    verbose=0,
)
print("RESULT epochs", len(history.epoch))
print("RESULT rates", *[f"{rate:.6f}" for rate in rates.rates])
print("RESULT val_loss", *[f"{value:.6f}" for value in history.history["val_loss"]])
model.save_weights(sys.argv[1])
