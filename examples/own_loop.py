"""A training loop of one's own, on all ranks: ``mpiexec -n 2 matex run examples/own_loop.py``.

The line with ``training.shard`` is all that is new to a loop for one process. Without it each rank would train on the
whole of every batch: right, but no faster.
"""

import time

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import matex_data as md

BATCH, EPOCHS = 256, 4
tf.config.threading.set_intra_op_parallelism_threads(1)  # one core for each rank
tf.config.threading.set_inter_op_parallelism_threads(1)


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return 1,797 handwritten digits, three times as large, as float32 of shape (n, 24, 24, 1), and their labels."""
    images, labels = load_digits(return_X_y=True)
    x = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    return x.repeat(3, axis=1).repeat(3, axis=2), labels


keras.utils.set_random_seed(1)
x, y = digits()
batches = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).batch(BATCH)
batches = md.training.shard(batches)

layers = keras.layers
model = keras.Sequential(
    [
        layers.Input(x.shape[1:]),
        layers.Conv2D(32, 3, activation="tanh"),
        layers.Conv2D(32, 3, activation="tanh"),
        layers.MaxPooling2D(4),
        layers.Flatten(),
        layers.Dense(10),
    ]
)
optimizer = keras.optimizers.Adam(0.003)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function(reduce_retracing=True)
def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Take one step; the gradients are the averages over all ranks."""
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


for epoch in range(EPOCHS):
    start = time.perf_counter()
    losses = [train_step(images, labels) for images, labels in batches]
    mean = float(md.training.allreduce(tf.reduce_mean(losses)))  # a rank's losses are those of its rows
    print(f"epoch {epoch}: loss {mean:.3f}, {len(x) / (time.perf_counter() - start):,.0f} samples/s")
weights = np.concatenate([variable.numpy().ravel() for variable in model.trainable_variables])
print(f"weights: mean {weights.mean():.6f}, standard deviation {weights.std():.6f}")
