"""A pipeline that shuffles and repeats, with steps_per_epoch."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(20)
x = np.random.normal(size=(70, 4)).astype("float32")
y = (x[:, 0] > 0).astype("int64")
train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(70, seed=20).repeat().batch(16).prefetch(tf.data.AUTOTUNE)
valid = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(2)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.AdamW(0.02), loss, metrics=["accuracy"])
history = model.fit(train, steps_per_epoch=5, epochs=3, validation_data=valid, verbose=0)
for name in ("loss", "accuracy", "val_loss", "val_accuracy"):
    print("RESULT", name, *[f"{v:.6f}" for v in history.history[name]])
model.save_weights(sys.argv[1])
