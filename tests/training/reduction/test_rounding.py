"""Gradients that are sent in 16 bits: sums in float32 of rounded values, with the same bits on all ranks."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support import problems
from tests.support.ranks import Pool, Pools, RanksFailed

STRATEGIES = ["chained", "funneled", "concurrent"]
DTYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (2,), (7, 3), (0, 4), (1001,), (400, 351)]
"""Fewer elements than ranks, none, and more than a bucket of several tensors has."""


def _values(rank: int, shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng([rank, *shape])
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-6, 4, shape)).astype(np.float32)


def _sent_and_summed(values: list[Any], weights: list[float], dtype: Any) -> Any:
    """Return the sum of rounded products, added in float32 in the order of ranks, and rounded."""
    with np.errstate(over="ignore", invalid="ignore"):
        products = [v * np.float32(w) if w else np.zeros_like(v) for v, w in zip(values, weights, strict=True)]
        total = functools.reduce(np.add, [product.astype(dtype).astype(np.float32) for product in products])
        return total.astype(dtype).astype(np.float32)


def _averages(comm: Any, strategy: Any, wire_dtype: Any, weights: list[float], bucket_bytes: int) -> Any:
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import Reducer

    reducer = Reducer(open_channel(comm), strategy, bucket_bytes, wire_dtype=wire_dtype)
    tensors = [tf.constant(_values(comm.rank, shape)) for shape in SHAPES]
    graph = tf.function(lambda: reducer.average(tensors, tf.constant(weights[comm.rank], tf.float64)))()
    eager = reducer.average(tensors, weights[comm.rank])
    return [x.numpy() for x in graph], [x.numpy() for x in eager]


@pytest.mark.rank_counts(2, 3, slow=(4,))
@pytest.mark.parametrize("wire_dtype", DTYPES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rounded_values_are_summed_in_float32(pool: Pool, strategy: str, wire_dtype: str) -> None:
    weights = [0.0, 0.6, 0.4, 0.0][-pool.size :] if pool.size > 2 else [0.7, 0.3]
    expected = [
        _sent_and_summed([_values(rank, shape) for rank in range(pool.size)], weights, DTYPES[wire_dtype])
        for shape in SHAPES
    ]
    for found in pool.run(_averages, strategy, wire_dtype, weights, 1000):
        for result in found:
            assert [x.tobytes() for x in result] == [x.tobytes() for x in expected]


class _ManyRanks:
    """Collectives of the only rank that computes: it has the sections of all ranks."""

    slice_bytes = 1 << 30

    def __init__(self, sections: Any) -> None:
        self._sections = sections

    def exchange(self, flat: Any) -> Any:
        return self._sections.astype(flat.dtype)

    def gather(self, rows: Any) -> Any:
        return rows


@pytest.mark.parametrize(("ranks", "elements"), [(2, 1_100_001), (4096, 300), (10_000, 2)])
@pytest.mark.parametrize("wire_dtype", DTYPES)
def test_the_values_of_thousands_of_ranks_are_converted_in_few_calls(
    monkeypatch: pytest.MonkeyPatch, wire_dtype: str, ranks: int, elements: int
) -> None:
    from matex_data.training.reduction import rounding

    calls: list[int] = []
    cast = rounding._cast
    monkeypatch.setattr(rounding, "_cast", lambda array, dtype: (calls.append(array.size), cast(array, dtype))[1])
    sections = np.random.default_rng(3).normal(size=(ranks, elements)).astype(np.float32)
    found = sections[0].copy()
    rounding.sum_rounded(_ManyRanks(sections), found, DTYPES[wire_dtype])  # type: ignore[arg-type]
    assert found.tobytes() == _sent_and_summed(list(sections), [1.0] * ranks, DTYPES[wire_dtype]).tobytes()
    assert len(calls) <= 10


SPECIAL = np.array(
    [[np.nan, np.inf, -np.inf, np.inf, 1e5, 6e4, -6e4, 1e-9], [1, 2, 3, -np.inf, 1, 6e4, -6e4, 1e-9]], np.float32
)
"""Values of two ranks: not a number, infinite, too large and too small for float16, and with sums too large for it."""


def _special(comm: Any, wire_dtype: Any) -> Any:
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import Reducer

    reducer = Reducer(open_channel(comm), wire_dtype=wire_dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (result,) = tf.function(lambda: reducer.average([tf.constant(SPECIAL[comm.rank])], 1.0))()
    return result.numpy()


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize("wire_dtype", DTYPES)
def test_values_out_of_range_are_infinite_on_all_ranks(pool: Pool, wire_dtype: str) -> None:
    first, second = pool.run(_special, wire_dtype)
    assert first.tobytes() == second.tobytes()
    np.testing.assert_array_equal(first, _sent_and_summed(list(SPECIAL), [1, 1], DTYPES[wire_dtype]))
    assert np.isinf(first[4:7]).all() == (wire_dtype == "float16")


def _kinds(comm: Any) -> Any:
    """Return averages of float64, float16 and sparse gradients, and a sum that is no gradient."""
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import Reducer

    reducer = Reducer(open_channel(comm), wire_dtype="bfloat16")
    value = tf.constant([1 + 2**-10 * (comm.rank + 1)])  # bfloat16 has no such numbers
    slices = tf.IndexedSlices(value, tf.constant([0]), tf.constant([1]))
    kinds = [tf.cast(value, tf.float64), tf.cast(value, tf.float16), slices, value]
    average = reducer.average(kinds, 0.5)
    assert [x.dtype for x in average] == [x.dtype for x in kinds]
    return [tf.convert_to_tensor(x).numpy().tolist() for x in [*average, *reducer([value], 0.5)]]


@pytest.mark.rank_counts(2)
def test_other_gradients_and_other_sums_are_sent_as_they_are(pool: Pool) -> None:
    exact = [1 + 1.5 * 2**-10]
    assert pool.run(_kinds) == [[exact, [1.0], exact, [1.0], exact]] * 2


def _fit(comm: Any, wire_dtype: Any) -> Any:
    import keras

    from matex_data import training

    model = problems.compiled(problems.perceptron(), keras.optimizers.Adam(0.03))
    data = problems.shard(problems.table(241), 24, comm.rank, comm.size)
    history = training.fit(model, data, epochs=5, comm=comm, wire_dtype=wire_dtype, verbose=0)
    return problems.weights(model), history.history["loss"]


@pytest.mark.rank_counts(2, slow=(3,))
@pytest.mark.parametrize("wire_dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_model_learns_as_in_one_process(ranks: Pools, pool: Pool, wire_dtype: str) -> None:
    ((expected, losses),) = ranks(1).run(_fit, wire_dtype)
    results = pool.run(_fit, wire_dtype)
    problems.assert_same_weights([weights for weights, _ in results], expected, rtol=0.1)
    assert any((a != b).any() for a, b in zip(results[0][0], expected, strict=True))
    for _, found in results:
        np.testing.assert_allclose(found, losses, rtol=0.02)
    assert losses[-1] < 0.9 * losses[0]


def _loop(comm: Any, wire_dtype: Any) -> Any:
    import keras
    import tensorflow as tf

    from matex_data import training

    variable = keras.Variable(np.zeros(2, np.float32))
    optimizer = training.distribute(keras.optimizers.SGD(1.0), comm, wire_dtype=wire_dtype)
    step = tf.function(lambda: optimizer.apply([tf.fill([2], 1 + 2**-10 * (comm.rank + 1))], [variable]))
    step()
    return variable.numpy().tolist()


@pytest.mark.rank_counts(2)
def test_optimizers_send_in_the_dtype_that_is_asked_for(pool: Pool) -> None:
    assert pool.run(_loop, "bfloat16") == [[-1.0, -1.0]] * 2
    assert pool.run(_loop, None) == [[-1 - 1.5 * 2**-10] * 2] * 2


@pytest.mark.rank_counts(1, 2)
def test_an_unknown_dtype_is_an_error(pool: Pool) -> None:
    with pytest.raises(RanksFailed, match=r"takes no wire_dtype= of this kind(.|\n)*'float16', 'bfloat16', or None"):
        pool.run(_loop, "float8")


def _different(comm: Any) -> Any:
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import Reducer

    return Reducer(open_channel(comm), wire_dtype=list(DTYPES)[comm.rank]).average([tf.ones(3)], 0.5)


@pytest.mark.rank_counts(2)
def test_ranks_with_different_dtypes_are_an_error_on_all(pool: Pool) -> None:
    outcomes = pool.outcomes(_different)
    assert all("the ranks do not do the same operation" in str(outcome) for outcome in outcomes)
