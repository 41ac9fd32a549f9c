"""Training that once differed from one process without a word: equal now, or an error on all ranks."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from matex_data.errors import PartitionError
from tests.support import problems
from tests.support.logs import logged
from tests.support.ranks import Pool, Pools

BATCH = 12


def _fit(comm: Any, model: Any, arrays: Any, distributed: bool, epochs: int = 2, **options: Any) -> Any:
    """Train on batches of 12 rows, of which the last one may have fewer than there are ranks; return the history."""
    from matex_data import training

    if not distributed:
        return problems.one_process(model, arrays, BATCH, epochs, **options)
    data = problems.shard(arrays, BATCH, comm.rank, comm.size)
    return training.fit(model, data, epochs=epochs, comm=comm, verbose=0, **options)


def _masked(comm: Any, kind: str, distributed: bool) -> Any:
    import keras

    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(3)
    x = np.where(np.arange(7) < rng.integers(1, 8, 13)[:, None], rng.integers(1, 40, (13, 7)), 0).astype(np.int32)
    ignore = 0 if kind == "ignore_class" else None
    layers = [keras.layers.Embedding(40, 5, mask_zero=kind == "mask"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((7,), dtype="int32"), *layers])
    model.compile(
        keras.optimizers.SGD(0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=ignore)
    )
    _fit(comm, model, (x, x % 3), distributed)
    return problems.weights(model)


@pytest.mark.rank_counts(1, 3, slow=(2,))
@pytest.mark.parametrize("kind", ["mask", "ignore_class"])
def test_the_stand_in_row_of_a_masked_loss_counts_nothing(ranks: Pools, pool: Pool, kind: str) -> None:
    expected, *_ = ranks(1).run(_masked, kind, False)
    problems.assert_same_weights(pool.run(_masked, kind, True), expected)


def _averaging(comm: Any, distributed: bool) -> Any:
    """Train with a step that counts itself and averages weights, also on the single row of the last batch."""
    import keras
    import tensorflow as tf

    class Averaging(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            kernel, averaged, steps = self.layers[0].weights
            averaged.assign(0.5 * averaged + 0.5 * kernel)
            steps.assign_add(1.0)
            return logs

    class Layer(keras.layers.Layer):  # type: ignore[misc]
        def build(self, shape: Any) -> None:
            self.kernel = self.add_weight(shape=(shape[-1], 3))
            self.averaged = self.add_weight(shape=(shape[-1], 3), trainable=False)
            self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            return tf.matmul(x, self.kernel)

    keras.utils.set_random_seed(1)
    model = Averaging([keras.Input((problems.FEATURES,)), Layer()])
    model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    _fit(comm, model, problems.table(BATCH + 1), distributed)
    return problems.weights(model)


@pytest.mark.rank_counts(2, slow=(3,))
def test_averages_of_weights_go_on_where_a_rank_has_no_row(ranks: Pools, pool: Pool) -> None:
    expected, *_ = ranks(1).run(_averaging, False)
    problems.assert_same_weights(pool.run(_averaging, True), expected)


def _valued(comm: Any, evaluates: bool, distributed: bool) -> Any:
    """Train a model whose ``build``, and that of a layer, builds layers and makes variables from values."""
    import keras
    import tensorflow as tf

    from matex_data import training

    class Scaled(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(4, "tanh")

        def build(self, shape: Any) -> None:
            self.dense.build(shape)
            self.scale = tf.Variable(2 * tf.ones(4))

        def call(self, x: Any) -> Any:
            return self.dense(x) * self.scale

    class Momentum(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.scaled, self.last = Scaled(), keras.layers.Dense(3)

        def build(self, shape: Any) -> None:
            self.scaled.build(shape)
            self.last.build((None, 4))
            self.sums = [keras.Variable(np.zeros(v.shape, "f4"), trainable=False) for v in self.trainable_variables]

        def call(self, x: Any, training: bool = False) -> Any:
            return self.last(self.scaled(x))

        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                predicted = self(data[0], training=True)
                loss = self.compute_loss(None, data[1], predicted)
            for total, gradient in zip(self.sums, tape.gradient(loss, self.trainable_variables), strict=True):
                total.assign(0.5 * total + gradient)
            self.optimizer.apply([total + 0 for total in self.sums], self.trainable_variables)
            return self.compute_metrics(*data, predicted)

    keras.utils.set_random_seed(1)
    model, arrays, value = problems.compiled(Momentum(), keras.optimizers.Adam(0.01)), problems.table(40), None
    if evaluates and distributed:
        value = training.evaluate(model, problems.shard(arrays, BATCH, comm.rank, comm.size), comm=comm, verbose=0)
    elif evaluates:
        value = model.evaluate(*arrays, BATCH, verbose=0)
    _fit(comm, model, arrays, distributed)
    return problems.weights(model), value


@pytest.mark.rank_counts(2, slow=(1, 3))
@pytest.mark.parametrize("evaluates", [False, True])
def test_variables_that_build_makes_from_values(ranks: Pools, pool: Pool, evaluates: bool) -> None:
    (expected, value), *_ = ranks(1).run(_valued, evaluates, False)
    results = pool.run(_valued, evaluates, True)
    problems.assert_same_weights([weights for weights, _ in results], expected)
    for _, found in results:
        np.testing.assert_allclose(found or 0, value or 0, rtol=1e-5)


def _persistent(comm: Any, distributed: bool) -> Any:
    import keras
    import tensorflow as tf

    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self(x), from_logits=True))
                for layer in self.layers:
                    gradients = tape.gradient(loss, layer.trainable_variables)
                    self.parts["of"][layer.name].apply(gradients, layer.trainable_variables)
            return {"own": loss}

    keras.utils.set_random_seed(1)
    model = Own([keras.Input((problems.FEATURES,)), keras.layers.Dense(9, "tanh"), keras.layers.Dense(3)])
    model.parts = {"of": {layer.name: keras.optimizers.SGD(0.1, momentum=0.9) for layer in model.layers}}
    model.compile()
    _fit(comm, model, problems.table(40), distributed)
    return problems.weights(model)


@pytest.mark.rank_counts(1, 3, slow=(2,))
def test_optimizers_in_a_dict_average_gradients_of_a_persistent_tape(ranks: Pools, pool: Pool) -> None:
    expected, *_ = ranks(1).run(_persistent, False)
    problems.assert_same_weights(pool.run(_persistent, True), expected)


def _diverging(comm: Any, folder: str | None) -> Any:
    import keras
    import tensorflow as tf

    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            for variable in self.trainable_variables:
                variable.assign_add(tf.ones(variable.shape) * tf.reduce_mean(data[0]))
            return {"own": 0.0}

    model = Own([keras.Input((problems.FEATURES,)), keras.layers.Dense(3)])
    model.compile()
    _fit(comm, model, problems.table(40), True, verify="never", checkpoint=folder)


@pytest.mark.rank_counts(3)
@pytest.mark.parametrize("saved", [False, True])
def test_different_weights_are_an_error(pool: Pool, tmp_path: Path, saved: bool) -> None:
    outcomes = pool.outcomes(_diverging, str(tmp_path / "run") if saved else None)
    assert all(isinstance(error, PartitionError) for error in outcomes)
    assert len({str(error) for error in outcomes}) == 1
    assert "kernel" in str(outcomes[0])
    assert not (tmp_path / "run" / "training.npz").exists()


def _copying(comm: Any, kind: str, distributed: bool) -> Any:
    """Train by an optimizer that pulls weights towards copies of their first values; ranks begin with other weights."""
    import keras
    import tensorflow as tf

    class Pulling(keras.optimizers.SGD):  # type: ignore[misc]
        def build(self, variables: Any) -> None:
            super().build(variables)
            with tf.init_scope():
                values = [np.array(v.numpy()) for v in variables]
            self.copies = values
            if kind == "variables":
                self.copies = [
                    self.add_variable(shape=v.shape, initializer=lambda *_, v=v, **__: tf.convert_to_tensor(v))
                    for v in variables
                ]

        def update_step(self, gradient: Any, variable: Any, rate: Any) -> None:
            copy = self.copies[self._get_variable_index(variable)]
            self.assign_sub(variable, gradient * rate + 0.1 * (variable - copy))

    model = problems.perceptron(1 + comm.rank)
    problems.compiled(model, Pulling(0.1))
    _fit(comm, model, problems.table(40), distributed)
    return problems.weights(model)


@pytest.mark.rank_counts(3, slow=(1, 2))
@pytest.mark.parametrize("kind", ["variables", "numpy"])
def test_optimizers_copy_the_weights_of_rank_0(ranks: Pools, pool: Pool, kind: str) -> None:
    expected, *_ = ranks(1).run(_copying, kind, False)
    problems.assert_same_weights(pool.run(_copying, kind, True), expected)


def _building(comm: Any, assigns: str, eager: bool = False) -> list[str]:
    """Train by an optimizer that averages weights, and assigns by its method of that name; return what is logged."""
    import keras

    class Averaging(keras.optimizers.SGD):  # type: ignore[misc]
        def build(self, variables: Any) -> None:
            super().build(variables)
            self.averages = [self.add_variable_from_reference(v, name="average") for v in variables]
            for average, variable in zip(self.averages, variables, strict=True):
                if assigns == "variable":
                    average.assign(variable)
                elif assigns == "optimizer":
                    self.assign(average, variable)

    model = problems.perceptron()
    problems.compiled(model, Averaging(0.1, use_ema=True))
    model.run_eagerly = eager
    with logged() as messages:
        _fit(comm, model, problems.table(24), True)
    return [message for message in messages if "build()" in message]


@pytest.mark.slow
@pytest.mark.rank_counts(2)
def test_builds_that_assign_are_said_once(pool: Pool) -> None:
    assert pool.run(_building, "nothing") == [[], []]
    assert pool.run(_building, "variable", eager=True) == [[], []]
    for by in ("variable", "optimizer"):
        (message,), others = pool.run(_building, by)
        assert "build() of Averaging assigns to" in message and "average" in message and "add_variable" in message
        assert others == []


def _decay(comm: Any, shard_optimizer: bool) -> Any:
    import keras

    model = problems.perceptron()
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
    problems.compiled(model, optimizer)
    _fit(comm, model, problems.table(24), True, shard_optimizer=shard_optimizer)
    return problems.weights(model)


@pytest.mark.rank_counts(2, slow=(3,))
def test_weights_without_decay_have_none_in_sections(pool: Pool) -> None:
    expected, *_ = pool.run(_decay, False)
    problems.assert_same_weights(pool.run(_decay, True), expected)


def _validation(comm: Any, kind: str, path: str, distributed: bool = True) -> Any:
    import keras
    import tensorflow as tf

    import matex_data as md

    model = keras.Sequential([problems.perceptron(), keras.layers.Activation("sigmoid")])
    hits = keras.metrics.CategoricalAccuracy(name="accuracy")
    model.compile(keras.optimizers.SGD(0.1), "mse", metrics=[hits, keras.metrics.FalsePositives(name="counted"), "mae"])
    x, y = problems.table(29)
    arrays = (x, np.eye(3, dtype=np.float32)[y])
    held: Any = arrays
    if kind == "dataset" and distributed:
        held = md.open_dataset(path, inputs="x", targets="y", comm=comm)
    elif kind == "unsharded":
        held = tf.data.Dataset.from_tensor_slices(arrays).batch(8)
    options = {"validation_batch_size": 8, "validation_data": held}
    if not distributed:
        return model.fit(*arrays, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, **options).history
    return _fit(comm, model, arrays, True, **options).history


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a file with the arrays of ``_validation``."""
    path = tmp_path_factory.mktemp("validation") / "table.h5"
    x, y = problems.table(29)
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = x, np.eye(3, dtype=np.float32)[y]
    return str(path)


