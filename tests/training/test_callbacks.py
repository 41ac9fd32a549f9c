"""Callbacks on several ranks: stopping, learning rates, files, seeds, validation."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from tests.support import problems
from tests.support.ranks import Pool, Pools


def _validated(comm: Any, reference: bool = False) -> Any:
    """Train with validation on 1,003 samples in 16 batches of 64, the last of which is empty on some ranks."""
    import keras

    from matex_data import training

    train, valid = problems.table(96), problems.table(1003, seed=5)
    model = problems.compiled(problems.perceptron(), keras.optimizers.SGD(0.5))
    stop = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    slower = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=0)
    data, check = (problems.shard(a, b, comm.rank, comm.size) for a, b in ((train, 24), (valid, 64)))
    options = {"validation_data": check, "epochs": 30, "callbacks": [stop, slower], "verbose": 0}
    history = model.fit(data, **options) if reference else training.fit(model, data, comm=comm, **options)
    return history.history, problems.weights(model), stop.stopped_epoch


def test_validation_is_exact_and_all_ranks_stop(ranks: Pools, pool: Pool) -> None:
    (logs, weights, stopped), *_ = ranks(1).run(_validated, reference=True)
    results = pool.run(_validated, timeout=120)
    assert 0 < stopped < 29
    problems.assert_same_weights([result[1] for result in results], weights)
    for history, _, epoch in results:
        assert epoch == stopped
        assert history == results[0][0]
        for name, values in logs.items():
            np.testing.assert_allclose(history[name], values, rtol=2e-6, err_msg=name)


def _odd_validation(comm: Any) -> Any:
    """Evaluate a model with learning rate 0 on fewer samples than there are ranks."""
    import keras

    from matex_data import training

    model = problems.compiled(problems.perceptron(), keras.optimizers.SGD(0.0))
    check = problems.shard(problems.table(2, seed=3), 2, comm.rank, comm.size)
    data = problems.shard(problems.table(12), 12, comm.rank, comm.size)
    history = training.fit(model, data, validation_data=check, epochs=2, comm=comm, verbose=0)
    x, y = problems.table(2, seed=3)
    return history.history, model.evaluate(x, y, verbose=0, return_dict=True)


@pytest.mark.rank_counts(3)
def test_ranks_without_validation_samples(pool: Pool) -> None:
    for history, expected in pool.run(_odd_validation):
        for name, value in expected.items():
            np.testing.assert_allclose(history[f"val_{name}"], [value, value], rtol=1e-6)


def _unknown_validation(comm: Any, kind: str) -> Any:
    """Validate on 23 samples, some of which a mask leaves out, in batches whose number is not known or infinite."""
    import keras
    import tensorflow as tf

    from matex_data import training

    x, y = problems.table(23, seed=3)
    whole = tf.data.Dataset.from_tensor_slices((x, y)).batch(11)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1)
    model = problems.perceptron()
    model.compile(keras.optimizers.SGD(0.0), loss, metrics=["accuracy"], steps_per_execution=2)
    batches = training.shard(whole, comm=comm)
    check = batches.repeat() if kind == "infinite" else batches.filter(lambda x, y: len(x) > 0)  # fewer on some ranks
    steps = 4 if kind == "infinite" else None
    options = {"validation_data": check, "validation_steps": steps, "epochs": 2}
    data = training.shard(whole.rebatch(10), remainder="drop", comm=comm)
    history = training.fit(model, data, comm=comm, verbose=0, **options).history
    assert len(history["loss"]) == 2
    return history, model.evaluate(whole if steps is None else whole.repeat(), steps=steps, verbose=0)


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize("kind", [pytest.param("infinite", marks=pytest.mark.slow), "unknown"])
def test_batches_of_validation_whose_number_is_not_known(pool: Pool, kind: str) -> None:
    for history, expected in pool.run(_unknown_validation, kind):
        for name, value in zip(("val_loss", "val_accuracy"), expected, strict=True):
            np.testing.assert_allclose(history[name], [value, value], rtol=1e-6, err_msg=name)


class _Stopper:
    """Factory of a callback that stops one rank after a batch, and sets another learning rate on each."""

    @staticmethod
    def make(rank: int, stops: bool) -> Any:
        import keras

        class Stop(keras.callbacks.Callback):  # type: ignore[misc]
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                self.model.optimizer.learning_rate = 0.1 + rank
                if stops and batch == 2:
                    self.model.stop_training = True

        return Stop()


def _one_rank_stops(comm: Any) -> Any:
    import keras

    from matex_data import training

    model = problems.compiled(problems.perceptron(), keras.optimizers.SGD(0.1))
    data = problems.shard(problems.table(96), 12, comm.rank, comm.size)
    stop = _Stopper.make(comm.rank, stops=comm.rank == comm.size - 1)
    training.fit(model, data, epochs=3, callbacks=[stop], comm=comm, verbose=0)
    return int(model.optimizer.iterations), float(model.optimizer.learning_rate), problems.weights(model)


@pytest.mark.rank_counts(3, slow=(2,))
def test_one_rank_stops_all(pool: Pool) -> None:
    results = pool.run(_one_rank_stops)
    assert {result[0] for result in results} == {3}
    assert {result[1] for result in results} == {float(np.float32(0.1))}
    problems.assert_same_weights([result[2] for result in results], results[0][2])


def _batch_logs(comm: Any, kind: str, distributed: bool) -> Any:
    """Train two epochs of batches that ranks divide unevenly; return the logs of batches and of epochs."""
    import keras
    import tensorflow as tf

    from matex_data import training

    class Own(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, self(x, training=True)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            return {"nll": loss, "rows": tf.shape(y)[0]}

        def test_step(self, data: Any) -> Any:
            x, y = data
            return {"largest": tf.reduce_max(self(x)), "rows": tf.shape(y)[0]}

    class Two(keras.metrics.Mean):  # type: ignore[misc]
        def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
            super().update_state(prediction)

        def result(self) -> Any:
            return {"once": super().result(), "twice": 2 * super().result()}

    keras.utils.set_random_seed(1)
    layers = [keras.Input((problems.FEATURES,)), keras.layers.Dense(3, "softmax")]
    model = (Own if kind == "own" else keras.Sequential)(layers)
    loss = {} if kind == "own" else {"loss": "sparse_categorical_crossentropy", "weighted_metrics": ["accuracy"]}
    if kind == "two outputs":
        model = keras.Model(model.inputs, {"a": (out := model.outputs[0]), "b": keras.layers.Dense(1)(out)})
        loss = {"loss": {"a": "sparse_categorical_crossentropy", "b": "mse"}, "metrics": {"a": [Two()]}}
    model.compile(keras.optimizers.SGD(0.5), **loss)
    found: list[dict[str, float]] = []

    class Reader(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            found.append({key: float(value) for key, value in logs.items()})

        on_test_batch_end = on_train_batch_end

    reader = Reader()
    if kind == "lambda":
        reader = keras.callbacks.LambdaCallback(on_train_batch_end=reader.on_train_batch_end)
        reader.on_test_batch_end = reader.on_train_batch_end
    options = {"epochs": 2, "callbacks": [reader], "verbose": 0}
    data, check = (problems.shard(problems.table(n, seed=n), 12, comm.rank, comm.size) for n in (37, 26))
    if kind == "two outputs":
        data, check = (one.map(lambda x, y: (x, {"a": y, "b": x[:, :1]})) for one in (data, check))
    options["validation_data"] = check
    of_evaluate = {"callbacks": [reader], "verbose": 0, "return_dict": True}
    if not distributed:
        history = model.fit(data, **options).history
        return found, history, model.evaluate(check, **of_evaluate)
    history = training.fit(model, data, comm=comm, **options).history
    return found, history, training.evaluate(model, check, comm=comm, **of_evaluate)


@pytest.mark.rank_counts(2, 3)
@pytest.mark.parametrize("kind", ["keras", "lambda", "own", "two outputs"])
def test_callbacks_read_the_logs_of_global_batches(ranks: Pools, pool: Pool, kind: str) -> None:
    (batches, epochs, evaluated), *_ = ranks(1).run(_batch_logs, kind, False)
    assert len(batches) == 2 * (4 + 3) + 3  # two epochs, with validation, and an evaluation
    for found, history, result in pool.run(_batch_logs, kind, True, timeout=120):
        assert result == pytest.approx(evaluated, rel=1e-5)
        for own, expected in zip(found, batches, strict=True):
            assert own == pytest.approx(expected, rel=1e-5)
            assert list(own) == list(expected)
        for key, values in epochs.items():
            np.testing.assert_allclose(history[key], values, rtol=1e-5, err_msg=key)


def _evaluated_within(comm: Any, kind: str, distributed: bool) -> Any:
    """Train two epochs, within which callbacks evaluate rows that all ranks have."""
    import keras

    from matex_data import training

    class Largest(keras.metrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(name="largest")
            self.number = self.add_weight(shape=(), initializer=lambda shape, dtype: keras.ops.full(shape, -9.0, dtype))

        def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
            self.number.assign(keras.ops.maximum(self.number, keras.ops.max(outputs)))

        def result(self) -> Any:
            return self.number + 0.0

    class Probe(keras.callbacks.Callback):  # type: ignore[misc]
        def _evaluate(self, *_: Any) -> None:
            if kind == "test_on_batch":
                self.model.test_on_batch(x[:7], y[:7])
            else:
                self.model.evaluate(x[:31], y[:31], verbose=0)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if kind != "begin" and batch in (0, 2):
                self._evaluate()

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if kind == "begin":
                self._evaluate()

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((problems.FEATURES,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss, metrics=["accuracy", Largest()])
    x, y = problems.table(40, seed=5)
    data = problems.shard(problems.table(36), 12, comm.rank, comm.size)
    options = {"epochs": 2, "callbacks": [Probe()], "verbose": 0}
    return (
        training.fit(model, data, comm=comm, **options).history if distributed else model.fit(data, **options).history
    )


@pytest.mark.rank_counts(2, 3)
@pytest.mark.parametrize("kind", ["evaluate", "test_on_batch", "begin"])
def test_evaluations_within_an_epoch(ranks: Pools, pool: Pool, kind: str) -> None:
    expected, *_ = ranks(1).run(_evaluated_within, kind, False)
    results = pool.run(_evaluated_within, kind, True, timeout=120)
    assert all(found == results[0] for found in results)
    for key, values in expected.items():
        np.testing.assert_allclose(results[0][key], values, rtol=1e-5, err_msg=key)


def _files(comm: Any, folder: Path) -> Any:
    """Train with callbacks that write to a path for each rank, which is not in the folder for temporary files."""
    import keras

    from matex_data import training

    model = problems.compiled(problems.perceptron(), keras.optimizers.Adam())
    data = problems.shard(problems.table(24), 12, comm.rank, comm.size)
    mine = folder / str(comm.rank)
    callbacks = [
        keras.callbacks.ModelCheckpoint(str(mine / "model.keras")),
        keras.callbacks.CSVLogger(str(folder / f"{comm.rank}.csv")),
        [keras.callbacks.BackupAndRestore(str(mine / "backup"), delete_checkpoint=False)],
    ]
    with mock.patch.object(tempfile, "tempdir", str(folder / "tmp")):
        training.fit(model, data, epochs=2, callbacks=callbacks, comm=comm, verbose=0)
    alone = [keras.callbacks.CSVLogger(str(folder / "alone.csv"))] if comm.rank == 0 else None
    training.fit(model, data, epochs=0, callbacks=alone, comm=comm, verbose=0)
    saved = keras.models.load_model(folder / "0" / "model.keras")
    same = all(np.array_equal(a, b) for a, b in zip(saved.get_weights(), model.get_weights(), strict=True))
    return same, type(saved.optimizer).__name__


@pytest.mark.rank_counts(2)
def test_only_rank_0_writes_files(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    assert pool.run(_files, tmp_path) == [(True, "Adam")] * pool.size
    assert {path.name for path in tmp_path.iterdir()} == {"tmp", "0", "0.csv", "alone.csv"}
    assert {path.name for path in (tmp_path / "0").iterdir()} == {"model.keras", "backup"}


def _restored(comm: Any, folder: Path, epochs: int) -> Any:
    import keras

    from matex_data import training

    keras.utils.set_random_seed(1 + comm.rank)
    model = problems.compiled(problems.perceptron(1 + comm.rank), keras.optimizers.Adam())
    data = problems.shard(problems.table(24), 12, comm.rank, comm.size)
    backup = keras.callbacks.BackupAndRestore(str(folder), delete_checkpoint=False)
    seen: list[Any] = []
    note = keras.callbacks.LambdaCallback(on_train_begin=lambda logs: seen.extend(problems.weights(model)))
    history = training.fit(model, data, epochs=epochs, callbacks=[backup, note], comm=comm, verbose=0)
    return problems.weights(model), len(history.epoch), [w.tolist() for w in seen]


@pytest.mark.rank_counts(2)
def test_backup_restores_all_ranks(pool: Pool, tmp_path: Path) -> None:
    straight = pool.run(_restored, tmp_path / "straight", 4)
    pool.run(_restored, tmp_path / "broken", 3)
    again = pool.run(_restored, tmp_path / "broken", 4)
    assert [epochs for _, epochs, _ in again] == [1, 1]
    assert again[0][2] == again[1][2]  # callbacks behind it find what rank 0 has restored
    for weights, *_ in again:
        assert all(a.tobytes() == b.tobytes() for a, b in zip(weights, straight[0][0], strict=True))


def _dropout(comm: Any) -> Any:
    import keras

    from matex_data import training

    keras.utils.set_random_seed(7)
    dropout = keras.layers.Dropout(0.5)
    model = keras.Sequential([dropout, keras.layers.Dense(3)])  # not built: no input shape
    problems.compiled(model, keras.optimizers.SGD(0.1))
    data = problems.shard(problems.table(24), 12, comm.rank, comm.size)
    training.fit(model, data, comm=comm, verbose=0)
    training.fit(model, data, comm=comm, verbose=0)
    state = dropout.seed_generator.state.numpy()
    return problems.weights(model), state.tolist(), dropout(np.ones((1, 64)), training=True).numpy().tolist()


@pytest.mark.rank_counts(3)
def test_weights_and_seeds_are_the_same_on_all_ranks_after_dropout(pool: Pool) -> None:
    results = pool.run(_dropout)
    problems.assert_same_weights([result[0] for result in results], results[0][0])
    assert len({str(result[1:]) for result in results}) == 1  # what ranks draw within a step: see test_draws.py


def _scaled(comm: Any, warm_up: float) -> Any:
    import keras

    from matex_data import training

    rates = []
    model = problems.compiled(problems.perceptron(), keras.optimizers.SGD(0.1))
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(float(model.optimizer.learning_rate))
    )
    data = problems.shard(problems.table(40), 10, comm.rank, comm.size)
    scale = training.ScaledLearningRate(factor=3, warm_up=warm_up)
    training.fit(model, data, epochs=3, callbacks=[scale, note], comm=comm, verbose=0)
    return rates


@pytest.mark.parametrize(("executed", "known", "rates"), [
    (4, True, [0.12, 0.2, 0.28, *[0.3] * 6]), (1, False, [*[0.1] * 6, *np.linspace(0.22, 0.3, 5), 0.3]),
])  # fmt: skip
def test_learning_rate_with_executions_of_steps_and_unknown_batches(
    executed: int, known: bool, rates: list[float]
) -> None:
    import keras

    from matex_data import training

    model, found = problems.compiled(problems.perceptron(), keras.optimizers.SGD(0.1)), list[float]()
    model.steps_per_execution = executed
    data = problems.shard(problems.table(50 if known else 25), 5, 0, 1)
    note = lambda batch, logs: found.append(float(model.optimizer.learning_rate))  # noqa: E731
    scale = training.ScaledLearningRate(3, 1 if known else 2)
    data = data if known else data.filter(lambda x, y: True)
    model.fit(data, epochs=3, callbacks=[scale, keras.callbacks.LambdaCallback(on_train_batch_begin=note)], verbose=0)
    np.testing.assert_allclose(found[: len(rates)], rates, rtol=1e-5)


@pytest.mark.rank_counts(1, 2)
@pytest.mark.parametrize(("warm_up", "steps"), [(0, 0), (2, 8)])
def test_learning_rate_warms_up(pool: Pool, warm_up: float, steps: int) -> None:
    expected = [0.1 * (1 + 2 * min(1, (i + 1) / steps if steps else 1)) for i in range(12)]
    for rates in pool.run(_scaled, warm_up):
        np.testing.assert_allclose(rates, expected, rtol=1e-5)


def _raises(comm: Any) -> tuple[bool, int]:
    """Return whether training ends with the error of a callback, and what this rank is busy with while that is kept."""
    import keras

    from matex_data import training
    from matex_data.mpi import activity

    def fail(epoch: int, logs: Any) -> None:
        raise ZeroDivisionError

    model = problems.compiled(problems.perceptron(), "sgd")
    data = problems.shard(problems.table(96), 24, comm.rank, comm.size)
    callbacks = [keras.callbacks.LambdaCallback(on_epoch_end=fail)]
    try:
        training.fit(model, data, comm=comm, callbacks=callbacks, verbose=0)
    except ZeroDivisionError as error:
        return error.__traceback__ is not None, len(activity._entries)
    return False, -1


def test_a_rank_whose_callback_raised_is_not_busy(ranks: Pools) -> None:
    """Others would wait for it, whatever the limit of time, until Python collects the callback."""
    assert ranks(2).run(_raises, timeout=120) == [(True, 0)] * 2


def _fails_to_write(comm: Any, file: Path) -> Any:
    """Return the error of each of two trainings with a callback whose file has no folder, and that of an evaluation."""
    import keras

    from matex_data import training

    model = problems.compiled(problems.perceptron(), "sgd")
    data = problems.shard(problems.table(96), 24, comm.rank, comm.size)
    log = keras.callbacks.CSVLogger(str(file / "log.csv"))
    found = []
    for path in (file, file.parent):
        log.filename = str(path / "log.csv")
        try:
            training.fit(model, data, comm=comm, callbacks=[log], epochs=2, verbose=0)
            found.append("")
        except OSError as error:
            found.append(f"{type(error).__name__} {error}")
    return found


def test_a_file_that_one_rank_cannot_write_is_an_error_of_all(ranks: Pools, tmp_path: Path) -> None:
    """A script that goes on after the error would leave the others in the training before."""
    (first, second), *others = ranks(2).run(_fails_to_write, tmp_path / "absent", timeout=120)
    assert first.startswith("FileNotFoundError")
    assert str(tmp_path / "absent" / "log.csv") in first
    assert others == [[first, ""]]
    assert second == ""
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3


def _fails_to_save(comm: Any, file: Path) -> Any:
    """Return the error and the steps of a training whose file of the second batch has no folder."""
    import keras

    from matex_data import training

    model = problems.compiled(problems.perceptron(), "sgd")
    data = problems.shard(problems.table(96), 24, comm.rank, comm.size)
    save = keras.callbacks.ModelCheckpoint(str(file), save_weights_only=True, save_freq=2)
    try:
        training.fit(model, data, comm=comm, callbacks=[save], verbose=0)
    except Exception as error:
        return str(error), int(model.optimizer.iterations)
    return "", 0


def test_a_file_that_one_rank_cannot_write_after_a_batch_is_an_error_of_all(ranks: Pools, tmp_path: Path) -> None:
    """A script that goes on after the error would leave the others in the step after."""
    (tmp_path / "file").touch()
    (error, steps), *others = ranks(2).run(_fails_to_save, tmp_path / "file" / "new.weights.h5", timeout=120)
    assert str(tmp_path / "file") in error
    assert steps == 2
    assert others == [(error, steps)]


def _fails_to_draw(comm: Any, folder: Path) -> Any:
    """Return the error and the steps of a training whose TensorBoard cannot write the graph, as without its package."""
    import keras

    from matex_data import training

    model = problems.compiled(problems.perceptron(), "sgd")
    data = problems.shard(problems.table(96), 24, comm.rank, comm.size)
    fail = mock.Mock(side_effect=ImportError("TensorBoard is not installed"))
    with mock.patch.object(keras.callbacks.TensorBoard, "_write_keras_model_train_graph", fail):
        try:
            training.fit(model, data, comm=comm, callbacks=[keras.callbacks.TensorBoard(str(folder))], verbose=0)
        except ImportError as error:
            return str(error), int(model.optimizer.iterations)
    return "", 0


def test_a_graph_that_rank_0_cannot_write_is_an_error_of_all_after_the_first_batch(
    ranks: Pools, tmp_path: Path
) -> None:
    assert ranks(2).run(_fails_to_draw, tmp_path, timeout=120) == [("TensorBoard is not installed", 1)] * 2
