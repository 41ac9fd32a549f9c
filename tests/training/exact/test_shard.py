"""``training.shard``: rows of each rank, weights of unequal shards, and errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.support.ranks import Pool, Pools

SIZES = [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]


def _rows(comm: Any, rows: int, batch: int, remainder: Any) -> list[list[int]]:
    import tensorflow as tf

    from matex_data import training

    dataset = tf.data.Dataset.range(rows).batch(batch)
    return [x.numpy().tolist() for x in training.shard(dataset, remainder=remainder, comm=comm)]


def _autotuning(comm: Any, wanted: bool | None) -> Any:
    import tensorflow as tf

    from matex_data import training

    options = tf.data.Options()
    if wanted is not None:
        options.autotune.enabled = wanted
    batches = tf.data.Dataset.range(8).batch(4).with_options(options)
    return training.shard(batches, comm=comm).options().autotune.enabled


@pytest.mark.parametrize(("wanted", "found"), [(None, False), (True, True)])
def test_autotuning_is_off_unless_asked_for(ranks: Pools, wanted: bool | None, found: bool) -> None:
    assert ranks(2).run(_autotuning, wanted) == [found] * 2


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("rows", "batch"), [(24, 12), (29, 12), (25, 12), (12, 5)])
def test_ranks_split_the_rows_of_each_batch(size: int, rows: int, batch: int, ranks: Pools) -> None:
    everyone = ranks(size).run(_rows, rows, batch, "keep")
    for number, shards in enumerate(zip(*everyone, strict=True)):
        whole = list(range(number * batch, min(rows, (number + 1) * batch)))
        expected = [list(own) for own in np.array_split(whole, size)]
        assert [own or whole[:1] for own in expected] == list(shards)  # the first row stands in where there is none


@pytest.mark.parametrize("size", SIZES)
def test_unequal_batches_are_dropped(size: int, ranks: Pools) -> None:
    everyone = ranks(size).run(_rows, 29, 12, "drop")
    assert [len(batch) for batches in everyone for batch in batches] == [12 // size] * 2 * size
    assert sorted(row for batches in everyone for batch in batches for row in batch) == list(range(24))


def _data(rows: int) -> Any:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, 5)).astype("float32")
    return x, (x[:, :1] * 2 + 1).astype("float32")


def _model() -> Any:
    import keras

    keras.utils.set_random_seed(2)
    return keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])


def _trained(comm: Any, rows: int, case: str) -> list[Any]:
    """Return the weights after three epochs of a loop over batches of 12 rows."""
    import keras
    import tensorflow as tf

    from matex_data import training

    model, graph = _model(), "eager" not in case
    optimizer = keras.optimizers.Adam(0.01)
    train = tf.data.Dataset.from_tensor_slices(_data(rows)).batch(12)
    valid = tf.data.Dataset.from_tensor_slices(_data(7)).batch(4)
    if comm.size > 1:
        optimizer = training.distribute(optimizer, comm)
        train, valid = (training.shard(dataset, comm=comm) for dataset in (train, valid))
    if case == "mapped":
        train = train.map(lambda x, y: (x, y))

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    step = tf.function(step) if graph else step
    for _ in range(3):
        for number, (x, y) in enumerate(train):
            if case == "inner" and number == 1:
                for a, _ in valid:
                    model(a)
            step(x, y)
        for a, _ in valid.take(1) if case == "left" else valid:
            model(a)
    return [variable.numpy() for variable in model.trainable_variables]


LOOPS = [
    *(pytest.param("graph", rows, marks=pytest.mark.slow) for rows in (36, 41)),
    ("graph", 37),
    ("eager", 37),
    ("inner", 41),
    *(pytest.param(case, rows, marks=pytest.mark.slow) for case, rows in (("left", 37), ("mapped", 41))),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("case", "rows"), LOOPS)
def test_weights_equal_one_process(case: str, rows: int, size: int, ranks: Pools) -> None:
    (expected,) = ranks(1).run(_trained, rows, case)
    for weights in ranks(size).run(_trained, rows, case):
        for mine, reference in zip(weights, expected, strict=True):
            np.testing.assert_allclose(mine, reference, rtol=1e-4, atol=1e-6)


def _refused(comm: Any, case: str) -> str:
    import tensorflow as tf

    from matex_data import training

    plain = tf.data.Dataset.range(10).batch(6)
    try:
        _REFUSED[case](tf, training, comm, plain)
    except (TypeError, ValueError, Exception) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def _step(training: Any, comm: Any, tf: Any) -> None:
    import keras

    variable = keras.Variable(1.0)
    optimizer = training.distribute(keras.optimizers.SGD(0.1), comm)
    optimizer.apply([tf.constant(1.0)], [variable])


def _zipped(tf: Any, training: Any, comm: Any, plain: Any) -> None:
    one = training.shard(plain.concatenate(plain), comm=comm)
    other = training.shard(tf.data.Dataset.range(20).batch(5), comm=comm)
    for _ in zip(one, other, strict=True):
        _step(training, comm, tf)


def _accumulated(tf: Any, training: Any, comm: Any, plain: Any) -> None:
    for number, _ in enumerate(training.shard(tf.data.Dataset.range(11).batch(6).repeat(2), comm=comm)):
        if number % 2:
            _step(training, comm, tf)


def _after_the_loop(tf: Any, training: Any, comm: Any, plain: Any) -> None:
    for _ in training.shard(tf.data.Dataset.range(9).batch(5), comm=comm):  # 5 rows, then 4
        pass
    _step(training, comm, tf)


def _by_keras(tf: Any, training: Any, comm: Any, plain: Any) -> None:
    import keras

    model = _model()
    model.compile(training.distribute(keras.optimizers.SGD(0.1), comm), "mse")
    data = training.shard(tf.data.Dataset.from_tensor_slices(_data(10)).batch(5), comm=comm)
    model.evaluate(data, verbose=0)
    model.fit(data, verbose=0)


def _in_a_graph(tf: Any, training: Any, comm: Any, plain: Any) -> None:
    sharded = training.shard(tf.data.Dataset.range(10).batch(5), comm=comm)

    @tf.function
    def total() -> Any:
        result = tf.constant(0, tf.int64)
        for x in sharded:
            result += tf.reduce_sum(x)
        return result

    total()


def _as_an_argument(tf: Any, training: Any, comm: Any, plain: Any) -> None:
    sharded = training.shard(tf.data.Dataset.range(10).batch(5), comm=comm)
    tf.function(lambda iterator: next(iterator))(iter(sharded))


_REFUSED: dict[str, Callable[..., None]] = {
    "an array": lambda tf, training, comm, plain: training.shard(np.ones((4, 2)), comm=comm),
    "samples": lambda tf, training, comm, plain: training.shard(plain.unbatch(), comm=comm),
    "sharded": lambda tf, training, comm, plain: training.shard(training.shard(plain, comm=comm), comm=comm),
    "remainder": lambda tf, training, comm, plain: training.shard(plain, remainder="pad", comm=comm),
    "none left": lambda tf, training, comm, plain: training.shard(
        tf.data.Dataset.range(10).batch(5, drop_remainder=True), remainder="drop", comm=comm
    ),
    "zip": _zipped,
    "accumulated": _accumulated,
    "after": _after_the_loop,
    "keras": _by_keras,
    "graph": _in_a_graph,
    "argument": _as_an_argument,
}
TEXTS = {
    "an array": "TypeError: shard expects a tf.data.Dataset of batches, not ndarray",
    "samples": "ValueError: the elements of this dataset are not known to be batches",
    "sharded": "ValueError: this dataset is sharded already",
    "remainder": "ArgumentError: training.shard() takes no remainder= of this kind",
    "none left": "ValueError: batches of 5 rows cannot be split equally over 2 ranks",
    "zip": "PartitionError: batches with different row counts per rank were taken since the last training step",
    "accumulated": "PartitionError: batches with different row counts per rank were taken since the last training step",
    "after": "PartitionError: batches with different row counts per rank were taken since the last training step",
    "keras": "PartitionError: model.fit trains on batches with unequal row counts per rank",
    "graph": "PartitionError: a tf.function iterates over batches with unequal row counts per rank",
    "argument": "PartitionError: a tf.function iterates over batches with unequal row counts per rank",
}


@pytest.mark.parametrize("case", TEXTS)
def test_inexact_use_is_an_error(case: str, ranks: Pools) -> None:
    for text in ranks(2).run(_refused, case):
        assert TEXTS[case] in text
        assert "remedy: " in text


def _evaluated(pool: Any) -> float:
    import tensorflow as tf

    from matex_data import training

    sharded = training.shard(tf.data.Dataset.range(96).batch(24), comm=pool)
    means = [float(tf.reduce_mean(tf.cast(x, tf.float32))) for x in sharded]
    return float(training.allreduce(tf.constant(np.mean(means), tf.float32), comm=pool))


@pytest.mark.openmpi
def test_losses_of_ranks_become_global(pool: Pool) -> None:
    assert pool.run(_evaluated) == [pytest.approx(47.5)] * pool.size
