"""Keras's example of knowledge distillation: a trained teacher within the loss of a student."""

import sys

import keras
import numpy as np
from keras import layers, ops


class Distiller(keras.Model):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False, training=True):
        teacher_pred = self.teacher(x, training=False)
        student_loss = self.student_loss_fn(y, y_pred)
        distillation_loss = self.distillation_loss_fn(
            ops.softmax(teacher_pred / self.temperature, axis=1), ops.softmax(y_pred / self.temperature, axis=1)
        ) * (self.temperature**2)
        return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

    def call(self, x):
        return self.student(x)


def network(units):
    return keras.Sequential([keras.Input((6,)), layers.Dense(units, activation="relu"), layers.Dense(3)])


keras.utils.set_random_seed(6)
x = np.random.normal(size=(110, 6)).astype("float32")
y = np.argmax(x[:, :3], axis=1)
crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
teacher, student = network(12), network(4)
teacher.compile(keras.optimizers.Adam(0.02), crossentropy, metrics=["sparse_categorical_accuracy"])
teacher.fit(x, y, epochs=2, batch_size=30, verbose=0)
print("RESULT teacher", *[f"{value:.6f}" for value in teacher.evaluate(x, y, verbose=0)])
distiller = Distiller(student=student, teacher=teacher)
distiller.compile(
    keras.optimizers.Adam(0.02), [keras.metrics.SparseCategoricalAccuracy()], crossentropy, keras.losses.KLDivergence()
)
history = distiller.fit(x, y, epochs=3, batch_size=30, verbose=0)
print("RESULT history", *[f"{value:.6f}" for value in history.history["loss"]])
print("RESULT student", *[f"{value:.6f}" for value in distiller.evaluate(x, y, verbose=0)])
student.save_weights(sys.argv[1])
