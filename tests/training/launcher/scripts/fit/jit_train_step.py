"""A train_step of the model's own that XLA compiles."""

import sys

import keras
import numpy as np
import tensorflow as tf


class Compiled(keras.Model):
    @tf.function(jit_compile=True)
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


keras.utils.set_random_seed(5)
inputs = keras.Input((8,))
model = Compiled(inputs, keras.layers.Dense(1)(keras.layers.Dense(6, "tanh")(inputs)))
model.compile("sgd", "mse")
x = np.random.normal(size=(96, 8)).astype("float32")
model.fit(x, x.sum(axis=1), batch_size=24, epochs=2, verbose=0)
print("RESULT weights", *[f"{np.abs(weight).sum():.6f}" for weight in model.get_weights()])
model.save_weights(sys.argv[1])
