"""Training in stages has the weights and the logs of one process that accumulates the same micro-batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.ranks import Pool, Pools
from tests.training.stages.problems import accumulated, in_stages


def _check(pool: Pool, name: str, optimizer: str, stages: int, micro_batches: int, **options: Any) -> None:
    weights, losses = accumulated(name, optimizer, micro_batches, pool.size // stages, 2)
    results = pool.run(in_stages, name, optimizer, stages, micro_batches, timeout=120, **options)
    tolerance = 1e-6 if optimizer in ("sgd", "clipped", "ema") else 1e-5
    for found, logs in results:
        for one, other in zip(found, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(logs["loss"], losses, rtol=1e-5)
        assert logs == results[0][1]


@pytest.mark.openmpi
@pytest.mark.parametrize(("name", "micro_batches", "recompute"), [("skips", 3, False), ("normalized", 5, True)])
@pytest.mark.rank_counts(2, slow=(4,))
def test_two_stages(pool: Pool, name: str, micro_batches: int, recompute: bool) -> None:
    _check(pool, name, "sgd", 2, micro_batches, recompute=recompute)
