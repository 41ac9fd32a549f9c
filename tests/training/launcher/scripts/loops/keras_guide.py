"""Keras's guide to writing a training loop from scratch, with metrics and a validation loop."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
x = np.random.normal(size=(110, 6)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
train_dataset = tf.data.Dataset.from_tensor_slices((x[:80], y[:80])).shuffle(buffer_size=1024).batch(24)
val_dataset = tf.data.Dataset.from_tensor_slices((x[80:], y[80:])).batch(24)

inputs = keras.Input(shape=(6,), name="digits")
model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(8, activation="relu")(inputs)))
optimizer = keras.optimizers.Adam(learning_rate=1e-2)
optimizer.build(model.trainable_variables)
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
train_acc_metric, val_acc_metric = (keras.metrics.SparseCategoricalAccuracy() for _ in range(2))


@tf.function
def train_step(x, y):
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss_value = loss_fn(y, logits)
    grads = tape.gradient(loss_value, model.trainable_weights)
    optimizer.apply(grads, model.trainable_weights)
    train_acc_metric.update_state(y, logits)
    return loss_value


@tf.function
def test_step(x, y):
    val_acc_metric.update_state(y, model(x, training=False))


for epoch in range(3):
    for step, (x_batch_train, y_batch_train) in enumerate(train_dataset):
        loss_value = train_step(x_batch_train, y_batch_train)
        if step % 2 == 0:
            print(f"RESULT loss {epoch} {step} {float(loss_value):.6f}")
    print(f"RESULT train_acc {float(train_acc_metric.result()):.6f}")
    train_acc_metric.reset_state()
    for x_batch_val, y_batch_val in val_dataset:
        test_step(x_batch_val, y_batch_val)
    print(f"RESULT val_acc {float(val_acc_metric.result()):.6f}")
    val_acc_metric.reset_state()
print("RESULT traces", train_step.experimental_get_tracing_count())
model.save_weights(sys.argv[1])
