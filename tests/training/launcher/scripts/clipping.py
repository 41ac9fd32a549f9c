# ruff: noqa: B905
"""Gradients that the script clips itself: in a loop, by value, of an embedding, and in a train_step of its own."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(9)
x = np.random.normal(size=(203, 6)).astype("float32")
words = np.random.randint(0, 12, size=(203, 2))
y = (x[:, :1] ** 2 + words[:, :1] % 3).astype("float32")
train = tf.data.Dataset.from_tensor_slices((x, words, y)).batch(30)

embedding, dense = keras.layers.Embedding(12, 3), keras.layers.Dense(1)
embedding.build((None, 2))
dense.build((None, 12))
variables = [*embedding.trainable_variables, *dense.trainable_variables]
optimizer, bias_optimizer = keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.05)


@tf.function
def train_step(x, words, y):
    with tf.GradientTape() as tape:
        hidden = tf.concat([x, tf.reshape(embedding(words), [-1, 6])], 1)
        loss = tf.reduce_mean(tf.square(dense(hidden) - y))
    gradients = tape.gradient(target=loss, sources=variables)
    norm = tf.linalg.global_norm(gradients)
    gradients, _ = tf.clip_by_global_norm(t_list=gradients, clip_norm=0.5, use_norm=norm)
    optimizer.apply_gradients(zip(gradients, variables))
    return loss


class Clipped(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = keras.layers.Dense(8, "relu"), keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = [tf.clip_by_norm(g, 0.1) for g in tape.gradient(loss, self.trainable_variables)]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


for _ in range(3):
    for batch in train:
        train_step(*batch)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(dense.bias.value - batch[2]))
        gradient = tf.clip_by_value(tape.gradient(loss, dense.bias.value), -0.2, 0.2)
        bias_optimizer.apply([gradient], [dense.bias])
print("RESULT", *[f"{float(tf.reduce_sum(v.value)):.6f}" for v in variables])

model = Clipped()
model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
model.fit(x, y, batch_size=30, epochs=3, verbose=0)
model.save_weights(sys.argv[1])
