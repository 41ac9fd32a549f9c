"""BatchNormalization with one row in the last batch, of which no shard could be normalized."""

import sys

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(11)
x = np.random.normal(3, 2, size=(61, 4)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(20)
model = keras.Sequential(
    [keras.Input((4,)), keras.layers.Dense(6), keras.layers.BatchNormalization(momentum=0.8), keras.layers.Dense(1)]
)
optimizer = keras.optimizers.SGD(0.01)


@tf.function
def train_step(inputs, targets):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(inputs, training=True) - targets))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    return loss


for epoch in range(3):
    for inputs, targets in data:
        loss = train_step(inputs, targets)
    print(f"RESULT loss {epoch} {float(loss):.6f}")
print("RESULT predicted", *[f"{v:.6f}" for v in model(x[:5], training=False).numpy().ravel()])
model.save_weights(sys.argv[1])
