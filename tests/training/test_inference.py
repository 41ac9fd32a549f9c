"""``evaluate`` and ``predict`` on all ranks against Keras in one process on all samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from matex_data.errors import ArgumentError
from tests.support.launch import run_script
from tests.support.ranks import Pools

SIZES = [1, 3, pytest.param(2, marks=pytest.mark.slow)]
LAUNCHER = "from matex_data.training.launcher.run import main; main()"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a pattern of two files with 53 samples of three classes."""
    folder, rng = tmp_path_factory.mktemp("inference"), np.random.default_rng(4)
    for number, rows in enumerate((30, 23)):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["x"] = rng.normal(size=(rows, 6)).astype("f4")
            file["y"] = rng.integers(0, 3, rows)
            file["w"] = rng.uniform(0.5, 2, rows).astype("f4")
    return str(folder / "*.h5")


def _model(rank: int = 0) -> Any:
    import keras

    keras.utils.set_random_seed(3 + rank)  # the weights of rank 0 count
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3, "softmax")])
    accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
    model.compile("adam", "sparse_categorical_crossentropy", metrics=[accuracy], weighted_metrics=[accuracy.name])
    return model


def _whole(table: str, comm: Any, samples: int | None = None) -> Any:
    """Return all samples, and what Keras evaluates and predicts on them in one process."""
    arrays = [h5py.File(path) for path in sorted(Path(table).parent.glob("*.h5"))]
    x, y, w = (np.concatenate([file[name][()] for file in arrays])[:samples] for name in "xyw")
    model = _model()
    logs = model.evaluate(x, y, sample_weight=w, verbose=0, return_dict=True)
    return x, logs, model.predict(x, verbose=0)


def _compared(comm: Any, table: str, samples: int | None, batch_size: int | None) -> None:
    import matex_data as md
    from matex_data import training

    x, logs, outputs = _whole(table, comm, samples)
    data = md.open_dataset(table, inputs="x", targets="y", weights="w", comm=comm)
    if samples is not None:
        data, _ = data.split(samples / len(data), 1 - samples / len(data))
    assert len(data) == len(x)
    model = _model(comm.rank)
    found = training.evaluate(model, data, batch_size=batch_size, comm=comm, verbose=0, return_dict=True)
    assert found == pytest.approx(logs, rel=1e-5)
    model = _model(comm.rank)
    before = data.profile.bytes
    own = training.predict(model, data, batch_size=batch_size, comm=comm)
    assert data.profile.bytes - before == own.shape[0] * 6 * 4  # the inputs alone
    first = sum(comm.allgather(len(own))[: comm.rank])
    np.testing.assert_array_equal(data.load()["x"], x[first : first + len(own)])
    np.testing.assert_allclose(np.concatenate(comm.allgather(own)), outputs, rtol=1e-5)
    np.testing.assert_allclose(training.predict(model, data, gather=True, comm=comm), outputs, rtol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("samples", "batch"), [(None, 12), (2, None)])
def test_all_samples_once_in_the_order_of_the_files(
    size: int, samples: int | None, batch: int | None, table: str, ranks: Pools
) -> None:
    ranks(size).run(_compared, table, samples, batch, timeout=100)