@pytest.mark.rank_counts(1, 3)
@pytest.mark.parametrize("kind", ["arrays", "dataset"])
def test_validation_data_counts_once(ranks: Pools, pool: Pool, table: str, kind: str) -> None:
    expected, *_ = ranks(1).run(_validation, kind, table, False)
    for found in pool.run(_validation, kind, table):
        for key, values in expected.items():
            np.testing.assert_allclose(found[key], values, rtol=1e-5, err_msg=key)


@pytest.mark.rank_counts(3)
def test_validation_data_that_all_ranks_have_is_an_error(pool: Pool, table: str) -> None:
    outcomes = pool.outcomes(_validation, "unsharded", table)
    assert all(isinstance(error, PartitionError) for error in outcomes)
    assert "shard(dataset)" in str(outcomes[0])


def _unsharded(comm: Any, constant: bool) -> None:
    import tensorflow as tf

    from matex_data import training

    x, y = problems.table(24)
    arrays = (0 * x, 0 * y) if constant else (x, y)
    data = tf.data.Dataset.from_tensor_slices(arrays).batch(6, drop_remainder=True)
    training.fit(problems.compiled(problems.perceptron(), "sgd"), data, comm=comm, verbose=0)


@pytest.mark.rank_counts(1, 3)
def test_training_data_that_all_ranks_have_is_an_error(pool: Pool) -> None:
    outcomes = pool.outcomes(_unsharded, False)
    assert all(isinstance(error, PartitionError) == (pool.size > 1) for error in outcomes)
    assert pool.size == 1 or "shard(dataset)" in str(outcomes[0])
    pool.run(_unsharded, True)


