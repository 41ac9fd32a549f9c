"""Runs of ``fit`` that are sent a signal go on exactly, whatever their data and their callbacks."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import matex_data as md
from tests.support.ranks import Pools

ROWS, BATCH = 100, 12
SHUFFLED = {"batch_size": BATCH, "shuffle": True, "seed": 3}


def _table() -> tuple[Any, Any]:
    x = np.random.default_rng(3).normal(size=(ROWS, 4)).astype(np.float32)
    return x, x.sum(1, keepdims=True)


def _own(comm: Any) -> Any:
    x, y = _table()
    return md.open_dataset({"x": x, "y": y}, inputs="x", targets="y", comm=comm)


def _filtered(comm: Any) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(_table()).filter(lambda x, y: x[0] > -9).batch(BATCH)


def _tensors(comm: Any) -> Any:
    return _own(comm).tf_dataset(BATCH, shuffle=True, seed=3)


CASES: dict[str, tuple[Any, list[int], dict[str, Any]]] = {
    "an unknown number of batches": (_filtered, [13], {"epochs": 3}),
    "a later epoch": (_own, [12], {**SHUFFLED, "initial_epoch": 2, "epochs": 5}),
    "two passes in an epoch": (lambda comm: _tensors(comm).repeat(2), [23, 9], {"epochs": 3}),
    "a cache": (lambda comm: _tensors(comm).cache(), [12, 2], {"epochs": 3}),
    "other steps at a time": (_own, [4], {**SHUFFLED, "epochs": 3}),
}
"""Data, steps (executions) of each run after which it is sent a signal, and options of ``fit``."""


def _trained(comm: Any, case: str, folder: Path, stop: int = 0) -> Any:
    """Train, with callbacks that change what they find; return weights, epochs and logs, or None if it was stopped."""
    import keras

    from matex_data.training.restart.preemption import REQUESTS, Preempted

    made, _, options = CASES[case]
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    several = case == "other steps at a time"
    at_once = (4 if folder.exists() else 3) if several else 1
    model.compile(keras.optimizers.SGD(0.01, momentum=0.5), "mse", steps_per_execution=at_once)
    left = stop

    class Changes(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch
            model.layers[0].kernel.assign(0.9 * model.layers[0].kernel)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if not several:
                model.layers[0].bias.assign(model.layers[0].bias + 0.1)
                model.optimizer.learning_rate = 0.001 * (1 + 10 * self.epoch + batch)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGUSR1)

    REQUESTS.ignore = lambda: None  # type: ignore[method-assign]
    REQUESTS._received = None
    try:
        data, given = made(comm), {**options, "callbacks": [Changes()], "verbose": 0}
        names = str(folder) + "-{epoch}-{batch}.weights.h5"
        given["callbacks"].append(keras.callbacks.CSVLogger(f"{folder}.csv"))
        if not several:
            given["callbacks"].append(keras.callbacks.ModelCheckpoint(names, save_weights_only=True, save_freq=5))
        history = md.training.fit(model, data, checkpoint=folder, comm=comm, **given)
    except Preempted:
        return None
    finally:
        REQUESTS._received = None
        del REQUESTS.ignore
    rows = [line.split(",")[0] for line in Path(f"{folder}.csv").read_text().splitlines()]
    files = sorted(path.name.partition("-")[2] for path in folder.parent.glob(f"{folder.name}-*.h5"))
    return [w.tobytes() for w in model.get_weights()], history.epoch, int(model.optimizer.iterations), rows, files


def _continued(comm: Any, case: str, folder: Path) -> tuple[Any, Any]:
    straight = _trained(comm, case, folder / "straight")
    for stop in CASES[case][1]:
        assert _trained(comm, case, folder / "broken", stop) is None
    return straight, _trained(comm, case, folder / "broken")


@pytest.mark.parametrize("case", CASES)
def test_a_stopped_run_goes_on_exactly(case: str, tmp_path: Path, ranks: Pools) -> None:
    ((straight, continued),) = ranks(1).run(_continued, case, tmp_path, timeout=120)
    assert continued == straight
