# ruff: noqa: B905
"""Keras's example of a WGAN with gradient penalty: a train_step with two optimizers. The noise is data."""

import sys

import keras
import numpy as np
import tensorflow as tf


class WGAN(keras.Model):
    def __init__(self, discriminator, generator, steps=2, gp_weight=10.0):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.d_steps, self.gp_weight = steps, gp_weight

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer
        self.d_tracker, self.g_tracker = keras.metrics.Mean(name="d_loss"), keras.metrics.Mean(name="g_loss")

    def gradient_penalty(self, real, fake, alpha):
        interpolated = real + alpha * (fake - real)
        with tf.GradientTape() as gp_tape:
            gp_tape.watch(interpolated)
            pred = self.discriminator(interpolated, training=True)
        grads = gp_tape.gradient(pred, [interpolated])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1]))
        return tf.reduce_mean((norm - 1.0) ** 2)

    def train_step(self, data):
        real, noise, alpha = data[0]
        for _ in range(self.d_steps):
            with tf.GradientTape() as tape:
                fake = self.generator(noise, training=True)
                cost = tf.reduce_mean(self.discriminator(fake)) - tf.reduce_mean(self.discriminator(real))
                d_loss = cost + self.gradient_penalty(real, fake, alpha) * self.gp_weight
            d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
            self.d_optimizer.apply_gradients(zip(d_gradient, self.discriminator.trainable_variables))
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self.discriminator(self.generator(noise, training=True), training=True))
        gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
        self.g_optimizer.apply_gradients(zip(gen_gradient, self.generator.trainable_variables))
        self.d_tracker.update_state(d_loss)
        self.g_tracker.update_state(g_loss)
        return {m.name: m.result() for m in (self.d_tracker, self.g_tracker)}


keras.utils.set_random_seed(8)
real, noise = np.random.normal(1, size=(72, 4)).astype("float32"), np.random.normal(size=(72, 3)).astype("float32")
alpha = np.random.random((72, 1)).astype("float32")
discriminator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "leaky_relu"), keras.layers.Dense(1)])
generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "leaky_relu"), keras.layers.Dense(4)])
wgan = WGAN(discriminator, generator)
wgan.compile(keras.optimizers.Adam(0.002, beta_1=0.5), keras.optimizers.Adam(0.002, beta_1=0.5))
history = wgan.fit((real, noise, alpha), batch_size=24, epochs=3, verbose=0)
for name in ("d_loss", "g_loss"):
    print("RESULT", name, *[f"{value:.6f}" for value in history.history[name]])
arrays = [v.numpy() for v in (*discriminator.weights, *generator.weights)]
np.savez(sys.argv[1] + ".npz", *arrays)
