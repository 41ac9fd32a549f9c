"""A learning rate and a stop that depend on the allreduced loss."""

import sys

import keras
import numpy as np
import tensorflow as tf

import matex_data as md

keras.utils.set_random_seed(14)
x = np.random.normal(size=(60, 3)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x @ np.array([[1.0], [-2.0], [0.5]], "float32"))).batch(12)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.2)
previous = np.inf
for step, (inputs, targets) in enumerate(md.training.shard(data.repeat(8))):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs) - targets))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    loss = float(md.training.allreduce(loss))
    print(f"RESULT loss {step} {loss:.6f}")
    if loss > previous:
        optimizer.learning_rate = float(optimizer.learning_rate) * 0.5
    previous = loss
    if loss < 0.05:
        break
model.save_weights(sys.argv[1])