def _resumed(comm: Any, folder: str, part: str) -> Any:
    """Train three epochs with a checkpoint, or again with ``initial_epoch``, or until a callback stops an epoch."""
    import keras

    import matex_data as md
    from matex_data import training

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps = getattr(self, "steps", 0) + 1
            if part == "interrupted" and self.steps == 4:
                raise KeyboardInterrupt
            if part == "stops" and self.steps == 1:
                self.model.stop_training = True

    model = problems.compiled(problems.perceptron(), keras.optimizers.SGD(0.1))
    options = {"initial_epoch": 0} if part == "again" else {"callbacks": [Stop()], "save_every": 1}
    data = md.open_dataset(f"{folder}/table.h5", inputs="x", targets="k", comm=comm)
    with contextlib.suppress(KeyboardInterrupt):
        training.fit(model, data, batch_size=6, epochs=3, checkpoint=f"{folder}/run", comm=comm, verbose=0, **options)
    return problems.weights(model), int(model.optimizer.iterations)


@pytest.fixture
def run(tmp_path: Path) -> str:
    """Return a folder with a table of 24 rows: 4 steps an epoch."""
    with h5py.File(tmp_path / "table.h5", "w") as file:
        file["x"], file["k"] = problems.table(24)
    return str(tmp_path)


