# ruff: noqa: B905
"""Keras's example of a GAN: one step trains a discriminator and a generator. The noise is data, as in vae.py."""

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class GAN(keras.Model):
    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric, self.g_loss_metric = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def train_step(self, data):
        real_images, noise, label_noise = data[0]
        batch_size = ops.shape(real_images)[0]
        combined_images = ops.concatenate([self.generator(noise), real_images], axis=0)
        labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
        labels += 0.05 * ops.concatenate([label_noise, label_noise], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(combined_images))
        grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights))
        misleading_labels = ops.zeros((batch_size, 1))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(misleading_labels, self.discriminator(self.generator(noise)))
        grads = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights))
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


keras.utils.set_random_seed(9)
discriminator = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(4, 4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Flatten(),
        layers.Dense(1, activation="sigmoid"),
    ]
)
generator = keras.Sequential(
    [
        keras.Input((5,)),
        layers.Dense(4 * 4 * 3),
        layers.Reshape((4, 4, 3)),
        layers.Conv2DTranspose(4, 4, strides=2, padding="same"),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Conv2D(1, 5, padding="same", activation="sigmoid"),
    ]
)
images = np.random.random((70, 8, 8, 1)).astype("float32")
noise, label_noise = np.random.normal(size=(70, 5)).astype("float32"), np.random.random((70, 1)).astype("float32")
gan = GAN(discriminator, generator)
gan.compile(keras.optimizers.Adam(0.002), keras.optimizers.Adam(0.002), keras.losses.BinaryCrossentropy())
history = gan.fit((images, noise, label_noise), batch_size=24, epochs=3, verbose=0)
for name in ("d_loss", "g_loss"):
    print("RESULT", name, *[f"{value:.6f}" for value in history.history[name]])
np.savez(sys.argv[1] + ".npz", *[v.numpy() for v in (*discriminator.weights, *generator.weights)])
