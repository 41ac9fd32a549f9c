"""Two zipped datasets, with and without labels, of different batch sizes."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(6)
x = np.random.normal(size=(130, 4)).astype("float32")
labelled = tf.data.Dataset.from_tensor_slices((x[:50], x[:50, :1])).batch(12)
unlabelled = tf.data.Dataset.from_tensor_slices(x[50:]).batch(19)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam(0.02)


@tf.function
def train_step(inputs, targets, others):
    with tf.GradientTape() as tape:
        supervised = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
        consistency = tf.reduce_mean(tf.abs(model(others, training=True) - model(others + 0.1, training=True)))
        loss = supervised + 0.5 * consistency
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return supervised, consistency


for epoch in range(3):
    for (inputs, targets), others in zip(labelled, unlabelled, strict=True):
        losses = train_step(inputs, targets, others)
    print(f"RESULT losses {epoch}", *[f"{float(loss):.6f}" for loss in losses])
model.save_weights(sys.argv[1])
