"""A step that XLA compiles whole."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(12)
x = np.random.normal(size=(64, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1] - 1)).batch(16, drop_remainder=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
optimizer.build(model.trainable_variables)


@tf.function(jit_compile=True)
def train_step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


for epoch in range(3):
    for inputs, targets in data:
        loss = train_step(inputs, targets)
    print(f"RESULT loss {epoch} {float(loss):.6f}")
model.save_weights(sys.argv[1])
