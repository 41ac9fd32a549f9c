# ruff: noqa: B905
"""A GAN with two optimizers over shared batches; the noise was drawn beforehand."""

import sys

import keras
import numpy as np
import tensorflow as tf

import matex_data as md

keras.utils.set_random_seed(10)
images = np.random.normal(2, size=(66, 4)).astype("float32")
noises = np.random.normal(size=(66, 3)).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((images, noises)).batch(16)
generator = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8, "leaky_relu"), keras.layers.Dense(4)])
discriminator = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "leaky_relu"), keras.layers.Dense(1)])
cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
generator_optimizer, discriminator_optimizer = keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1)


@tf.function
def train_step(images, noise):
    with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
        generated = generator(noise, training=True)
        real_output, fake_output = discriminator(images, training=True), discriminator(generated, training=True)
        gen_loss = cross_entropy(tf.ones_like(fake_output), fake_output)
        disc_loss = cross_entropy(tf.ones_like(real_output), real_output)
        disc_loss += cross_entropy(tf.zeros_like(fake_output), fake_output)
    gradients = gen_tape.gradient(gen_loss, generator.trainable_variables)
    generator_optimizer.apply_gradients(zip(gradients, generator.trainable_variables))
    gradients = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
    discriminator_optimizer.apply_gradients(zip(gradients, discriminator.trainable_variables))


for _ in range(3):
    for image_batch, noise in md.training.shard(dataset):
        train_step(image_batch, noise)
print("RESULT iterations", int(generator_optimizer.iterations.numpy()), int(discriminator_optimizer.iterations.numpy()))
np.savez(sys.argv[1] + ".npz", *[w.numpy() for w in (*generator.weights, *discriminator.weights)])
