"""Gradients that an optimizer adds up over steps are averaged once for each update, as one process does."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import problems
from tests.support.ranks import Pool, Pools
from tests.training.average.test_once import _sent
from tests.training.test_exact import embedding, half, overflowing

BATCH, STEPS = 24, 4
KINDS: dict[str, dict[str, Any]] = {
    "clipped": {"learning_rate": 0.3, "global_clipnorm": 0.1},
    "averaged": {"learning_rate": 0.1, "use_ema": True, "weight_decay": 0.01},
    "uneven": {"learning_rate": 0.1, "momentum": 0.9, "clipvalue": 0.02},
    "float16": {"learning_rate": 0.05},
    "sparse": {"learning_rate": 0.1},
}


def _model(kind: str) -> Any:
    import keras

    builders = {"float16": half, "sparse": embedding}
    model, loss = builders[kind]() if kind in builders else (problems.perceptron(), None)
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(gradient_accumulation_steps=STEPS, **KINDS[kind]), loss)
    return model


def _arrays(kind: str) -> Any:
    if kind == "float16":
        return overflowing(240)
    if kind == "sparse":
        x = np.random.default_rng(3).integers(1, 40, (240, 7)).astype(np.int32)
        return x, x % 3
    return problems.table(241 if kind == "uneven" else 240)


def _trained(comm: Any, kind: str, epochs: list[int], folder: str = "", alone: bool = False) -> Any:
    """Return the weights, the optimizer's state, and the bytes that were sent, for each call of ``fit``."""
    from matex_data import training

    model, found = _model(kind), []
    rank, size = (0, 1) if alone else (comm.rank, comm.size)
    data = problems.shard(_arrays(kind), BATCH, rank, size)
    for number, end in enumerate(epochs):
        options = {"checkpoint": f"{folder}/{number}", "save_every": 3} if folder else {}
        start = 0 if number == 0 else epochs[number - 1]
        with _sent() as sent:
            if alone:
                model.fit(data, initial_epoch=start, epochs=end, verbose=0)
            else:
                options |= {"verify": "never", "comm": comm, "initial_epoch": start}
                training.fit(model, data, epochs=end, verbose=0, **options)
        state = [np.array(v.value) for v in model.optimizer.variables if "iteration" not in v.path]
        found.append((problems.weights(model), state, sum(nbytes for nbytes in sent if nbytes > 300)))
    return found, int(model.optimizer.iterations)


@pytest.mark.rank_counts(2, 3, slow=(1, 4))
@pytest.mark.parametrize("kind", ["clipped", "uneven", "float16", pytest.param("averaged", marks=pytest.mark.slow)])
def test_weights_and_state_are_those_of_one_process(ranks: Pools, pool: Pool, kind: str) -> None:
    ((expected, count),) = ranks(1).run(_trained, kind, [1, 3], alone=True)
    results = pool.run(_trained, kind, [1, 3], timeout=120)
    assert all(iterations == count for _, iterations in results)
    for number in range(2):  # the first fit ends within an accumulation
        for part in range(2):
            of_ranks = [found[number][part] for found, _ in results]
            problems.assert_same_weights(of_ranks, expected[number][part], 5e-3 if kind == "float16" else 1e-5)


def _trained_after_error(comm: Any, alone: bool = False) -> Any:
    """Train again after an error within an accumulation, which the script catches."""
    import keras

    from matex_data import training

    def fail(batch: int, logs: Any) -> None:
        if batch == 5:
            raise ZeroDivisionError

    model = _model("clipped")
    data = problems.shard(_arrays("clipped"), BATCH, 0 if alone else comm.rank, 1 if alone else comm.size)
    for callbacks in [[keras.callbacks.LambdaCallback(on_train_batch_end=fail)], []]:
        with contextlib.suppress(ZeroDivisionError):
            if alone:
                model.fit(data, verbose=0, callbacks=callbacks)
            else:
                training.fit(model, data, verbose=0, callbacks=callbacks, comm=comm, verify="never")
    return problems.weights(model)


@pytest.mark.rank_counts(2)
def test_what_is_added_up_before_an_error_counts_for_all_ranks(ranks: Pools, pool: Pool) -> None:
    (expected,) = ranks(1).run(_trained_after_error, alone=True)
    problems.assert_same_weights(pool.run(_trained_after_error, timeout=120), expected)


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize(("kind", "calls"), [("clipped", 2), ("sparse", 10)])
def test_what_is_added_up_is_sent_once(pool: Pool, kind: str, calls: int) -> None:
    nbytes = {"clipped": 4 * (6 * 16 + 16 + 16 * 3 + 3), "sparse": 0}[kind]
    for found, _ in pool.run(_trained, kind, [1], timeout=120):
        if kind == "sparse":
            assert found[0][2] >= calls * 4 * 7 * BATCH // 2 * 5
        else:
            rest = 2 * nbytes  # added up since the last update: averaged in float64 at the end of the epoch
            assert found[0][2] == calls * nbytes + rest


@pytest.mark.rank_counts(2)
def test_a_checkpoint_within_an_accumulation_resumes_on_other_ranks(ranks: Pools, pool: Pool, tmp_path: Path) -> None:
    ((expected, _),) = ranks(1).run(_trained, "clipped", [1], alone=True)
    folder = str(tmp_path)
    results = pool.run(_trained, "clipped", [1], folder, timeout=120)
    problems.assert_same_weights([found[0][0] for found, _ in results], expected[0][0])
    ((after, _),) = ranks(1).run(_trained, "clipped", [3], alone=True)
    resumed = ranks(3).run(_resumed, f"{folder}/0", timeout=120)
    problems.assert_same_weights(resumed, after[0][0])


def _resumed(comm: Any, folder: str) -> Any:
    from matex_data import training

    model = _model("clipped")
    data = problems.shard(_arrays("clipped"), BATCH, comm.rank, comm.size)
    training.fit(model, data, epochs=3, verbose=0, comm=comm, checkpoint=folder)
    return problems.weights(model)
