"""A learning rate and a stop that depend on the loss of a batch."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(8)
x = np.random.normal(size=(90, 3)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x @ np.array([[1.0], [-2.0], [0.5]], "float32"))).batch(25)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.2)
previous, steps = np.inf, 0
for inputs, targets in data.repeat(10):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs) - targets))
    if float(loss) > previous:
        optimizer.learning_rate = float(optimizer.learning_rate) * 0.5
    previous = float(loss)
    if previous < 0.1:
        break
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    steps += 1
print(f"RESULT steps {steps} {previous:.6f} {float(optimizer.learning_rate):.6f}")
model.save_weights(sys.argv[1])
