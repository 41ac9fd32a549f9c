"""Digests of data, and the ranks on which data differ."""

from __future__ import annotations

import time
from typing import Any

import hypothesis
import hypothesis.extra.numpy
import numpy as np
import pytest

from matex_data._types import Array
from tests.support.machine_speed import scaled
from tests.support.ranks import Pool, Pools

SIZES = (1, 2, 3)


@hypothesis.given(
    array=hypothesis.extra.numpy.arrays(
        hypothesis.extra.numpy.scalar_dtypes(), hypothesis.extra.numpy.array_shapes(min_dims=0, max_dims=3, min_side=0)
    )
)
def test_a_digest_does_not_depend_on_the_memory_layout(array: Array) -> None:
    from matex_data.training.exact.digests import content_digest

    expected = content_digest(array)
    assert content_digest(array.copy(order="F")) == expected
    apart = np.repeat(array, 2, -1)[..., ::2] if array.ndim else array
    assert content_digest(apart) == expected


@pytest.mark.parametrize("dtype", ["i1", "f4", "f8", "U5", "S3", "O", "M8[s]"])
def test_another_order_or_value_changes_the_digest(dtype: str) -> None:
    from matex_data.training.exact.digests import content_digest

    rows = np.arange(100).astype(dtype).reshape(50, 2)
    changed = rows.copy()
    changed[49, 1] = rows[0, 0]
    digests = [content_digest(array) for array in (rows, rows[::-1], changed, rows[:, ::-1])]
    assert len(set(digests)) == 4


def test_of_a_large_array_blocks_are_read() -> None:
    """Rows that overlap in memory: 64 GB, of which reading all would take 30 s."""
    from matex_data.training.exact.digests import content_digest

    numbers = np.arange((1 << 24) + 1023, dtype="f4")
    array = np.lib.stride_tricks.as_strided(numbers, (1 << 24, 1024), (4, 4))
    begin = time.perf_counter()
    first = content_digest(array)
    assert time.perf_counter() - begin < scaled(10)
    assert content_digest(array[::-1]) != first
    numbers[-1] = 0
    assert content_digest(array) != first


def test_structure_is_compared_first() -> None:
    import tensorflow as tf

    from matex_data.training.exact.digests import leaf_digests

    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    data = ({"image": np.zeros((2, 3), "f4"), "table": [np.ones(3)]}, [1, 2], None, ragged, iter("ab"))
    assert [(leaf.path, leaf.kind) for leaf in leaf_digests(data)] == [
        ("[0]['image']", "float32[2, 3]"),
        ("[0]['table'][0]", "float64[3]"),
        ("[1]", "int64[2]"),
        ("[2]", "None"),
        ("[3]", "RaggedTensor of float32[3], int64[3]"),
        ("[4]", "str_ascii_iterator"),
    ]


def _same(comm: Any) -> Any:
    from matex_data.training.comm.channel import open_channel
    from matex_data.training.exact.digests import check_same, difference

    channel = open_channel(comm)
    data = {"x": np.random.default_rng(0).normal(size=(1000, 7)), "y": np.array(["a", "b"], object), "n": None}
    check_same(channel, "fit()", data)
    return difference(channel, data)


@pytest.mark.rank_counts(*SIZES)
def test_equal_data(pool: Pool) -> None:
    assert pool.run(_same) == [None] * pool.size


def _sharded(comm: Any) -> Any:
    import tensorflow as tf

    from matex_data import training
    from matex_data.training.comm.channel import open_channel
    from matex_data.training.exact.digests import difference

    channel = open_channel(comm)
    dataset = training.shard(tf.data.Dataset.range(4).batch(4), comm=comm)
    mixed = dataset if comm.rank == 0 else np.zeros(4)
    return difference(channel, dataset), str(difference(channel, mixed))


def test_sharded_data_is_not_compared(ranks: Pools) -> None:
    message = "the data on rank 1 differs: float64[4], not sharded"
    assert ranks(2).run(_sharded) == [(None, message)] * 2


def _different(comm: Any, case: str) -> str:
    from matex_data.errors import PartitionError
    from matex_data.training.comm.channel import open_channel
    from matex_data.training.exact.digests import check_same

    last = comm.rank == comm.size - 1
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6)
    data: Any = {
        "order": {"x": x[::-1] if last else x, "y": y},
        "rows": {"x": x, "y": y[: 6 - last]},
        "dtype": {"x": [x, y.astype("i4" if last else "i8")]},
        "leaves": {"x": x} if last else {"x": x, "y": y},
        "names": {"x": x, "z" if last else "y": y},
        "all": {"x": x + comm.rank},
    }[case]
    try:
        check_same(open_channel(comm), "fit()", data)
    except PartitionError as error:
        return str(error)
    return ""


CASES = {
    "order": "x on rank {last} differs: other values of float64[6, 2]",
    "rows": "y on rank {last} differs: int64[5], not int64[6]",
    "dtype": "x[1] on rank {last} differs: int32[6], not int64[6]",
    "leaves": "the data on rank {last} differs: 1 leaves, not 2",
    "names": "y on rank {last} differs: z in its position",
    "all": "x on rank{others} differs: other values of float64[6, 2]",
}


@pytest.mark.rank_counts(2, 3)
@pytest.mark.parametrize("case", CASES)
def test_different_data_is_one_error_on_all_ranks(case: str, pool: Pool) -> None:
    messages = pool.run(_different, case)
    assert len(set(messages)) == 1
    others = " 1" if pool.size == 2 else "s 1, 2"
    assert f"found: {CASES[case].format(last=pool.size - 1, others=others)}" in messages[0]
    assert "fit()" in messages[0] and "remedy: sort" in messages[0]
