"""A rank that is slower than the others is named once; pauses and even ranks are not reported."""

from __future__ import annotations

import contextlib
import platform
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

from matex_data.training.comm.drift import slow_rank
from tests.support import problems
from tests.support.logs import logged
from tests.support.ranks import Pool

STEP = 0.004  # seconds of sleep in each step of every rank, so that other programs matter less
SLEEP = 0.03
SECONDS = 4.0


@pytest.mark.parametrize(
    ("own", "expected"),
    [([2, 9], 1), ([9, 2, 2, 3], 0), ([5, 7], None), ([6, 6, 6], None), ([9, 9, 2], None), ([2, 9, 9, 9], None)],
)
def test_slow_rank(own: list[float], expected: int | None) -> None:
    assert slow_rank(np.array(own, float), max(own)) == expected


def test_communication_counts_on_neither_side() -> None:
    assert slow_rank(np.array([1.0, 4.0]), 20.0) is None  # a fifteenth of the time


@contextlib.contextmanager
def _quick() -> Iterator[list[str]]:
    """Context manager: compare every 0.4 s, on ranks that share cores, too; yield the warnings."""
    from matex_data.mpi.node import CoreShare
    from matex_data.training.comm import channel, drift

    with (
        logged(drift.log.name) as messages,
        mock.patch.object(channel, "core_share", lambda *ranks: CoreShare.FULL),
        mock.patch.multiple(drift, SECONDS=0.4, REDUCTIONS=10),
    ):
        yield messages


def _loop(comm: Any, delays: dict[int, float], strategy: Any = "chained", pause: float = 0) -> list[str]:
    """Run steps for some seconds; return the warnings of this rank.

    Parameters
    ----------
    delays : seconds by which each step of a rank is longer.
    pause : seconds of a single pause of rank 0.
    """
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import Reducer

    with _quick() as messages:
        reducer = Reducer(open_channel(comm), strategy)
        step = tf.function(lambda: reducer([tf.ones(3), tf.ones(200_000)])[0])
        for number in range(int(SECONDS / (STEP + max(delays.values(), default=0)))):
            time.sleep(STEP + delays.get(comm.rank, 0))
            if number == 100 and comm.rank == 0:
                time.sleep(pause)
            step()
    return messages


@pytest.mark.rank_counts(2, slow=(3,))
@pytest.mark.parametrize(
    "strategy", ["chained", *(pytest.param(other, marks=pytest.mark.slow) for other in ("funneled", "concurrent"))]
)
def test_a_slow_rank_is_named_once_by_rank_0(pool: Pool, strategy: str) -> None:
    first, *others = pool.run(_loop, {1: SLEEP}, strategy)
    assert len(first) == 1
    assert f"rank 1 on {platform.node()} is slower than the other ranks" in first[0]
    assert others == [[]] * (pool.size - 1)


@pytest.mark.slow
@pytest.mark.rank_counts(2, 3)
def test_even_ranks_and_a_pause_are_not_reported(pool: Pool) -> None:
    assert pool.run(_loop, {}, pause=1.5) == [[]] * pool.size


def _fit(comm: Any, slow: int | None, batch: int) -> list[str]:
    """Train with a callback that sleeps after each batch of one rank; return the warnings of this rank."""
    import keras

    from matex_data import training

    class Sleep(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(STEP + (SLEEP if comm.rank == slow else 0))

    with _quick() as messages:
        model = problems.compiled(problems.perceptron(), "sgd")
        data = problems.shard(problems.table(batch * 60), batch, comm.rank, comm.size)
        training.fit(model, data, epochs=2 if slow is None else 3, comm=comm, callbacks=[Sleep()], verbose=0)
    return messages


@pytest.mark.slow
@pytest.mark.rank_counts(2)
def test_a_callback_that_is_slow_on_one_rank(pool: Pool) -> None:
    first, second = pool.run(_fit, 1, 8)
    assert [message.partition(" is slower")[0] for message in first] == [f"rank 1 on {platform.node()}"]
    assert second == []


@pytest.mark.rank_counts(2)
def test_unequal_batches_are_not_reported(pool: Pool) -> None:
    assert pool.run(_fit, None, 5) == [[], []]