def _of_pipelines(comm: Any, table: str) -> None:
    import keras
    import tensorflow as tf

    import matex_data as md
    from matex_data import training

    x, _, outputs = _whole(table, comm)
    data = md.open_dataset(table, inputs="x", targets="y", comm=comm)
    whole = tf.data.Dataset.from_tensor_slices(x)
    model = _model(comm.rank)
    for batches in (data.tf_dataset(24, remainder="keep"), training.shard(whole.batch(26), comm=comm)):
        found = training.predict(model, batches, gather=True, comm=comm, verbose=0)
        np.testing.assert_allclose(found, outputs, rtol=1e-5)
    traces: list[Any] = []
    tracing = keras.Sequential([model, keras.layers.Lambda(lambda x: (x, traces.append(x))[0])])
    for steps, traced in ((2, 0), (1, None)):
        first = training.predict(tracing, batches, steps=steps, gather=True, comm=comm, verbose=0, verify="never")
        np.testing.assert_allclose(first, outputs[: 26 * steps], rtol=1e-5)
        assert traced is not None or not traces  # the second call runs the step of the first
        traces.clear()
    with pytest.raises(ArgumentError, match="steps="):
        training.predict(model, data, steps=1, comm=comm)
    few = training.predict(model, training.shard(whole.take(1).batch(4), comm=comm), comm=comm, verbose=0)
    assert len(few) == int(comm.rank == 0)
    with pytest.raises(md.PartitionError, match="padding"):
        training.predict(model, data.tf_dataset(24, remainder="pad"), comm=comm)
    with pytest.raises(TypeError, match=r"found: ndarray\n +remedy: (.|\n)*md.training.shard"):
        training.evaluate(model, x, comm=comm)


def _of_rows(comm: Any) -> None:
    """Evaluate, and predict with, a stateful layer, which goes on with the rows of each rank."""
    import keras
    import tensorflow as tf

    from matex_data import training

    def model(rows: int) -> Any:
        keras.utils.set_random_seed(5)
        layers = [keras.layers.GRU(2, stateful=True), keras.layers.Dense(1)]
        made = keras.Sequential([keras.Input(batch_shape=(rows, 3, 1)), *layers])
        made.compile(loss="mse")
        return made

    x = np.linspace(0, 1, 12 * comm.size, dtype="f4").reshape(2, 2 * comm.size, 3, 1)
    whole, own = model(2 * comm.size), model(2)
    expected = [whole.evaluate(rows, rows[:, 0], verbose=0, batch_size=len(rows)) for rows in x]
    expected.append(whole.predict(x[0], verbose=0, batch_size=2 * comm.size))
    whole_data = [tf.data.Dataset.from_tensor_slices((rows, rows[:, 0])).batch(len(rows), True) for rows in x]
    data = [training.shard(batches, comm=comm) for batches in whole_data]
    options: dict[str, Any] = {"comm": comm, "verify": "never", "verbose": 0}
    found = [training.evaluate(own, rows, **options) for rows in data]
    found.append(training.predict(own, data[0], gather=True, **options))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


def test_states_of_rows_stay_those_of_their_rank(ranks: Pools) -> None:
    ranks(2).run(_of_rows, timeout=100)


