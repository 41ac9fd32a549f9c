"""Gradients that are ready in another random order on each rank: no deadlock, and the same averages on all ranks.

TensorFlow runs stateful operations of one graph in program order, also the reductions. Here they are not stateful, and
there is a thread for each gradient, so that only the sequence counter and the communication threads order them.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.support.ranks import Pool, Pools

STRATEGIES = ["chained", "funneled", "concurrent"]
LARGEST = 12
"""Largest number of gradients of a step."""
LONGEST = 2e-3
"""Seconds by which a gradient is late, at most."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pools]:
    """Yield pools of this file alone: the number of threads has to be set before TensorFlow starts them."""
    pools = Pools()
    yield pools
    pools.close()


@dataclass(frozen=True)
class Plan:
    """Gradients of one training step, equal on all ranks; some have equal shapes, some a bucket of their own."""

    number: int

    @property
    def sizes(self) -> list[int]:
        """Return the number of elements of each gradient."""
        rng = np.random.default_rng(self.number)
        count = rng.integers(1, LARGEST + 1)
        if rng.random() < 0.5:
            return [int(rng.integers(1, 3000))] * count
        return [int(size) for size in rng.choice([0, 1, 2, 30, 500, 7000, 150_000], count)]

    @property
    def options(self) -> dict[str, Any]:
        """Return sizes of buckets and dtypes on the wire."""
        rng = np.random.default_rng([1, self.number])
        return {
            "bucket_bytes": int(rng.choice([1, 100, 5000, 1 << 22])),
            "wire_dtype": [None, None, "bfloat16", "float16"][rng.integers(4)],
        }

    def factors(self, rank: int) -> list[Any]:
        """Return the gradients of a rank in step 1; those of step n are n times as large."""
        rng = np.random.default_rng([2, self.number, rank])
        return [rng.normal(size=size).astype(np.float32) for size in self.sizes]


def _step(plan: Plan, comm: Any, strategy: Any, delays: np.random.Generator) -> Any:
    """Return a function of the number of the step: it computes late gradients, and averages them over the ranks."""
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import Reducer

    reducer = Reducer(open_channel(comm), strategy, **plan.options)
    factors = [tf.constant(factor) for factor in plan.factors(comm.rank)]

    def wait(nothing: Any) -> Any:
        time.sleep(delays.random() * LONGEST)
        return np.float32(1)

    @tf.custom_gradient  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def late(x: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return upstream * tf.ensure_shape(tf.numpy_function(wait, [upstream[:0]], tf.float32), ())

        return tf.identity(x), gradient

    @tf.function(autograph=False, input_signature=[tf.TensorSpec((), tf.float32)])
    def step(number: Any) -> Any:
        x = [tf.zeros_like(factor) for factor in factors]
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = number * tf.add_n([tf.reduce_sum(late(a) * b) for a, b in zip(x, factors, strict=True)])
        gradients, weight = tape.gradient(loss, x), 1 / comm.size
        half = len(gradients) // 2
        return reducer.average(gradients[:half], weight) + reducer.average(gradients[half:], weight)

    with mock.patch.object(tf, "numpy_function", functools.partial(tf.numpy_function, stateful=False)):
        return step.get_concrete_function()


def _train(comm: Any, strategy: Any, plans: int, repetitions: int) -> str:
    """Run the steps of all plans in random order; return a digest of all averages."""
    import tensorflow as tf

    tf.config.threading.set_inter_op_parallelism_threads(LARGEST)
    everything = [Plan(number) for number in range(plans)]
    delays = np.random.default_rng([3, comm.rank])
    steps = [_step(plan, comm, strategy, delays) for plan in everything]
    expected = [
        [np.mean(of_ranks, axis=0) for of_ranks in zip(*map(plan.factors, range(comm.size)), strict=True)]
        for plan in everything
    ]
    digest = hashlib.sha256()
    order = np.random.default_rng(4).permuted(np.repeat(np.arange(plans), repetitions))
    for number, index in enumerate(order, start=1):
        averages = [x.numpy() for x in steps[index](tf.constant(number, tf.float32))]
        tolerance = 0.01 if everything[index].options["wire_dtype"] else 1e-5
        for found, mean in zip(averages, expected[index], strict=True):
            np.testing.assert_allclose(found / number, mean, rtol=tolerance, atol=2 * tolerance)
            digest.update(found.tobytes())
    return digest.hexdigest()


@pytest.mark.openmpi
@pytest.mark.rank_counts(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sixty_steps(pool: Pool, strategy: str) -> None:
    assert len(set(pool.run(_train, strategy, 4, 15, timeout=25))) == 1


@pytest.mark.slow
@pytest.mark.openmpi
@pytest.mark.rank_counts(2, 3)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_thousand_steps(pool: Pool, strategy: str) -> None:
    assert len(set(pool.run(_train, strategy, 20, 100, timeout=900))) == 1
