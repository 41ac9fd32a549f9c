"""``training.fit``: weights and logs on any number of ranks equal those of one process."""

from __future__ import annotations

import platform
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import problems
from tests.support.ranks import Pool, Pools

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("SGD", {"learning_rate": 0.1, "momentum": 0.9}),
    "adam": ("Adam", {"learning_rate": 0.01}),
}


QUICK = [("adam", 250)]


def _optimizer(name: str) -> Any:
    import keras

    kind, options = OPTIMIZERS[name]
    return getattr(keras.optimizers, kind)(**options)


def _train(comm: Any, name: str, samples: int, batch: int, epochs: int, **options: Any) -> Any:
    from matex_data import training

    arrays = problems.table(samples)
    model = problems.perceptron(seed=comm.rank + 1)  # rank 0's weights must win
    problems.compiled(model, _optimizer(name))
    data = problems.shard(arrays, batch, comm.rank, comm.size)
    history = training.fit(model, data, epochs=epochs, comm=comm, verbose=0, **options)
    return problems.weights(model), history.history


def _reference(comm: Any, name: str, samples: int, batch: int, epochs: int) -> Any:
    model = problems.compiled(problems.perceptron(), _optimizer(name))
    history = problems.one_process(model, problems.table(samples), batch, epochs)
    return problems.weights(model), history.history


@pytest.mark.rank_counts(3, slow=(1, 2, 4))
@pytest.mark.parametrize(
    ("name", "samples"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in product(OPTIMIZERS, (240, 241, 250))
    ],
)
def test_weights_and_logs_equal_one_process(ranks: Pools, pool: Pool, name: str, samples: int) -> None:
    (expected, logs), *_ = ranks(1).run(_reference, name, samples, 24, 5)
    results = pool.run(_train, name, samples, 24, 5, timeout=120)
    problems.assert_same_weights([weights for weights, _ in results], expected)
    for _, history in results:
        assert history.keys() == logs.keys()
        for key, values in logs.items():
            np.testing.assert_allclose(history[key], values, rtol=1e-5)


@pytest.mark.rank_counts(2)
def test_weights_stay_bitwise_equal_over_twenty_epochs(pool: Pool) -> None:
    (first, _), (second, _) = pool.run(_train, "adam", 240, 24, 20, timeout=120)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


def _tracked(comm: Any, samples: int, distributed: bool) -> Any:
    """Return the history of a step of one's own that updates one mean by a loss of the batch and by its rows."""
    import keras
    import tensorflow as tf

    from matex_data import training

    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            self.mean.update_state(loss)
            self.mean.update_state(x[:, 0])
            return {"mean": self.mean.result()}

        @property
        def metrics(self) -> list[Any]:
            return [self.mean]

    keras.utils.set_random_seed(1)
    model = Own([keras.Input((problems.FEATURES,)), keras.layers.Dense(3)])
    model.mean = keras.metrics.Mean(name="mean")
    model.compile(keras.optimizers.SGD(0.1))
    if not distributed:
        return problems.one_process(model, problems.table(samples), 24, 3).history
    data = problems.shard(problems.table(samples), 24, comm.rank, comm.size)
    return training.fit(model, data, epochs=3, comm=comm, verbose=0).history


@pytest.mark.rank_counts(2, slow=(3,))
@pytest.mark.parametrize("samples", [96, 97])
def test_a_mean_of_batches_and_rows_is_that_of_one_process(ranks: Pools, pool: Pool, samples: int) -> None:
    expected, *_ = ranks(1).run(_tracked, samples, False)
    for history in pool.run(_tracked, samples, True, timeout=120):
        np.testing.assert_allclose(history["mean"], expected["mean"], rtol=1e-5)


def _evaluated_in_a_callback(comm: Any) -> Any:
    import keras
    import tensorflow as tf

    from matex_data import training

    x = np.random.default_rng(0).normal(size=(24, 3)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "sigmoid")])
    model.compile(keras.optimizers.SGD(0.0), keras.losses.BinaryCrossentropy("sum"), metrics=["TruePositives"])
    found = []

    def evaluate(epoch: int, logs: Any) -> None:
        for data in ((x, y), (training.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(7), comm=comm),)):
            found.append(model.evaluate(*data, batch_size=7 if len(data) > 1 else None, verbose=0))

    data = training.shard(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), comm=comm)
    callback = keras.callbacks.LambdaCallback(on_epoch_end=evaluate)
    training.fit(model, data, validation_data=([x], y, None), callbacks=callback, verbose=0, comm=comm)
    return found, model.evaluate(x, y, batch_size=7, verbose=0)


@pytest.mark.rank_counts(2)
def test_callbacks_evaluate_as_in_one_process(pool: Pool) -> None:
    for found, expected in pool.run(_evaluated_in_a_callback):
        np.testing.assert_allclose(found, [expected] * 2, rtol=1e-6)


def _rows_of_lists(comm: Any) -> Any:
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.trainer import validation_rows

    data = tf.ragged.constant([[1], [2, 3], [], [4, 5, 6], [7]]), np.arange(5)
    batches = validation_rows(open_channel(comm), data, 4, [])
    return [(x.to_list(), y.numpy().tolist()) for x, y in batches]


@pytest.mark.rank_counts(2)
def test_ranks_evaluate_their_rows_of_lists(pool: Pool) -> None:
    assert pool.run(_rows_of_lists) == [
        [([[1], [2, 3]], [0, 1]), ([[7]], [4])],
        [([[], [4, 5, 6]], [2, 3]), ([], [])],
    ]


def _save(comm: Any, folder: str) -> list[str]:
    import keras

    from matex_data import training

    model = problems.perceptron(seed=1)
    problems.compiled(model, _optimizer("adam"))
    for _ in range(2):
        training.fit(model, problems.shard(problems.table(24), 12, comm.rank, comm.size), comm=comm, verbose=0)
    if comm.size > 1:
        killed = f"{platform.node()}~{2**22 + 1}~{comm.rank}"
        Path(folder, f".{killed}-last.keras").write_bytes(b"half")
    for _ in range(8):
        model.save(f"{folder}/last.keras")
        model.save_weights(f"{folder}/last.weights.h5")
        loaded = keras.saving.load_model(f"{folder}/last.keras")
        problems.perceptron(seed=2).load_weights(f"{folder}/last.weights.h5")
        for one, other in zip(problems.weights(loaded), problems.weights(model), strict=True):
            np.testing.assert_array_equal(one, other)
    comm.barrier()
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.rank_counts(2, slow=(1, 3))
def test_all_ranks_save_to_one_path(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(_save, str(tmp_path), timeout=120) == [["last.keras", "last.weights.h5"]] * pool.size
