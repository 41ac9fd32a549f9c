# ruff: noqa: B905
"""TensorFlow's tutorial of a loop with MirroredStrategy: strategy.run, and compute_average_loss."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(2)
x = np.random.normal(size=(70, 5)).astype("float32")
y = (x[:, :1] > 0).astype("float32")
strategy = tf.distribute.MirroredStrategy()
GLOBAL_BATCH_SIZE = 16 * strategy.num_replicas_in_sync
train_dist = strategy.experimental_distribute_dataset(
    tf.data.Dataset.from_tensor_slices((x[:48], y[:48])).shuffle(48, seed=2).batch(GLOBAL_BATCH_SIZE)
)
test_dist = strategy.experimental_distribute_dataset(
    tf.data.Dataset.from_tensor_slices((x[48:], y[48:])).batch(GLOBAL_BATCH_SIZE)
)

with strategy.scope():
    loss_object = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
    test_loss = keras.metrics.Mean(name="test_loss")
    accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, activation="relu"), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(learning_rate=0.02)


def compute_loss(labels, predictions):
    return tf.nn.compute_average_loss(loss_object(labels, predictions), global_batch_size=GLOBAL_BATCH_SIZE)


def train_step(inputs):
    images, labels = inputs
    with tf.GradientTape() as tape:
        predictions = model(images, training=True)
        loss = compute_loss(labels, predictions)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    accuracy.update_state(labels, predictions)
    return loss


def test_step(inputs):
    images, labels = inputs
    test_loss.update_state(loss_object(labels, model(images, training=False)))


@tf.function
def distributed_train_step(inputs):
    return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(train_step, args=(inputs,)), axis=None)


@tf.function
def distributed_test_step(inputs):
    return strategy.run(test_step, args=(inputs,))


for _ in range(3):
    total, batches = 0.0, 0
    for batch in train_dist:
        total += distributed_train_step(batch)
        batches += 1
    for batch in test_dist:
        distributed_test_step(batch)
    print(f"RESULT epoch {float(total) / batches:.6f} {float(accuracy.result()):.6f} {float(test_loss.result()):.6f}")
    test_loss.reset_state()
    accuracy.reset_state()
model.save_weights(sys.argv[1])
