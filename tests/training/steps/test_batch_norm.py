"""Moving statistics of synchronized batch normalization equal those of one process, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support import problems
from tests.support.ranks import Pool, Pools

BATCH = 12


def _model(renorm: bool = False) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    norm = keras.layers.BatchNormalization(momentum=0.5, renorm=renorm)
    layers = [keras.layers.Dense(8, use_bias=False), norm, keras.layers.ReLU(), Steps(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((problems.FEATURES,)), *layers])
    return problems.compiled(model, keras.optimizers.SGD(0.1, momentum=0.9))


def Steps() -> Any:  # noqa: N802 - Keras is imported by the ranks alone
    import keras

    class _Steps(keras.layers.Layer):  # type: ignore[misc]
        """Layer that counts its training batches."""

        def build(self, shape: Any) -> None:
            self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="seen")

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign(self.seen + 1)
            return x

    return _Steps()


def _reference(comm: Any, samples: int, renorm: bool) -> Any:
    model = _model(renorm)
    history = problems.one_process(model, problems.table(samples), BATCH, 3)
    return problems.weights(model), history.history


def _distributed(comm: Any, samples: int, renorm: bool, path: Path | None = None) -> Any:
    import matex_data as md

    model = _model(renorm)
    if path is None:
        data, options = problems.shard(problems.table(samples), BATCH, comm.rank, comm.size), {}
    else:
        data = md.open_dataset(path, inputs="x", targets="y", comm=comm)
        options = {"batch_size": BATCH, "remainder": "keep"}
    history = md.training.fit(model, data, epochs=3, comm=comm, verbose=0, sync_batch_norm=True, **options)
    return problems.weights(model), history.history


@pytest.mark.rank_counts(2, slow=(1, 3))
@pytest.mark.parametrize(("samples", "renorm"), [(37, False), pytest.param(38, True, marks=pytest.mark.slow)])
def test_fewer_rows_than_ranks(ranks: Pools, pool: Pool, samples: int, renorm: bool) -> None:
    (expected, logs), *_ = ranks(1).run(_reference, samples, renorm)
    results = pool.run(_distributed, samples, renorm, timeout=120)
    _compare(results, expected, logs)


@pytest.mark.rank_counts(2, slow=(3,))
def test_remainder_of_a_dataset_is_kept(ranks: Pools, pool: Pool, tmp_path: Path) -> None:
    x, y = problems.table(37)
    with h5py.File(tmp_path / "table.h5", "w") as file:
        file["x"], file["y"] = x, y
    (expected, logs), *_ = ranks(1).run(_reference, 37, False)
    results = pool.run(_distributed, 37, False, tmp_path / "table.h5", timeout=120)
    _compare(results, expected, logs)


def _compare(results: Any, expected: Any, logs: Any) -> None:
    problems.assert_same_weights([weights for weights, _ in results], expected, 2e-5)
    for _, history in results:
        assert history.keys() == logs.keys()
        for key, values in logs.items():
            np.testing.assert_allclose(history[key], values, rtol=2e-5)
