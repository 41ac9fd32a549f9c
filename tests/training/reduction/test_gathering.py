"""Arrays and objects of all ranks against mpi4py, exact sums of integers, and errors on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.ranks import Pool, Pools

ARRAYS = {
    "uneven": lambda rank: np.arange(rank * 3, dtype="f4").reshape(rank, 3),
    "numbers": lambda rank: rank / 2,
    "texts": lambda rank: np.array(["x" * (rank + 1)] * rank),
    "objects": lambda rank: np.array([{"rank": rank}], object),
    "times": lambda rank: np.array(["2020-01-01"], "M8[s]") + rank,
}


def _gathered(comm: Any, case: str) -> Any:
    from matex_data import training

    own = ARRAYS[case](comm.rank)
    return training.allgather(own, comm=comm), _expected(comm.allgather(np.atleast_1d(own)))


def _expected(arrays: list[Any]) -> Any:
    return np.concatenate([array for array in arrays if len(array)] or arrays)


@pytest.mark.openmpi
@pytest.mark.product
@pytest.mark.parametrize("case", ARRAYS)
def test_rows_of_all_ranks(case: str, pool: Pool) -> None:
    for found, expected in pool.run(_gathered, case):
        assert found.dtype.kind == expected.dtype.kind
        np.testing.assert_array_equal(found, expected)


def _texts_in_a_graph(comm: Any) -> Any:
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.reduction.ops import broadcast_from_root, gather_rows

    channel = open_channel(comm)

    @tf.function
    def run(texts: Any) -> Any:
        return gather_rows(channel, [texts]), broadcast_from_root(channel, [texts[:1]])

    (gathered,), (first,) = run(tf.fill([comm.rank + 1, 2], f"rank {comm.rank}"))
    return gathered.numpy().tolist(), first.numpy().tolist()


def test_texts_of_all_ranks_in_a_graph(pool: Pool) -> None:
    rows = [[f"rank {rank}".encode()] * 2 for rank in range(pool.size) for _ in range(rank + 1)]
    assert pool.run(_texts_in_a_graph, timeout=60) == [(rows, [[b"rank 0"] * 2])] * pool.size


def _in_a_graph(comm: Any) -> Any:
    import tensorflow as tf

    from matex_data import training

    gather = tf.function(lambda x: training.allgather(x, comm=comm))
    scalar = training.allgather(tf.constant(comm.rank), comm=comm)
    return gather(tf.fill([comm.rank + 1, 2], comm.rank)).numpy().tolist(), scalar.numpy().tolist()


def test_tensors_in_graphs(pool: Pool) -> None:
    rows = [[rank] * 2 for rank in range(pool.size) for _ in range(rank + 1)]
    assert pool.run(_in_a_graph) == [(rows, list(range(pool.size)))] * pool.size


def _broadcast(comm: Any, root: int) -> Any:
    from matex_data import training

    value = {"rank": comm.rank, "array": np.full(1 << 18, comm.rank)}
    return training.broadcast_object(value if comm.rank == root else None, root, comm=comm)


@pytest.mark.openmpi
def test_objects_of_any_rank(pool: Pool) -> None:
    for root in (0, pool.size - 1):
        for found in pool.run(_broadcast, root):
            assert found["rank"] == root
            assert (found["array"] == root).all()


def _waits(comm: Any) -> tuple[float, float]:
    import time

    from matex_data import training

    training.barrier(comm=comm)
    time.sleep(0.2 * (comm.rank == comm.size - 1))
    reached = time.monotonic()
    training.barrier(comm=comm)
    return reached, time.monotonic()


@pytest.mark.openmpi
def test_a_barrier_waits_for_the_last_rank(pool: Pool) -> None:
    times = pool.run(_waits)
    assert min(left for _, left in times) >= max(reached for reached, _ in times)


def _fails(comm: Any, case: str) -> str:
    import tensorflow as tf

    from matex_data import training

    try:
        if case == "shapes":
            training.allgather(np.zeros((1, comm.rank + 1)), comm=comm)
        elif case == "tensors":
            training.allgather(tf.zeros((1, comm.rank + 1)), comm=comm)
        elif case == "graph":
            tf.function(lambda x: training.allgather(x, comm=comm))(tf.zeros(1, "int32" if comm.rank else "float32"))
        elif case == "dtypes":
            training.allgather(np.zeros(1, "i4" if comm.rank else "f4"), comm=comm)
        elif case == "pickle":
            training.broadcast_object(lambda: None, 1, comm=comm)
        elif case == "root":
            training.broadcast_object(None, comm.size, comm=comm)
        else:
            training.barrier(comm=comm) if comm.rank else training.allgather([1], comm=comm)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


TEXTS = {
    "shapes": ("PartitionError", "(2,) on rank 1"),
    "tensors": ("PartitionError", "(2,) on rank 1"),
    "graph": ("", "the ranks do not do the same operation"),
    "dtypes": ("PartitionError", "int32 of shape () on rank 1"),
    "pickle": ("PartitionError", "on rank 1: "),
    "root": ("PartitionError", "root= from 0 to 1"),
    "mixed": ("RuntimeError", "the ranks do not do the same operation"),
}


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize("case", TEXTS)
def test_errors_are_those_of_all_ranks(case: str, pool: Pool) -> None:
    kind, text = TEXTS[case]
    errors = pool.run(_fails, case)
    assert all(error.startswith(kind) and text in error for error in errors), errors
    assert case in ("mixed", "graph") or len(set(errors)) == 1


def _integer_sum(comm: Any, dtype: str, values: list[int], graph: bool) -> Any:
    import tensorflow as tf

    from matex_data import training

    own = tf.constant([values[comm.rank], -(comm.rank + 1) if dtype[0] == "i" else comm.rank], dtype)

    def total() -> Any:
        return training.allreduce({"a": own, "b": tf.constant(0.5)}, "sum", comm=comm)

    try:
        found = (tf.function(total) if graph else total)()
    except tf.errors.InvalidArgumentError as error:
        return "does not fit into" in str(error) and dtype in str(error)
    assert found["a"].dtype == own.dtype
    assert float(found["b"]) == comm.size / 2
    return [int(x) for x in found["a"].numpy()]


SUMS = [
    ("uint8", [200, 30, 25]),
    ("uint8", [200, 30, 26]),
    ("int8", [-100, -20, -8]),
    ("int8", [-100, -20, -9]),
    ("int32", [2**31 - 1, -5, 5]),
    ("int32", [2**31 - 1, 1, 0]),
    ("uint32", [2**32 - 1, 0, 1]),
    ("int64", [2**63 - 1, 2**62, -(2**62)]),
    ("int64", [2**63 - 1, 1, 0]),
    ("int64", [-(2**63), 2**53 + 1, 7]),
    ("uint64", [2**64 - 8, 4, 3]),
    ("uint64", [2**64 - 8, 4, 4]),
]


@pytest.mark.parametrize(("dtype", "values"), SUMS)
def test_sums_of_integers_are_exact_or_an_error(dtype: str, values: list[int], ranks: Pools) -> None:
    limits, total = np.iinfo(dtype), sum(values)  # Python's integers have no limit
    fits = limits.min <= total <= limits.max
    second = -6 if dtype[0] == "i" else 3
    for graph in (False, True):
        assert ranks(3).run(_integer_sum, dtype, values, graph) == [[total, second] if fits else True] * 3
