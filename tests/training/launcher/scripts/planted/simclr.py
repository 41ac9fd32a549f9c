# ruff: noqa: B905
"""Keras's example of SimCLR as a whole: a train_step of two losses, two optimizers, and accuracies of pairs."""

import sys

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops


class ContrastiveModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.temperature = 0.3
        self.encoder = keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(5)])
        self.projection_head = keras.Sequential(
            [keras.Input((5,)), layers.Dense(5, activation="relu"), layers.Dense(4)]
        )
        self.linear_probe = keras.Sequential([keras.Input((5,)), layers.Dense(3)])

    def compile(self, contrastive_optimizer, probe_optimizer):
        super().compile()
        self.contrastive_optimizer, self.probe_optimizer = contrastive_optimizer, probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
        self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
        self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
        self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [
            self.contrastive_loss_tracker,
            self.contrastive_accuracy,
            self.probe_loss_tracker,
            self.probe_accuracy,
        ]

    def contrastive_loss(self, first, second):
        first, second = ops.normalize(first, axis=1), ops.normalize(second, axis=1)
        similarities = ops.matmul(first, ops.transpose(second)) / self.temperature
        labels = ops.arange(ops.shape(first)[0])
        self.contrastive_accuracy.update_state(labels, similarities)
        self.contrastive_accuracy.update_state(labels, ops.transpose(similarities))
        losses = [
            keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True)
            for logits in (similarities, ops.transpose(similarities))
        ]
        return ops.mean(losses[0] + losses[1]) / 2

    def train_step(self, data):
        (first, second), labels = data
        with tf.GradientTape() as tape:
            projections = [self.projection_head(self.encoder(view, training=True)) for view in (first, second)]
            contrastive_loss = self.contrastive_loss(*projections)
        weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
        self.contrastive_optimizer.apply_gradients(zip(tape.gradient(contrastive_loss, weights), weights))
        self.contrastive_loss_tracker.update_state(contrastive_loss)
        with tf.GradientTape() as tape:
            logits = self.linear_probe(self.encoder(first, training=False), training=True)
            probe_loss = self.probe_loss(labels, logits)
        weights = self.linear_probe.trainable_weights
        self.probe_optimizer.apply_gradients(zip(tape.gradient(probe_loss, weights), weights))
        self.probe_loss_tracker.update_state(probe_loss)
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics}

    def test_step(self, data):
        images, labels = data
        logits = self.linear_probe(self.encoder(images, training=False), training=False)
        self.probe_loss_tracker.update_state(self.probe_loss(labels, logits))
        self.probe_accuracy.update_state(labels, logits)
        return {m.name: m.result() for m in self.metrics[2:]}


keras.utils.set_random_seed(14)
images = np.random.normal(size=(72, 6)).astype("float32")
views = [(images + 0.1 * np.random.normal(size=images.shape)).astype("float32") for _ in range(2)]
labels = np.argmax(images[:, :3], axis=1)
model = ContrastiveModel()
model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01))
history = model.fit(views, labels, batch_size=24, epochs=3, validation_data=(images[:30], labels[:30]), verbose=0)
for name, values in history.history.items():
    print("RESULT", name, *[f"{value:.6f}" for value in values])
parts = (model.encoder, model.projection_head, model.linear_probe)
np.savez(sys.argv[1] + ".npz", *[w.numpy() for part in parts for w in part.weights])
