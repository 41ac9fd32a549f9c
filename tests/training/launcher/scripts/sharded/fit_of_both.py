"""A model that the script trains by ``model.fit`` and by ``training.fit`` in turn, and evaluates."""

import sys

import keras
import numpy as np
import tensorflow as tf

import matex_data as md

keras.utils.set_random_seed(5)
x = np.random.normal(size=(42, 4)).astype("float32")
y = np.abs(x[:, :1])
rows = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")
print(f"RESULT before {model.evaluate(x, y, batch_size=12, verbose=0):.6f}")
for epoch in range(2):
    history = md.training.fit(model, md.training.shard(rows), verbose=0).history
    print(f"RESULT shards {epoch} {history['loss'][0]:.6f}")
    history = model.fit(rows, verbose=0).history
    print(f"RESULT whole {epoch} {history['loss'][0]:.6f}")
model.save_weights(sys.argv[1])
