# ruff: noqa: B905
"""A training loop with a GradientTape, and an evaluation loop."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(2)
x = np.random.normal(size=(250, 6)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
train = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(250).batch(40)
test = tf.data.Dataset.from_tensor_slices((x, y)).batch(100)

model = keras.Sequential([keras.layers.Dense(10, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.02)
loss_function = keras.losses.BinaryCrossentropy(from_logits=True)
accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)


@tf.function
def train_step(images, labels):
    with tf.GradientTape() as tape:
        loss = loss_function(labels, model(images, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


for _ in range(4):
    for images, labels in train:
        train_step(images, labels)
for images, labels in test:
    accuracy.update_state(labels, model(images, training=False))
print(f"RESULT {float(accuracy.result()):.6f}")
model.save_weights(sys.argv[1])
