"""A loop that evaluates in its body, on another dataset with another batch size."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(5)
x = np.random.normal(size=(95, 4)).astype("float32")
y = np.abs(x[:, :1])
train = tf.data.Dataset.from_tensor_slices((x[:70], y[:70])).batch(20)
valid = tf.data.Dataset.from_tensor_slices((x[70:], y[70:])).batch(9)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)])
optimizer, mean = keras.optimizers.Adam(0.02), keras.metrics.Mean()
for step, (inputs, targets) in enumerate(train.repeat(3)):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
        gradients = tape.gradient(loss, model.trainable_variables)
    if step % 3 == 0:
        mean.reset_state()
        for inputs, targets in valid:
            mean.update_state(tf.square(model(inputs, training=False) - targets))
        print(f"RESULT valid {step} {float(mean.result()):.6f}")
    optimizer.apply(gradients, model.trainable_variables)
model.save_weights(sys.argv[1])
