"""Keras's guide to several GPUs: a model built and compiled in the scope of a strategy."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(29)
x = np.random.normal(size=(90, 5)).astype("float32")
y = (x[:, 0] > 0).astype("int64")
several = len(tf.config.list_physical_devices("GPU")) > 1
strategy = tf.distribute.MirroredStrategy() if several else tf.distribute.OneDeviceStrategy("/cpu:0")
global_batch = 10 * strategy.num_replicas_in_sync
train = tf.data.Dataset.from_tensor_slices((x[:70], y[:70])).batch(global_batch)
valid = tf.data.Dataset.from_tensor_slices((x[70:], y[70:])).batch(global_batch)
with strategy.scope():
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(8, activation="relu")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    )
history = model.fit(train, epochs=2, validation_data=valid, verbose=0)
for name in ("loss", "accuracy", "val_loss"):
    print("RESULT", name, *[f"{v:.6f}" for v in history.history[name]])
print("RESULT evaluate", *[f"{v:.6f}" for v in model.evaluate(valid, verbose=0)])
model.save_weights(sys.argv[1])
