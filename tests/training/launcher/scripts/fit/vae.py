# ruff: noqa: B905
"""Keras's example of a variational autoencoder. The noise is data, since ranks draw other numbers than one process."""

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class Sampling(layers.Layer):
    def call(self, inputs):
        z_mean, z_log_var, noise = inputs
        return z_mean + ops.exp(0.5 * z_log_var) * noise


keras.utils.set_random_seed(5)
images, noise = keras.Input(shape=(12,)), keras.Input(shape=(2,))
x = layers.Dense(8, activation="relu")(images)
z_mean, z_log_var = layers.Dense(2, name="z_mean")(x), layers.Dense(2, name="z_log_var")(x)
encoder = keras.Model([images, noise], [z_mean, z_log_var, Sampling()([z_mean, z_log_var, noise])])
latent = keras.Input(shape=(2,))
outputs = layers.Dense(12, activation="sigmoid")(layers.Dense(8, activation="relu")(latent))
decoder = keras.Model(latent, outputs)


class VAE(keras.Model):
    def __init__(self, encoder, decoder, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = encoder, decoder
        self.trackers = {name: keras.metrics.Mean(name=name) for name in ("loss", "reconstruction", "kl")}

    @property
    def metrics(self):
        return list(self.trackers.values())

    def train_step(self, data):
        (images, noise) = data[0]
        with tf.GradientTape() as tape:
            z_mean, z_log_var, z = self.encoder([images, noise])
            crossentropy = keras.losses.binary_crossentropy(images[..., None], self.decoder(z)[..., None])
            reconstruction = ops.mean(ops.sum(crossentropy, axis=1))
            kl = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
            kl = ops.mean(ops.sum(kl, axis=1))
            total = reconstruction + kl
        grads = tape.gradient(total, self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights))
        for tracker, value in zip(self.metrics, (total, reconstruction, kl)):
            tracker.update_state(value)
        return {m.name: m.result() for m in self.metrics}


data = (np.random.random((96, 12)) > 0.5).astype("float32")
noises = np.random.normal(size=(96, 2)).astype("float32")
vae = VAE(encoder, decoder)
vae.compile(optimizer=keras.optimizers.Adam(0.01))
history = vae.fit([data, noises], epochs=3, batch_size=24, verbose=0)
for name in history.history:
    print("RESULT", name, *[f"{value:.6f}" for value in history.history[name]])
np.savez(sys.argv[1] + ".npz", *[v.numpy() for v in vae.trainable_weights])
