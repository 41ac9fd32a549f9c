"""Check of what is proven: compute a function on a batch and on shards of it, and compare as the proof says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data._types import Array
from matex_data.training.proof.axes import Independent, PerSample, RowCount, State, Total
from matex_data.training.proof.propagate import Followed, follow
from matex_data.training.proof.sizes import ROWS_NAME, Size

SHARDS = ((0, 1, 2, 3, 4), (1, 3), (4,))
"""Rows of the batch that are computed by themselves."""


def followed(function: Callable[..., Any], *specs: tf.TensorSpec) -> Followed:
    """Return what the outputs of a function of per-sample tensors depend on."""
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    return follow(graph, [0] * len(specs))


def check(function: Callable[..., Any], states: Sequence[State], batch: Sequence[Array]) -> None:
    """Check what was proven about the outputs of a function of per-sample arrays of five rows.

    Parameters
    ----------
    states : dependence of each output.
    """
    rows = len(batch[0])
    results = [tf.nest.flatten(function(*(tf.constant(a[list(shard)]) for a in batch))) for shard in SHARDS]
    for i, state in enumerate(states):
        whole, *shards = (np.asarray(result[i]) for result in results)
        for shard, value in zip(SHARDS[1:], shards, strict=True):
            if isinstance(state, PerSample):
                assert whole.shape == tuple(_number(size, rows, n) for size, n in zip(state.shape, whole.shape))  # noqa: B905
                np.testing.assert_allclose(_rows(value, state, len(shard)), _rows(whole, state, rows)[list(shard)],
                                           rtol=1e-4, atol=1e-5)  # fmt: skip
            elif isinstance(state, Independent):
                np.testing.assert_array_equal(value, whole)
        if isinstance(state, Total):
            first, second = (np.asarray(tf.nest.flatten(function(*(tf.constant(a[part]) for a in batch)))[i])
                             for part in (slice(2), slice(2, None)))  # fmt: skip
            weights = (2 / rows, 1 - 2 / rows) if state.mean else (1, 1)
            np.testing.assert_allclose(weights[0] * first + weights[1] * second, whole, rtol=1e-4, atol=1e-5)
        assert not isinstance(state, RowCount) or whole.dtype.kind in "iufb"


def _number(size: Size, rows: int, found: int) -> int:
    """Return the value of a size; sizes with other names than that of the rows may have any."""
    if any(name != ROWS_NAME for name, _ in size.powers):
        return found
    return int(size.number * rows ** sum(power for _, power in size.powers))


def _rows(array: Array, state: PerSample, rows: int) -> Array:
    """Return the array with the rows along its first axis."""
    before = state.before.integer
    assert before is not None
    shape = array.shape
    split = array.reshape(*shape[: state.axis], before, rows, -1, *shape[state.axis + 1 :])
    return np.moveaxis(split, state.axis + 1, 0)
