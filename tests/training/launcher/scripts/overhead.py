"""Time that checks take of a model with a step of its own: 1,000 steps of one epoch.

Prints, in percent: what the checks of steps 501 to 1,000 take of the time of these steps, what those after the first
one take of the first 500; then the seconds of the first step, and the milliseconds of a usual one.
"""

import time

import keras
import numpy as np
import tensorflow as tf

from matex_data.training.checking.check import CheckSchedule


class Own(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(y - self(x, training=True)))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


class Clock(keras.callbacks.Callback):
    """Times at which steps end."""

    def on_train_begin(self, logs=None):
        self.times = [time.perf_counter()]

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter())


keras.utils.set_random_seed(1)
layers = [keras.layers.Dense(256, "relu") for _ in range(4)]
model = Own([keras.Input((64,)), *layers, keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(1e-3))
x = np.random.default_rng(0).normal(size=(256, 64)).astype("float32")
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(256).repeat()
clock = Clock()
model.fit(data, steps_per_epoch=1000, verbose=0, callbacks=[clock])
steps = np.diff(clock.times)
schedule, checked = CheckSchedule(), []
for k in range(1000):
    if schedule.due(first_of_fit=k == 0, last_of_fit=k == 999):
        schedule.note_check()
        checked.append(k)
    schedule.steps += 1
usual = np.median(steps)


def excess(first, last):
    extra = sum(max(0.0, steps[k] - usual) for k in checked if first <= k < last)
    return 100 * extra / (usual * (last - max(first, 1)))


print(f"OVERHEAD {excess(500, 1000):.2f} {excess(1, 500):.2f} {steps[0]:.2f} {1e3 * usual:.2f}", flush=True)