def _within_fit(comm: Any, table: str) -> None:
    import keras

    import matex_data as md
    from matex_data import training

    train, valid = md.open_dataset(table, inputs="x", targets="y", comm=comm).split(0.5, 0.5, seed=1)
    held_out = valid.tf_dataset(6, remainder="keep")

    class Evaluation(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            found = training.evaluate(self.model, valid, batch_size=6, comm=comm, verbose=0)
            assert found[0] == pytest.approx(logs["val_loss"], rel=1e-5)
            assert self.model.evaluate(held_out, verbose=0) == pytest.approx(found, rel=1e-5)
            rows = training.predict(self.model, valid, gather=True, comm=comm)
            assert rows.shape == (len(valid), 3)

    model = _model(comm.rank)
    training.fit(model, train, validation_data=held_out, batch_size=6, callbacks=[Evaluation()], verbose=0, comm=comm)

    class Alone(keras.callbacks.CSVLogger):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            with pytest.raises(md.PartitionError, match="one rank alone"):
                training.predict(self.model, valid, comm=comm)

    training.fit(model, train, batch_size=6, callbacks=[Alone("/dev/null")], verbose=0, comm=comm)


@pytest.mark.parametrize("function", [_of_pipelines, pytest.param(_within_fit, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [3])
def test_pipelines_and_callbacks(size: int, function: Any, table: str, ranks: Pools) -> None:
    ranks(size).run(function, table, timeout=100)


def _compiled_again(comm: Any, table: str) -> None:
    import matex_data as md
    from matex_data import training

    *_, outputs = _whole(table, comm)
    data, model = md.open_dataset(table, inputs="x", comm=comm), _model()
    for steps in (1, 4):
        model.compile("adam", "sparse_categorical_crossentropy", steps_per_execution=steps)
        batches = data.tf_dataset(batch_size=6, remainder="keep")
        found = training.predict(model, batches, gather=True, comm=comm, verbose=0)
        np.testing.assert_allclose(found, outputs, rtol=1e-5)


def test_a_model_that_is_compiled_for_several_steps(table: str, ranks: Pools) -> None:
    ranks(2).run(_compiled_again, table)


def _damaged(comm: Any, path: str) -> str:
    import matex_data as md
    from matex_data import training

    data = md.open_dataset(path, inputs="x", targets="y", comm=comm)
    errors = []
    for call in (training.predict, training.evaluate):
        with pytest.raises(md.DecodeError) as caught:
            call(_model(), data, comm=comm, verbose=0)
        errors.append(str(caught.value))
    return "\n".join(errors)


def test_damage_is_one_error_on_all_ranks(tmp_path: Path, ranks: Pools) -> None:
    path = tmp_path / "damaged.h5"
    with h5py.File(path, "w") as file:
        file["y"] = np.zeros(90, "i4")
        chunks = file.create_dataset("x", data=np.zeros((90, 6), "f4"), chunks=(10, 6), compression="gzip")
        offset = chunks.id.get_chunk_info(7).byte_offset
    content = bytearray(path.read_bytes())
    content[offset : offset + 4] = b"\xff" * 4
    path.write_bytes(content)
    errors = ranks(3).run(_damaged, str(path))
    assert len(set(errors)) == 1
    assert "damaged.h5" in errors[0]


UNDER_THE_LAUNCHER = """
import sys
import keras, numpy as np
import matex_data as md
import tensorflow.compat.v1 as tf1
data = md.open_dataset(sys.argv[1], inputs="x", targets="y")
x, y = data[:]
keras.utils.set_random_seed(3)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")])
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model.fit(x, y, batch_size=10, epochs=2, verbose=0)
whole = model.evaluate(x, y, verbose=0)
for _ in range(2):
    np.testing.assert_allclose(md.training.evaluate(model, data, batch_size=10, verbose=0), whole, rtol=1e-5)
expected = model.predict(x, verbose=0)
np.testing.assert_allclose(md.training.predict(model, data, gather=True), expected, rtol=1e-5)
batches = data.tf_dataset(10, remainder="keep")
np.testing.assert_allclose(md.training.predict(model, batches, gather=True), expected, rtol=1e-5)
other = keras.models.clone_model(model)
other.set_weights(model.get_weights())
other.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
np.testing.assert_allclose(md.training.evaluate(other, data, batch_size=10, verbose=0), whole, rtol=1e-5)
print("EQUAL", md.training.world().size)
"""


def test_under_the_launcher(table: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(UNDER_THE_LAUNCHER)
    done = run_script(2, LAUNCHER, "--all-output", str(script), table, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("EQUAL 2") == 2


def _recompiled(comm: Any) -> Any:
    import keras
    import tensorflow as tf

    from matex_data import training

    model, found = _model(), []
    x = np.random.default_rng(0).normal(size=(10, 6)).astype("f4")
    for activation in ("softmax", "linear"):
        model.layers[-1].activation = keras.activations.get(activation)
        model.compile("adam", "mse")
        batches = training.shard(tf.data.Dataset.from_tensor_slices(x).batch(5), comm=comm)
        found.append((training.predict(model, batches, gather=True, comm=comm), model(x).numpy()))
    return found


def test_a_model_that_is_compiled_anew_is_traced_anew(ranks: Pools) -> None:
    for found in ranks(2).run(_recompiled, timeout=60):
        for outputs, expected in found:
            np.testing.assert_allclose(outputs, expected, rtol=1e-5)
