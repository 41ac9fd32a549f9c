"""Compare reductions in graphs with NumPy on the values of all ranks, by every strategy."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import Pool, RanksFailed

STRATEGIES = ["chained", "funneled", "concurrent"]


def _values(rank: int, shape: tuple[int, ...], dtype: str = "float32") -> Any:
    return np.random.default_rng(rank).normal(size=shape).astype(dtype)


def _mean(size: int, shape: tuple[int, ...]) -> Any:
    return np.mean([_values(rank, shape).astype(np.float64) for rank in range(size)], axis=0)


def _structure(comm: Any) -> Any:
    import tensorflow as tf

    from matex_data import training

    tensors = {"a": tf.constant(_values(comm.rank, (3, 5))), "b": [None, tf.constant(_values(comm.rank, (700, 3)))]}
    eager = training.allreduce(tensors, comm=comm)
    graph = tf.function(lambda: training.allreduce(tensors, comm=comm)["b"][1])()
    return eager["a"].numpy(), eager["b"][0], eager["b"][1].numpy(), graph.numpy()


def _conversions(comm: Any) -> tuple[list[str], int]:
    from unittest import mock

    import keras
    import tensorflow as tf
    from tensorflow.python.autograph.impl import api

    from matex_data import training

    optimizer = training.distribute(keras.optimizers.SGD(), comm=comm.Dup())  # with counters of its own
    variable = keras.Variable([1.0])
    optimizer.build([variable])
    converted: list[str] = []

    def convert(function: Any, context: Any) -> Any:
        converted.append(f"{function.__module__}.{function.__qualname__}")
        return original(function, context)

    original = api._convert_actual
    with mock.patch.object(api, "_convert_actual", convert):
        step = tf.function(lambda: optimizer.apply([tf.constant([1.0])], [variable]))
        step()
    return converted, step.experimental_get_tracing_count()


@pytest.mark.rank_counts(2)
def test_a_step_is_traced_once_and_autograph_converts_nothing_behind_apply(pool: Pool) -> None:
    for converted, traces in pool.run(_conversions):
        assert traces == 1
        ours = {name for name in converted if name.startswith("matex_data.")}
        assert ours == {
            "matex_data.training.average.optimizer._AveragingApply.__call__"
        }  # which calls the rest as it is


def test_structures_eagerly_and_in_graphs(pool: Pool) -> None:
    for a, none, b, graph in pool.run(_structure):
        np.testing.assert_allclose(a, _mean(pool.size, (3, 5)), atol=1e-6)
        np.testing.assert_allclose(b, _mean(pool.size, (700, 3)), atol=1e-6)
        assert none is None
        assert graph.tobytes() == b.tobytes()


def _by_dtype(comm: Any, dtype: str, op: str) -> Any:
    import tensorflow as tf

    from matex_data import training

    values = _values(comm.rank, (33,)) * 10
    if op in ("max", "min") and "float" in dtype:
        values[comm.rank] = np.nan
    mine = tf.cast(tf.constant(np.abs(values) if dtype == "uint8" else values), dtype)
    everyone = np.array(comm.allgather(tf.cast(mine, tf.float64).numpy()))
    result = training.allreduce(mine, op, comm=comm)
    assert result.dtype == mine.dtype
    return everyone, tf.cast(result, tf.float64).numpy()


@pytest.mark.rank_counts(3, slow=(1,))
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "int32", "int64", "uint8"])
@pytest.mark.parametrize("op", ["mean", "sum", "max", "min"])
def test_operations_by_dtype(pool: Pool, dtype: str, op: str) -> None:
    if "int" in dtype if op == "mean" else dtype == "complex64" and op != "sum":
        with pytest.raises(RanksFailed, match=f"cannot compute the {op} of {dtype}"):
            pool.run(_by_dtype, dtype, op)
        return
    for everyone, result in pool.run(_by_dtype, dtype, op):
        expected = getattr(np, op)(everyone, axis=0)
        digits = {"float16": 2e-3, "bfloat16": 1e-2, "float32": 1e-6, "complex64": 1e-6}.get(dtype, 1e-12)
        np.testing.assert_allclose(result, expected, rtol=digits, atol=digits * 10)


def _many(comm: Any, strategy: Any, steps: int) -> Any:
    """Run independent sums in two functions, a loop and a branch."""
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import Reducer

    reducer = Reducer(open_channel(comm), strategy, bucket_bytes=256)
    tensors = [tf.constant(_values(comm.rank, (20 + i,))) for i in range(12)]

    @tf.function
    def inner() -> Any:
        return [tf.reduce_sum(t) for t in reducer(tensors[:6])]

    @tf.function
    def outer() -> Any:
        total = tf.constant(0.0)
        first = reducer(tensors[6:])
        for i in tf.range(3):
            if i < 2:
                total += tf.add_n(inner())
            else:
                total += tf.reduce_sum(reducer([tensors[1]])[0])
        last = reducer(tensors)
        return total, tf.add_n([tf.reduce_sum(t) for t in first]), tf.add_n([tf.reduce_sum(t) for t in last])

    results = [[float(x) for x in outer()] for _ in range(steps)]
    eager = [float(tf.reduce_sum(t)) for t in reducer(tensors)]
    return results, eager


def _sum(size: int, indices: range) -> float:
    return float(sum(_values(rank, (20 + i,)).astype(np.float64).sum() for rank in range(size) for i in indices))


@pytest.mark.openmpi
@pytest.mark.rank_counts(2, slow=(4,))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_order_of_execution_deadlocks(pool: Pool, strategy: str) -> None:
    expected = [
        2 * _sum(pool.size, range(6)) + _sum(pool.size, range(1, 2)),
        _sum(pool.size, range(6, 12)),
        _sum(pool.size, range(12)),
    ]
    for results, eager in pool.run(_many, strategy, 20):
        for result in results:
            np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(eager, [_sum(pool.size, range(i, i + 1)) for i in range(12)], rtol=1e-4, atol=1e-4)


def _skewed(comm: Any) -> Any:
    """Run two sums of one shape concurrently; rank 0 submits the second late."""
    from matex_data.training.comm.channel import open_channel

    channel = open_channel(comm)
    pool = channel.pool(2)

    def operation(value: float) -> Any:
        def communicate(collectives: Any) -> Any:
            channel.check_same("sum of one number", collectives)
            flat = np.array([value])
            collectives.reduce(flat)
            return float(flat[0])

        return communicate

    pool.submit(0, operation(1.0))
    time.sleep(0.5 * (comm.rank == 0))
    pool.submit(1, operation(10.0))
    return [pool.result(0), pool.result(1)]


@pytest.mark.openmpi
@pytest.mark.rank_counts(2, slow=(3,))
def test_threads_check_their_operations_independently(pool: Pool) -> None:
    assert pool.run(_skewed, timeout=20) == [[pool.size, 10.0 * pool.size]] * pool.size


def _slices(comm: Any, dense_share: float | None) -> Any:
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import Reducer

    count = comm.rank  # rank 0 has none
    indices = np.arange(count, dtype=np.int64) * 2 % 5
    slices = tf.IndexedSlices(tf.constant(_values(comm.rank, (count, 4))), tf.constant(indices), tf.constant([5, 4]))
    reducer = Reducer(open_channel(comm), dense_share=dense_share)
    result = tf.function(lambda: reducer([slices], 1 / comm.size)[0])()
    return len(result.indices), tf.convert_to_tensor(result).numpy()


@pytest.mark.parametrize(("dense_share", "dense"), [(None, False), (0.1, True), (10.0, False)])
def test_slices_of_all_ranks(pool: Pool, dense_share: float | None, dense: bool) -> None:
    expected = np.zeros((5, 4))
    for rank in range(pool.size):
        np.add.at(expected, np.arange(rank) * 2 % 5, _values(rank, (rank, 4)).astype(np.float64) / pool.size)
    for count, result in pool.run(_slices, dense_share):
        rows = sum(range(pool.size))
        assert count == (5 if dense and rows else rows)
        np.testing.assert_allclose(result, expected, atol=1e-6)


def _not_a_number(comm: Any, weights: list[float]) -> Any:
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import Reducer

    value = tf.constant([np.nan if comm.rank == 1 else 1.0, 2.0])
    return Reducer(open_channel(comm))([value], tf.constant(weights[comm.rank], tf.float64))[0].numpy()


@pytest.mark.rank_counts(2)
def test_weight_zero_contributes_exact_zeros(pool: Pool) -> None:
    for result in pool.run(_not_a_number, [1.0, 0.0]):
        np.testing.assert_array_equal(result, [1, 2])
    for result in pool.run(_not_a_number, [0.5, 0.5]):
        np.testing.assert_array_equal(result, [np.nan, 2])


def _different(comm: Any) -> Any:
    import tensorflow as tf

    from matex_data import training

    return training.allreduce(tf.zeros(3 + comm.rank), comm=comm).numpy()


@pytest.mark.rank_counts(3)
def test_different_tensors_are_an_error_on_all_ranks(pool: Pool) -> None:
    outcomes = pool.outcomes(_different)
    assert all("the ranks do not do the same operation" in str(outcome) for outcome in outcomes)


def _different_later(comm: Any) -> Any:
    import tensorflow as tf

    from matex_data import training

    for length in (3, 4):
        training.allreduce(tf.zeros(length), comm=comm)
    return training.allreduce(tf.zeros(3 + comm.rank % 2), comm=comm).numpy()


@pytest.mark.openmpi
@pytest.mark.rank_counts(3)
def test_operations_that_all_ranks_know_are_compared_again(pool: Pool) -> None:
    outcomes = pool.outcomes(_different_later)
    assert all("the ranks do not do the same operation" in str(outcome) for outcome in outcomes)


def _swapped(comm: Any) -> Any:
    """Reduce two tensors whose lengths only the run shows; together they are of one length on every rank."""
    import tensorflow as tf

    from matex_data import training

    @tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None])])
    def reduced(a: Any, b: Any) -> Any:
        return training.allreduce([a, b], "sum", comm=comm)

    lengths = (2, 3) if comm.rank == 0 else (3, 2)
    return [x.numpy() for x in reduced(*map(tf.ones, lengths))]


@pytest.mark.rank_counts(2)
def test_lengths_that_only_the_run_shows_are_compared(pool: Pool) -> None:
    outcomes = pool.outcomes(_swapped)
    assert all("the ranks do not do the same operation" in str(outcome) for outcome in outcomes)


def _unknown_shape(comm: Any) -> Any:
    import tensorflow as tf

    from matex_data import training

    @tf.function
    def reduced() -> Any:
        return training.allreduce(tf.numpy_function(lambda: np.ones((2, 3), np.float32), [], tf.float32), comm=comm)

    return reduced().numpy().tolist()


@pytest.mark.rank_counts(2)
def test_tensors_of_unknown_shape(pool: Pool) -> None:
    assert pool.run(_unknown_shape) == [[[1.0] * 3] * 2] * 2


def _eager_bucket(comm: Any, strategy: Any) -> Any:
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import Reducer

    (total,) = Reducer(open_channel(comm), strategy)([tf.fill([3], float(comm.rank + 1))])
    return total.numpy().tolist()


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_single_bucket_in_eager_code(pool: Pool, strategy: str) -> None:
    assert pool.run(_eager_bucket, strategy) == [[3.0] * 3] * 2


def _operations(comm: Any) -> list[str]:
    import keras
    import tensorflow as tf

    from matex_data import training

    variable = keras.Variable(np.ones(3, np.float32))
    optimizer = training.distribute(keras.optimizers.SGD(0.5), comm)
    step = tf.function(lambda: optimizer.apply([tf.ones(3)], [variable]))
    step()
    assert optimizer.get_config()["learning_rate"] == 0.5
    np.testing.assert_allclose(variable.numpy(), 0.5)
    return [operation.type for operation in step.get_concrete_function().graph.get_operations()]


@pytest.mark.rank_counts(1, 2)
def test_graph_of_one_rank_has_no_communication(pool: Pool) -> None:
    for operations in pool.run(_operations):
        assert ("PyFunc" in operations) == (pool.size > 1)


def _buckets(comm: Any, threads: list[int]) -> tuple[int, list[Any]]:
    """Return the number of operations in a graph that reduces two buckets and slices, and their sums."""
    from unittest import mock

    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import Reducer

    reducer = Reducer(open_channel(comm), bucket_bytes=1)
    tensors = [tf.fill([length], float(comm.rank + 1)) for length in (2, 3)]
    slices = tf.IndexedSlices(tf.fill([1, 2], float(comm.rank + 1)), tf.constant([comm.rank]), tf.constant([9, 2]))
    threading = tf.config.threading
    with mock.patch.object(threading, "get_inter_op_parallelism_threads", return_value=threads[comm.rank]):
        step = tf.function(lambda: reducer([*tensors, slices])).get_concrete_function()
    operations = [operation.type for operation in step.graph.get_operations()]
    return operations.count("PyFunc"), [tf.convert_to_tensor(total).numpy().tolist() for total in step()]


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize("threads", [[1, 1], [4, 4], [1, 4]])
def test_a_rank_of_one_thread_reduces_in_one_operation(pool: Pool, threads: list[int]) -> None:
    sums = [[3.0] * 2, [3.0] * 3, [[1.0] * 2, [2.0] * 2, *([0.0] * 2 for _ in range(7))]]
    assert pool.run(_buckets, threads) == [(1 if count == 1 else 3, sums) for count in threads]


def _broadcast(comm: Any, root: int) -> Any:
    import keras
    import tensorflow as tf

    from matex_data import training

    rng = np.random.default_rng(comm.rank)
    shapes = [(), (0,), (3,), (2, 5), (400, 400)]
    kinds = ["bool", "float32", "float16", "bfloat16", "int64", "float64"]
    variables = [keras.Variable(rng.random(shape) * 100, dtype=kind) for shape in shapes for kind in kinds]
    variables.append(tf.Variable(rng.random(7)))
    before = [tf.convert_to_tensor(variable).numpy().tobytes() for variable in variables]
    training.broadcast(variables, root, comm=comm)
    return before, [tf.convert_to_tensor(variable).numpy().tobytes() for variable in variables]


@pytest.mark.parametrize("root", [0, -1])
def test_broadcast(pool: Pool, root: int) -> None:
    by_rank = pool.run(_broadcast, root % pool.size)
    assert [after for _, after in by_rank] == [by_rank[root][0]] * pool.size


def _positions(comm: Any, alike: bool) -> list[str]:
    """Average slices eagerly, with the same indices on all ranks or others; return the messages."""
    from unittest import mock

    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction import payloads
    from matex_data.training.reduction.ops import Reducer

    payloads._warned.clear()
    indices = np.arange(3) + (not alike) * comm.rank
    slices = tf.IndexedSlices(tf.constant(_values(comm.rank, (3, 2))), tf.constant(indices), tf.constant([9, 2]))
    reducer = Reducer(open_channel(comm))
    with mock.patch.object(payloads.log, "warning") as warning:
        for _ in range(2):
            reducer.average([slices], 1 / comm.size)
    return [call.args[0] for call in warning.call_args_list]


@pytest.mark.rank_counts(2)
def test_an_eager_step_with_the_same_indices_on_all_ranks_is_said_once(pool: Pool) -> None:
    (said,), nothing = pool.run(_positions, True)
    assert "tf.function" in said
    assert nothing == []
    assert pool.run(_positions, False) == [[], []]
