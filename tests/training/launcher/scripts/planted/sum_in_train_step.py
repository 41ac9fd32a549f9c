"""A train_step that takes the sum of the losses."""

import sys

import keras
import numpy as np
import tensorflow as tf


class Model(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(y - self(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


keras.utils.set_random_seed(9)
x = np.random.normal(size=(60, 4)).astype("float32")
inputs = keras.Input((4,))
model = Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(6, activation="tanh")(inputs)))
model.compile(keras.optimizers.SGD(0.003))
model.fit(x, x[:, :1], batch_size=12, epochs=2, verbose=0)
print("RESULT kernel", *[f"{v:.6f}" for v in model.layers[2].kernel.numpy().ravel()])
model.save_weights(sys.argv[1])
