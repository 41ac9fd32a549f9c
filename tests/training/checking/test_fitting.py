"""Self-check of ``training.fit``: what shards do not train as one process is trained on whole batches, and said."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support import problems
from tests.support.logs import logged
from tests.support.ranks import Pool, Pools

BATCH = 12


def _losses() -> dict[str, Any]:
    import keras
    from keras import ops

    def squares(y: Any, p: Any) -> Any:
        return ops.square(ops.cast(ops.one_hot(y, 3), "float32") - p)

    return {
        "sum": lambda y, p: ops.sum(squares(y, p)) / 8,
        "variance": lambda y, p: ops.mean(squares(y, p)) + ops.mean(ops.var(p, axis=0)),
        "mean": lambda y, p: ops.mean(squares(y, p)),
        "rows": lambda y, p: ops.mean(squares(y, p), -1),
        "keras": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }


def _metrics() -> dict[str, Any]:
    from keras import ops

    def spread(y: Any, p: Any) -> Any:
        return ops.mean(ops.square(p - ops.mean(p, axis=0)), -1)

    def largest(y: Any, p: Any) -> Any:
        return ops.max(p, -1)

    return {"spread": spread, "largest": largest}


def _model(kind: str, executed: int = 1) -> Any:
    import keras
    import tensorflow as tf
    from keras import ops

    class Centered(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x - ops.mean(x, 0)

    class Nested(keras.Sequential):  # type: ignore[misc]
        """Nested gradients: a step from adapted weights."""

        def train_step(self, data: Any) -> Any:
            x, y = data
            weight = self.layers[-1].kernel.value
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = tf.reduce_mean(tf.square(self(x) - tf.one_hot(y, 3)))
                adapted = weight - 0.5 * inner.gradient(loss, weight)
                hidden = self.layers[0](x)
                after = tf.reduce_mean(tf.square(hidden @ adapted - tf.one_hot(y, 3)))
            gradients = outer.gradient(after, self.trainable_variables)
            self.optimizer.apply(
                [
                    tf.zeros_like(v) if g is None else g
                    for g, v in zip(gradients, self.trainable_variables, strict=True)
                ],
                self.trainable_variables,
            )
            return {"after": after}

    class EveryThird(keras.Sequential):  # type: ignore[misc]
        """A term of the batch in every third step, which is never the first one of an execution."""

        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
            acts = ops.cast(self.optimizer.iterations % 3 == 2, "float32")
            return _losses()["mean"](y, y_pred) + acts * ops.mean(ops.var(y_pred, axis=0))

    keras.utils.set_random_seed(1)
    extra = [Centered()] if kind == "centered" else []
    layers = [keras.layers.Dense(8, "tanh"), *extra, keras.layers.Dense(3, use_bias=kind != "nested")]
    own = {"nested": Nested, "every third": EveryThird}.get(kind, keras.Sequential)
    model = own([keras.Input((problems.FEATURES,)), *layers])
    loss = _losses().get(kind, _losses()["keras"])
    compiled = (
        {} if kind == "nested" else {"loss": loss, "metrics": ["accuracy", *filter(None, [_metrics().get(kind)])]}
    )
    model.compile(keras.optimizers.SGD(0.1), steps_per_execution=executed, **compiled)
    return model


def _fit(comm: Any, kind: str, samples: int, distributed: bool, executed: int = 1, **options: Any) -> Any:
    from matex_data import training

    model, arrays = _model(kind, executed), problems.table(samples)
    with logged() as messages:
        if distributed:
            data = problems.shard(arrays, BATCH, comm.rank, comm.size)
            validation = {} if kind == "nested" else {"validation_data": arrays, "validation_batch_size": 8}
            history = training.fit(model, data, epochs=3, comm=comm, verbose=0, **validation, **options).history
        else:
            validation = {} if kind == "nested" else {"validation_data": problems.shard(arrays, 8, 0, 1)}
            history = problems.one_process(model, arrays, BATCH, 3, **validation).history
    return problems.weights(model), history, "\n".join(messages)


WHOLE = ("variance", "centered", "nested")
"""Kinds that shards do not train as one process does."""


@pytest.mark.rank_counts(2, slow=(1, 3))
@pytest.mark.parametrize("samples", [50, pytest.param(48, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", ["sum", "mean", "rows", "keras", "spread", pytest.param("largest", marks=pytest.mark.slow), *WHOLE]
)
def test_every_fit_is_that_of_one_process(ranks: Pools, pool: Pool, kind: str, samples: int) -> None:
    (expected, logs, _), *_ = ranks(1).run(_fit, kind, samples, False)
    results = pool.run(_fit, kind, samples, True, timeout=120)
    problems.assert_same_weights([weights for weights, _, _ in results], expected)
    for _, history, _ in results:
        for key, values in logs.items():
            np.testing.assert_allclose(history[key], values, rtol=1e-4, err_msg=key)
    said = results[0][2]
    assert ("on whole batches from step 1 on" in said) == (kind in WHOLE and pool.size > 1), said


@pytest.mark.slow  # the launcher checks such a case, too
@pytest.mark.rank_counts(2, slow=(1, 3))
def test_each_step_of_an_execution_is_checked(ranks: Pools, pool: Pool) -> None:
    (expected, logs, _), *_ = ranks(1).run(_fit, "every third", 72, False, 3)
    results = pool.run(_fit, "every third", 72, True, 3, timeout=120)
    problems.assert_same_weights([weights for weights, _, _ in results], expected)
    for _, history, _ in results:
        np.testing.assert_allclose(history["loss"], logs["loss"], rtol=1e-4)
    assert ("on whole batches from step 3 on" in results[0][2]) == (pool.size > 1)


def _fit_classes(comm: Any, size: int) -> Any:
    import keras

    from matex_data import open_dataset, training

    rng = np.random.default_rng(2)
    x = rng.normal(size=(24, 3)).astype("f4")
    data = open_dataset({"x": x, "y": (x[:, 0] > 0.5).astype("i4")}, inputs="x", targets="y", comm=comm)
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "sigmoid")])
    model.compile("sgd", "binary_crossentropy")
    options: dict[str, Any] = {"class_weight": {0: 0.5, 1: 3.0}, "epochs": 2, "verbose": 0}
    if size == 1:
        model.fit(data.tf_dataset(12), **options)
    else:
        training.fit(model, data.tf_dataset(12), comm=comm, verify="always", **options)
    return problems.weights(model)


@pytest.mark.rank_counts(2, slow=(3,))
def test_weights_of_classes_are_checked_like_weights_of_samples(ranks: Pools, pool: Pool) -> None:
    (expected,) = ranks(1).run(_fit_classes, 1)
    problems.assert_same_weights(pool.run(_fit_classes, pool.size, timeout=120), expected)


def _exchanged(comm: Any) -> list[int]:
    """Return the rows of the unions on which this rank has checked steps and evaluations of ``fit``."""
    from matex_data.training.checking import shards
    from matex_data.training.exact.rows import batch_size

    found: list[int] = []

    def union(channel: Any, batch: Any) -> Any:
        whole = original(channel, batch)
        found.append(int(batch_size(whole)))
        return whole

    original = shards.whole_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "whole_batch", union)
        _fit(comm, "rows", 50, True)
    return found


@pytest.mark.rank_counts(3, slow=(5,))
def test_a_check_takes_the_rows_of_two_ranks(pool: Pool) -> None:
    """However many ranks there are, each holds its own rows and those of a neighbour."""
    for rank, found in enumerate(pool.run(_exchanged, timeout=120)):
        assert 0 < max(found) <= 2 * -(-BATCH // pool.size) < BATCH, (rank, found)


@pytest.mark.rank_counts(3)
def test_nothing_is_checked_without_verify(ranks: Pools, pool: Pool) -> None:
    (expected, *_), *_ = ranks(1).run(_fit, "variance", 48, False)
    found = pool.run(_fit, "variance", 48, True, verify="never", timeout=120)
    assert not np.allclose(found[0][0][0], expected[0], rtol=1e-4)
    assert found[0][2] == ""


def _fit_lists(comm: Any, sparse: bool, batchwide: bool, distributed: bool) -> Any:
    """Train on lists of different lengths, each rank on its rows of the batches."""
    import keras
    import tensorflow as tf

    from matex_data import training

    class Sums(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def build(self, shape: Any) -> None:
            self.dense.build((None, 1))

        def call(self, x: Any) -> Any:
            sums = tf.reshape(tf.sparse.reduce_sum(x, 1) if sparse else tf.reduce_sum(x, 1), (-1, 1))
            return self.dense(sums / 10) - 1e-3 * batchwide * tf.math.reduce_variance(sums)

    lists = tf.ragged.constant([np.arange(i % 4, dtype=np.float32) + i for i in range(27)])
    targets = tf.reduce_sum(lists, 1) / 30
    data = tf.data.Dataset.from_tensor_slices((lists.to_sparse() if sparse else lists, targets)).batch(8)
    keras.utils.set_random_seed(0)
    model = Sums()
    model.compile("sgd", "mse")
    if distributed:
        training.fit(model, training.shard(data, comm=comm), epochs=2, comm=comm, verbose=0)
    else:
        model.fit(data, epochs=2, verbose=0)
    return problems.weights(model)


@pytest.mark.rank_counts(3, slow=(2, 4))
@pytest.mark.parametrize(
    ("sparse", "batchwide"),
    [
        (True, True),
        pytest.param(False, True, marks=pytest.mark.slow),
        pytest.param(True, False, marks=pytest.mark.slow),
    ],
)
def test_lists_are_checked_and_gathered_like_rows(ranks: Pools, pool: Pool, sparse: bool, batchwide: bool) -> None:
    (expected, *_) = ranks(1).run(_fit_lists, sparse, batchwide, False, timeout=60)
    problems.assert_same_weights(pool.run(_fit_lists, sparse, batchwide, True, timeout=120), expected)


def _hidden(comm: Any, kind: str, distributed: bool) -> Any:
    """Train with state that is no variable, or with a loss that knows the number of rows of its batch."""
    import keras
    import tensorflow as tf

    from matex_data import training

    table = tf.lookup.experimental.MutableHashTable(tf.int64, tf.float32, 0.0)
    queue = tf.queue.FIFOQueue(9, tf.float32, shapes=[()])
    generator = tf.random.Generator.from_seed(1)
    seen: list[int] = []

    def note(rows: Any) -> Any:
        seen.append(len(rows))
        return np.float32(0.1 * len(seen))

    def factor(x: Any) -> Any:
        key = tf.constant([0], tf.int64)
        if kind == "table":
            before = tf.reshape(table.lookup(key), [])
            table.insert(key, [before + tf.reduce_mean(x)])
            return before
        if kind == "queue":
            before = tf.cond(queue.size() > 0, queue.dequeue, lambda: 0.0)
            queue.enqueue(tf.reduce_mean(x))
            return before
        if kind == "generator":
            return tf.reduce_mean(x * generator.normal(tf.shape(x)))
        found = tf.numpy_function(
            lambda rows: (seen.append(len(rows)), np.float32(0.1 * len(seen)))[1], [x], tf.float32
        )
        return tf.reshape(found, [])

    class Own(keras.Sequential):  # type: ignore[misc]
        def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
            squares = tf.square(tf.one_hot(y, 3) - y_pred)
            if kind == "static":
                return tf.reduce_sum(squares) / (y.shape[0] or 1000)
            return tf.reduce_mean(squares) * (1 + factor(x))

    keras.utils.set_random_seed(1)
    model = Own([keras.Input((problems.FEATURES,)), keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(0.1))
    arrays = problems.table(4 * BATCH)
    if distributed:
        training.fit(model, problems.shard(arrays, BATCH, comm.rank, comm.size), epochs=2, comm=comm, verbose=0)
    else:
        problems.one_process(model, arrays, BATCH, 2)
    return problems.weights(model), seen


@pytest.mark.rank_counts(3, slow=(2,))
@pytest.mark.parametrize(
    "kind",
    [
        *("table", "queue", "generator"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("python", "static")),
    ],
)
def test_what_cannot_be_put_back_is_trained_as_in_one_process(ranks: Pools, pool: Pool, kind: str) -> None:
    (expected, seen), *_ = ranks(1).run(_hidden, kind, False)
    results = pool.run(_hidden, kind, True, timeout=120)
    problems.assert_same_weights([weights for weights, _ in results], expected)
    assert all(found == seen for _, found in results)


def _twice(comm: Any, kind: str) -> Any:
    from matex_data import training
    from matex_data.training.checking import check

    checks, original = [], check.SelfCheck._check
    check.SelfCheck._check = lambda self, batch: (checks.append(1), original(self, batch))[1]  # type: ignore[method-assign]
    try:
        model, data = _model(kind), problems.shard(problems.table(48), BATCH, comm.rank, comm.size)
        counts = []
        for _ in range(3):
            training.fit(model, data, comm=comm, verbose=0)
            counts.append(len(checks))
    finally:
        check.SelfCheck._check = original  # type: ignore[method-assign]
    return counts


@pytest.mark.rank_counts(2)
def test_checks_become_fewer_over_repeated_fits(pool: Pool) -> None:
    assert pool.run(_twice, "keras", timeout=120) == [[0, 0, 0]] * pool.size
    first, _, third = pool.run(_twice, "rows", timeout=120)[0]
    assert 2 <= first <= 4
    assert third - first <= first + 2


def _traces(comm: Any, distributed: bool) -> Any:
    """Train four times, with changes in between, then evaluate twice; return the weights, and what each call traced."""
    import keras

    from matex_data import training

    traces: list[Any] = []

    class Traced(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.factor = 1.0

        def call(self, x: Any) -> Any:
            traces.append(x)
            return self.factor * x

    keras.utils.set_random_seed(1)
    traced, arrays = Traced(), problems.table(4 * BATCH)
    model = keras.Sequential(
        [
            keras.Input((problems.FEATURES,)),
            traced,
            keras.layers.Dense(3, use_bias=False),
            keras.layers.BatchNormalization(),
        ]
    )

    def set_factor() -> None:
        traced.factor = 0.5
        model.make_train_function(force=True)

    changes: list[Any] = [None, lambda: model.predict(arrays[0], verbose=0), set_factor, None]
    counts = []
    model.compile(keras.optimizers.SGD(0.1), _losses()["keras"], metrics=["accuracy"])
    for change in changes:
        if change is not None:
            change()
        traces.clear()
        data = problems.shard(arrays, BATCH, comm.rank, comm.size)
        options = {"epochs": 2, "verbose": 0, "validation_data": data}
        if distributed:
            training.fit(model, data, comm=comm, sync_batch_norm=True, **options)
        else:
            model.fit(data, **options)
        counts.append(len(traces))
    for _ in range(2 * distributed):
        traces.clear()
        training.evaluate(model, data, comm=comm, verbose=0)
        training.fit(model, data, comm=comm, sync_batch_norm=True, epochs=0, verbose=0)
        counts.append(len(traces))
    return problems.weights(model), counts


@pytest.mark.rank_counts(2, slow=(1, 3))
def test_a_second_fit_traces_nothing_unless_something_has_changed(ranks: Pools, pool: Pool) -> None:
    (expected, _), *_ = ranks(1).run(_traces, False)
    results = pool.run(_traces, True, timeout=120)
    problems.assert_same_weights([weights for weights, _ in results], expected)
    for _, (first, predicted, forced, after, *evaluated) in results:
        assert first and forced
        assert not predicted and not after and not any(evaluated)


def _drawing(comm: Any, distributed: bool) -> Any:
    """Train with a step that draws; return what it has drawn last, and the messages."""
    import io
    from contextlib import redirect_stderr

    import keras
    import tensorflow as tf

    from matex_data import training

    class Drawing(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, _ = data
            noise = tf.random.normal(tf.shape(x)) + keras.random.normal(tf.shape(x))
            drawn.assign([tf.random.normal([3]), keras.random.normal([3])])
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(self(x) - x - noise))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    keras.utils.set_random_seed(1)
    model = Drawing([keras.Input((problems.FEATURES,)), keras.layers.Dense(problems.FEATURES)])
    drawn = tf.Variable(tf.zeros([2, 3]), trainable=False)
    model.compile(keras.optimizers.SGD(0.1))
    arrays = problems.table(2 * BATCH)
    with redirect_stderr(io.StringIO()) as output:
        if distributed:
            data = problems.shard(arrays, BATCH, comm.rank, comm.size)
            training.fit(model, data, comm=comm, verbose=0)
        else:
            model.fit(problems.shard(arrays, BATCH, 0, 1), verbose=0, shuffle=False)
    return drawn.numpy(), output.getvalue()


@pytest.mark.rank_counts(2)
def test_a_step_that_draws_draws_other_numbers_on_each_rank_which_is_said(ranks: Pools, pool: Pool) -> None:
    ((expected, _),) = ranks(1).run(_drawing, False)
    (of_root, text), (of_other, _) = pool.run(_drawing, True, timeout=120)
    np.testing.assert_array_equal(of_root[0], expected[0])
    assert not np.isclose(of_root, of_other).any()
    assert "up to random numbers, which each rank draws for itself" in text


def _marked(comm: Any, distributed: bool) -> Any:
    """Train one output on rows that a number in the inputs does not mark, another one on all rows."""
    import keras
    from keras import ops

    from matex_data import training

    class Marks(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return ops.cast(x[:, :1] != np.float32(-1.7), "float32")

    def loss(y: Any, p: Any) -> Any:
        of_marked, of_all, kept = ops.unstack(p, 3, axis=-1)
        y = ops.cast(y, "float32")
        return ops.sum(ops.square(of_marked - y) * kept) / ops.sum(kept) + ops.mean(ops.square(of_all - y))

    keras.utils.set_random_seed(1)
    inputs = keras.Input((problems.FEATURES,))
    marks = Marks()(inputs)
    outputs = [keras.layers.Dense(1)(inputs * marks), keras.layers.Dense(1)(inputs), marks]
    model = keras.Model(inputs, ops.concatenate(outputs, -1))
    model.compile(keras.optimizers.SGD(0.01), loss)
    x, y = problems.table(BATCH)
    x[: BATCH // 2 - 1, 0] = -1.7
    if distributed:
        training.fit(model, problems.shard((x, y), BATCH, comm.rank, comm.size), comm=comm, verbose=0)
    else:
        model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    return problems.weights(model)


@pytest.mark.rank_counts(2)
def test_a_number_that_marks_rows_is_not_changed_by_the_measurement_of_rounding(ranks: Pools, pool: Pool) -> None:
    (expected,) = ranks(1).run(_marked, False)
    problems.assert_same_weights(pool.run(_marked, True, timeout=120), expected)


def test_the_reason_of_an_error_is_the_first_line_that_says_more_than_where() -> None:
    from matex_data.training.checking.shards import first_reason

    of_keras = "Exception encountered when calling LSTM.call().\n\n\x1b[1mrows must be 8\x1b[0m\n\nArguments received"
    of_graph = "Graph execution error:\n\nDetected at node mul defined at:\n  File a.py, line 1\n\nIncompatible shapes"
    assert [first_reason(text) for text in (of_keras, of_graph, "plain", "")] == [
        "rows must be 8",
        "Incompatible shapes",
        "plain",
        "",
    ]


def _proven(comm: Any, dtype: str) -> str:
    """Return what is said of a proven model whose normalization is called for inference."""
    import contextlib
    import io

    import keras
    import tensorflow as tf

    from matex_data.training.checking.check import SelfCheck
    from matex_data.training.checking.report import CheckReport
    from matex_data.training.comm.channel import open_channel
    from matex_data.training.distributed_model import DistributedModel

    inputs, said = keras.Input((problems.FEATURES,)), io.StringIO()
    base = keras.Sequential([inputs, keras.layers.Dense(4, dtype=dtype), keras.layers.BatchNormalization()])
    model = keras.Model(inputs, keras.layers.Dense(1)(base(inputs, training=False)))
    optimizer = keras.optimizers.SGD(0.1)
    model.compile(optimizer if dtype == "float32" else keras.optimizers.LossScaleOptimizer(optimizer), "mse")
    spec = tuple(tf.TensorSpec((None, columns)) for columns in (problems.FEATURES, 1))
    with DistributedModel(model, open_channel(comm)) as distributed, contextlib.redirect_stderr(said):
        distributed.prepare(spec)
        SelfCheck(distributed, "proven", CheckReport(comm.rank, comm.size)).of_shards(spec)
    return said.getvalue()


@pytest.mark.rank_counts(2)
def test_a_proof_names_its_exceptions(pool: Pool) -> None:
    first, second = pool.run(_proven, "float32"), pool.run(_proven, "mixed_float16")
    assert "is proven to train" in first[0] and "except for BatchNormalization" in first[0]
    assert "loss scaling" not in first[0] and "except for the steps that loss scaling skips" in second[0]
    assert first[1] == second[1] == ""


def _kept(comm: Any, strategy: str) -> int:
    """Return how many models there still are after each has been trained, and its steps have been checked."""
    import gc
    import weakref

    import keras

    from matex_data import training

    class Own(keras.Sequential):  # type: ignore[misc]
        def call(self, x: Any, training: bool = False) -> Any:
            return super().call(x, training=training)

    models = []
    data = problems.shard(problems.table(24), BATCH, comm.rank, comm.size)
    for _ in range(2):
        model = Own([keras.Input((problems.FEATURES,)), keras.layers.Dense(3)])
        optimizer = (
            training.distribute(keras.optimizers.Adam(), comm, strategy=strategy) if strategy != "sections" else "adam"
        )
        problems.compiled(model, optimizer)
        training.fit(model, data, comm=comm, verbose=0, shard_optimizer=strategy == "sections")
        models.append(weakref.ref(model))
        del model, optimizer
    gc.collect()
    return sum(model() is not None for model in models)


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize("strategy", ["chained", "concurrent", "sections"])
def test_a_program_keeps_no_models_that_have_been_trained(pool: Pool, strategy: str) -> None:
    assert pool.run(_kept, strategy) == [0, 0]
