"""Sequences of several lengths, one by one: the first axis is time, not the batch."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(9)
rng = np.random.default_rng(9)
sequences = [rng.normal(size=(length, 2)).astype("float32") for length in rng.integers(3, 9, size=9)]
data = tf.data.Dataset.from_generator(
    lambda: ((s, s.sum()) for s in sequences),
    output_signature=(tf.TensorSpec((None, 2), tf.float32), tf.TensorSpec((), tf.float32)),
)
recurrent, head = keras.layers.SimpleRNN(4), keras.layers.Dense(1)
recurrent.build((None, None, 2))
head.build((None, 4))
variables = [*recurrent.trainable_variables, *head.trainable_variables]
optimizer = keras.optimizers.RMSprop(0.01)


@tf.function
def train_step(sequence, target):
    with tf.GradientTape() as tape:
        loss = tf.square(head(recurrent(sequence[tf.newaxis]))[0, 0] - target)
    optimizer.apply(tape.gradient(loss, variables), variables)
    return loss


for epoch in range(2):
    losses = [float(train_step(sequence, target)) for sequence, target in data]
    print(f"RESULT losses {epoch}", *[f"{loss:.6f}" for loss in losses])
np.savez(sys.argv[1] + ".npz", *[v.numpy() for v in variables])