@pytest.mark.rank_counts(1, 3)
def test_a_finished_run_does_not_train_again(pool: Pool, run: str) -> None:
    expected = pool.run(_resumed, run, "whole")
    for (weights, steps), (found, again) in zip(expected, pool.run(_resumed, run, "again"), strict=True):
        assert (steps, again) == (12, 12)
        problems.assert_same_weights([found], weights)


@pytest.mark.rank_counts(1, 3)
def test_a_stop_on_the_last_batch_of_a_resumed_epoch_counts(pool: Pool, run: str) -> None:
    pool.run(_resumed, run, "interrupted")
    assert {steps for _, steps in pool.run(_resumed, run, "stops")} <= {4}


def _stateful(comm: Any, folder: str, part: str, size: int = 1) -> Any:
    import keras
    import tensorflow as tf

    from matex_data import training

    class Interrupt(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if part == "interrupted" and batch == 5:
                raise KeyboardInterrupt

    keras.utils.set_random_seed(2)
    rows, own = 6 // size, slice(comm.rank * 6 // size, (comm.rank + 1) * 6 // size)
    x = np.random.default_rng(1).normal(size=(7, 6, 2, 3)).astype(np.float32)[:, own]
    layers = [keras.layers.GRU(4, stateful=True), keras.layers.Dense(1)]
    model = keras.Sequential([keras.Input(batch_shape=(rows, 2, 3)), *layers])
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :, 0, :1]))
    options = {} if part == "whole" else {"checkpoint": folder, "save_every": 1, "callbacks": [Interrupt()]}
    with contextlib.suppress(KeyboardInterrupt):
        training.fit(model, data, epochs=2, comm=comm, verbose=0, **options)
    return [v for v in problems.weights(model) if v.shape != (rows, 4)]


@pytest.mark.parametrize("sizes", [(1, 1), (3, 3), (3, 2)])
def test_states_of_recurrent_layers_go_on_after_a_resume(ranks: Pools, tmp_path: Path, sizes: tuple[int, int]) -> None:
    expected, *_ = ranks(1).run(_stateful, "", "whole")
    before, after = sizes
    ranks(before).run(_stateful, str(tmp_path), "interrupted", before)
    problems.assert_same_weights(ranks(after).run(_stateful, str(tmp_path), "resumed", after), expected)
