"""``training.fit``: weights and logs on any number of ranks equal those of one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tests.support import problems
from tests.support.ranks import Pool, Pools

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "momentum": ("SGD", {"learning_rate": 0.1, "momentum": 0.9}),
    "adam": ("Adam", {"learning_rate": 0.01}),
}


QUICK = [("momentum", 250), ("adam", 241)]


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
