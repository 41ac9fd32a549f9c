"""Script that is preempted: arguments are the file of its results, and a JSON object of options.

Options: ``kind`` of the data; ``signal``: name; ``senders``: ranks that send it to themselves; ``when``: "train:N" or
"test:N", the N-th batch of this process, "epoch:N" or "begin"; ``times``: signals; ``pause``: seconds after each batch;
``calls`` of ``fit``; ``handler``: the script has a handler of its own; ``late``: SIGTERM comes when the process ends.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

OUT, OPTIONS = sys.argv[1], json.loads(sys.argv[2])
RANK = next(
    (int(os.environ[name]) for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK") if name in os.environ), 0
)


class SendSignal(keras.callbacks.Callback):  # type: ignore[misc]
    """Callback that sends signals to its own process."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = {"train": 0, "test": 0, "epoch": 0}

    def _count(self, kind: str) -> None:
        self.counts[kind] += 1
        if OPTIONS.get("when") == f"{kind}:{self.counts[kind]}" and RANK in OPTIONS.get("senders", [1]):
            for _ in range(OPTIONS.get("times", 1)):
                os.kill(os.getpid(), signal.Signals[OPTIONS.get("signal", "SIGUSR1")])
        if OPTIONS.get("pause"):
            time.sleep(OPTIONS["pause"])

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count("train")

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self._count("test")

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._count("epoch")


def made_model() -> Any:
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(2),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return model


class Sequence(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 7

    def __getitem__(self, number: int) -> Any:
        return x[24 * number : 24 * (number + 1)], y[24 * number : 24 * (number + 1)]


def batches() -> Any:
    while True:
        rows = np.random.randint(0, 200, 24)
        yield x[rows], y[rows]


rng = np.random.default_rng()  # without a seed
x = rng.normal(size=(203, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
if OPTIONS.get("handler"):
    signal.signal(signal.SIGUSR1, lambda number, frame: print("the script's own handler", RANK, flush=True))
if OPTIONS.get("late"):
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
if OPTIONS.get("when") == "begin":
    os.kill(os.getpid(), signal.SIGUSR1)
model, kind, results = made_model(), OPTIONS["kind"], []
callbacks = [SendSignal(), keras.callbacks.EarlyStopping(patience=9)]
if kind == "arrays":
    arguments: dict[str, Any] = {"x": x, "y": y, "batch_size": 24, "epochs": 3, "validation_split": 0.2}
elif kind == "steps":
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(200).repeat().batch(24)
    arguments = {"x": data, "steps_per_epoch": 7, "epochs": 4, "validation_steps": 3}
    arguments["validation_data"] = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(200).batch(10)
elif kind == "sequence":
    arguments = {"x": Sequence(), "epochs": 4}  # which Keras shuffles by Python's random numbers
elif kind == "generator":
    arguments = {"x": batches(), "steps_per_epoch": 7, "epochs": 4}
else:
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(200).map(lambda a, b: (a + tf.random.normal((6,)), b))
    arguments = {"x": data.batch(24), "validation_data": (x[:50], y[:50]), "epochs": 4}
for _ in range(OPTIONS.get("calls", 1)):
    history = model.fit(**arguments, callbacks=callbacks, verbose=0)
    results += [*model.get_weights(), *(np.array(values) for values in history.history.values())]
    model = made_model()
if RANK == 0:
    np.savez(OUT, *results)
print("end", RANK)
