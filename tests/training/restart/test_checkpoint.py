"""Checkpoints: restored state of models and callbacks, and damaged files."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest

import matex_data as md
from matex_data.errors import DataError, FormatError, PartitionError
from tests.support import problems
from tests.support.logs import logged
from tests.support.ranks import Pool, Pools

ROWS, BATCH, STEPS = 120, 24, 5
FILE = "training.npz"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "table.h5"
    x, y = problems.table(ROWS)
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=x, chunks=(10, 6))
        file.create_dataset("y", data=np.random.default_rng(1).permutation(y), chunks=(10,))
    return path


class Interrupted(Exception):
    """Error that a callback raises on all ranks in the same step."""


def _model(seed: int, rate: float) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((problems.FEATURES,)), *layers])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(rate, momentum=0.5), loss, metrics=["accuracy"])
    return model


def _stop_at(step: int) -> Any:
    import keras

    class Stop(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        left = step

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.left -= 1
            if not self.left:
                raise Interrupted

    return Stop()


def _fit(
    comm: Any, path: Path, folder: Path | None, callbacks: dict[str, dict[str, Any]], stop: int, **options: Any
) -> tuple[list[Any], list[dict[str, Any]], list[int]]:
    """Train; return the weights, the attributes of the callbacks, and the epochs."""
    import keras

    data = md.open_dataset(path, inputs="x", targets="y", comm=comm)
    x, y = problems.table(48, seed=2)
    rows = problems.block(48, comm.rank, comm.size)
    made = [getattr(keras.callbacks, name.partition("#")[0])(**given) for name, given in callbacks.items()]
    model = _model(comm.rank + options.pop("init", 1), 0.3)
    history: Any = None
    with contextlib.suppress(Interrupted):
        history = md.training.fit(
            model,
            data,
            validation_data=_validation(x[rows], y[rows]),
            callbacks=[*made, *([_stop_at(stop)] if stop else [])],
            checkpoint=folder,
            comm=comm,
            verbose=0,
            **{"batch_size": BATCH, "shuffle": True, "seed": 5, "epochs": 12, **options},
        )
    assert (history is None) == bool(stop)
    plain = [{k: v for k, v in vars(callback).items() if isinstance(v, int | float | str)} for callback in made]
    for known in plain:
        known["rate"] = float(model.optimizer.learning_rate.numpy())
    return problems.weights(model), plain, history.epoch if history else []


def _validation(x: Any, y: Any) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((x, y)).batch(12)


STOPPING = {"EarlyStopping": {"patience": 3, "restore_best_weights": True, "monitor": "val_loss"}}
PLATEAU = {"ReduceLROnPlateau": {"patience": 2, "cooldown": 1, "factor": 0.5, "monitor": "val_loss"}}


@pytest.mark.slow
def test_resumed_callbacks_equal_those_of_one_run(table: Path, tmp_path: Path, ranks: Pools) -> None:
    pool, callbacks = ranks(2), PLATEAU | STOPPING
    straight = pool.run(_fit, table, tmp_path / "straight", callbacks, 0, save_every=3, timeout=180)
    last = straight[0][2][-1]
    assert straight[0][1][1]["best_epoch"] < last < 11 and straight[0][1][0]["rate"] < 0.2
    stop = (last - 1) * STEPS + 4  # behind the best epoch, and in the middle of one
    pool.run(_fit, table, tmp_path, callbacks, stop, save_every=3, timeout=180)
    resumed = pool.run(_fit, table, tmp_path, callbacks, 0, save_every=3, init=9, timeout=180)
    ended = pool.run(_fit, table, tmp_path, callbacks, 0, save_every=3, init=10, timeout=180)
    for again, (expected, known, _) in zip([*resumed, *ended], straight * 2, strict=True):
        for callback in (*again[1], *known):
            callback.pop("min_delta", None)  # Keras turns its sign in the first epoch
        assert again[1] == known
        assert all(a.tobytes() == b.tobytes() for a, b in zip(again[0], expected, strict=True))
    assert resumed[0][2] == list(range(last + 1))
    assert ended[0][2] == list(range(last + 1))  # EarlyStopping has ended this run


def test_changed_options_of_callbacks_are_respected(table: Path, tmp_path: Path, ranks: Pools) -> None:
    """Continue a run that ``EarlyStopping`` has ended with more patience, less the epochs that it has waited."""
    pool = ranks(1)
    (_, (ended,), epochs), *_ = pool.run(_fit, table, tmp_path, STOPPING, 0, timeout=180)
    patient = {"EarlyStopping": {**STOPPING["EarlyStopping"], "patience": 5}}
    (_, (known,), more), *_ = pool.run(_fit, table, tmp_path, patient, 0, timeout=180)
    assert (ended["patience"], known["patience"]) == (3, 5)
    assert more == [*epochs, epochs[-1] + 1, epochs[-1] + 2] and known["wait"] == 5
    assert known["best"] == ended["best"] and known["best_epoch"] == ended["best_epoch"]


def _matches(comm: Any) -> None:
    import keras

    from matex_data.training.restart import callback_state

    class Counter(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        count, secret = 0, 0

        def get_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    def made(*patience: int, monitor: str = "val_loss", mode: str = "min") -> list[Any]:
        found = [
            keras.callbacks.EarlyStopping(monitor, patience=p, mode=mode, restore_best_weights=True) for p in patience
        ]
        for callback in found:
            callback.on_train_begin()
        return found

    def saved(callbacks: list[Any]) -> list[Any]:
        return [
            json.loads(json.dumps({**callback_state.identity(c), **callback_state.capture(c)[0]})) for c in callbacks
        ]

    def positions(callbacks: list[Any], entries: list[Any]) -> list[int | None]:
        pairs = {id(c): i for c, i in callback_state.match(callbacks, entries, warn=True)}
        return [pairs.get(id(c)) for c in callbacks]

    began = saved(made(3, 5))
    assert positions(made(5, 3), began) == [1, 0]  # not by position
    assert positions(made(3, 7), began) == [0, 1]
    assert positions(made(7, 8), began) == [None, None]
    assert positions(made(3), began) == [0]
    assert positions([keras.callbacks.ReduceLROnPlateau("val_loss", mode="min"), *made(5)], began) == [None, 1]
    assert positions(made(3, 5, monitor="val_accuracy"), began) == [None, None]
    assert positions(made(3, 5, mode="max"), began) == [None, None]

    before, after = Counter(), Counter()
    before.count, before.secret = 7, 8
    (entry,) = saved([before])
    assert positions([after], [entry]) == [0]
    callback_state.restore(after, entry, {})
    assert (after.count, after.secret) == (7, 0)

    (stopping,) = made(3)
    stopping.best, stopping.wait, stopping.best_weights = np.float32(0.5), 2, [np.ones(3)]
    facts, arrays = callback_state.capture(stopping)
    assert facts["state"]["best"] == 0.5 and [a.tolist() for a in arrays["best_weights"]] == [[1.0] * 3]
    (fresh,) = made(4)
    callback_state.restore(fresh, {"state": {**facts["state"], "patience": 9}}, arrays)
    assert (fresh.wait, fresh.best, fresh.patience, len(fresh.best_weights)) == (2, 0.5, 4, 1)


def test_callbacks_match_by_class_and_options(ranks: Pools) -> None:
    ranks(1).run(_matches, timeout=180)


Damage = Callable[[bytes], bytes]


def _rewritten(change: Callable[[dict[str, bytes]], None]) -> Damage:
    """Rewrite a file with other members and correct checksums."""

    def damage(data: bytes) -> bytes:
        import io

        with zipfile.ZipFile(io.BytesIO(data)) as file:
            members = {name: file.read(name) for name in file.namelist()}
        change(members)
        out = io.BytesIO()
        with zipfile.ZipFile(out, "w") as file:
            for name, content in members.items():
                file.writestr(name, content)
        return out.getvalue()

    return damage


def _facts(change: Callable[[dict[str, Any]], Any]) -> Damage:
    def on_members(members: dict[str, bytes]) -> None:
        import io

        facts = json.loads(np.load(io.BytesIO(members["facts.npy"])).tobytes())
        change(facts)
        out = io.BytesIO()
        np.save(out, np.frombuffer(json.dumps(facts).encode(), np.uint8))
        members["facts.npy"] = out.getvalue()

    return _rewritten(on_members)


def _array(array: Any) -> bytes:
    import io

    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


DAMAGES: dict[str, Damage] = {
    "empty": lambda data: b"",
    "half": lambda data: data[: len(data) // 2],
    "tail": lambda data: data[:-1],
    "text": lambda data: b"epoch 3, loss 0.2\n" * 20,
    "array": lambda data: _array(np.zeros(3)),
    "pickle": lambda data: pickle.dumps({"epoch": 3}),
    "crc": lambda data: data[:500] + bytes([data[500] ^ 4]) + data[501:],
    "missing": _rewritten(lambda members: members.pop("common0.npy") and None),
    "more": _rewritten(lambda members: members.update({"other.npy": members["common0.npy"]})),
    "no facts": _rewritten(lambda members: members.pop("facts.npy") and None),
    "shape": _rewritten(lambda members: members.update({"common0.npy": _array(np.zeros((2, 2), np.float32))})),
    "dtype": _rewritten(lambda members: members.update({"common0.npy": _array(np.zeros((6, 64)))})),
    "no json": _rewritten(lambda members: members.update({"facts.npy": _array(np.frombuffer(b"{oh", np.uint8))})),
    "unknown fact": _facts(lambda facts: facts.update(colour="blue")),
    "no position": _facts(lambda facts: facts.pop("position")),
    "other position": _facts(lambda facts: facts.update(position={"epoch": 1, "batch": 2})),
    "other version": _facts(lambda facts: facts.update(version=2)),
}


def _opened(comm: Any, folder: Path, path: Path, names: list[str]) -> list[Any]:
    """Return for each damage the error of this rank, or the facts that it reads."""
    from matex_data.training.comm.channel import open_channel
    from matex_data.training.restart import checkpoint

    found: list[Any] = []
    whole = path.read_bytes()
    seed = random.Random(1)
    flips = [(seed.randrange(len(whole)), 1 << seed.randrange(8)) for _ in names if _ == "flip"]
    for name in names:
        damage = DAMAGES.get(name)
        if damage is None:
            at, bit = flips.pop()
            data = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
        else:
            data = damage(whole)
        if comm.rank == 0:
            (folder / FILE).write_bytes(data)
        comm.Barrier()
        try:
            opened = checkpoint.open_checkpoint(open_channel(comm), folder)
            assert opened is not None
            arrays = {key: opened.array(key).tobytes() for key in opened.facts["arrays"]}
            found.append((arrays, opened.facts))
        except Exception as error:
            found.append(error)
        comm.Barrier()
    return found


def test_a_damaged_checkpoint_is_an_error_that_names_the_file(table: Path, tmp_path: Path, ranks: Pools) -> None:
    folder = tmp_path / "copy"
    folder.mkdir()
    ranks(2).run(_fit, table, tmp_path, STOPPING, 7, timeout=180)
    whole = ranks(1).run(_content, tmp_path, timeout=180)[0]
    names = [*DAMAGES, *["flip"] * 60]
    for name, *outcomes in zip(names, *ranks(2).run(_opened, folder, tmp_path / FILE, names, timeout=180), strict=True):
        if name == "flip" and not isinstance(outcomes[0], Exception):  # in what no reader looks at, such as times
            assert outcomes == [whole] * 2
            continue
        for error in outcomes:
            assert type(error) is FormatError and str(folder / FILE) in str(error), (name, error)
        assert str(outcomes[0]) == str(outcomes[1])


def _content(comm: Any, folder: Path) -> Any:
    from matex_data.training.restart import checkpoint

    found = checkpoint.read(folder)
    assert found is not None
    return {name: found[0][name].tobytes() for name in found[1]["arrays"]}, found[1]


def _peaks(comm: Any, folder: Path) -> tuple[int, int]:
    """Return the largest memory in which arrays of 1 MB are written and read, in bytes."""
    import tracemalloc

    from matex_data.training.restart import checkpoint

    facts = {"position": {"epoch": 1, "step": 0, "steps": 2}, "data": [], "callbacks": [], "stopped": False}
    names = [f"v{i}" for i in range(8)]
    arrays = ((f"common{i}", np.full(1 << 18, i, np.float32)) for i in range(8))
    tracemalloc.start()
    try:
        checkpoint.write(folder, arrays, {**facts, "common": names, "own": []})
        written = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        found = checkpoint.read(folder)
        assert found is not None
        assert [int(found[0][f"common{i}"][-1]) for i in range(8)] == [*range(8)]
        return written, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_one_array_at_a_time_is_in_memory(tmp_path: Path, ranks: Pools) -> None:
    ((written, read),) = ranks(1).run(_peaks, tmp_path, timeout=60)
    assert max(written, read) < 3.5 * (1 << 20)


def _started(comm: Any, folder: Path) -> list[str]:
    import subprocess

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.restart import checkpoint

    if comm.rank == 0:
        dead = subprocess.Popen(["true"])
        dead.wait()
        for name in (f".{FILE}.{dead.pid}", f".{FILE}.1", "notes.txt", f".{FILE}.{2**22 + 1}"):
            (folder / name).write_bytes(b"half")
    comm.Barrier()
    assert checkpoint.open_checkpoint(open_channel(comm), folder) is None
    comm.Barrier()
    return sorted(path.name for path in folder.iterdir())


def test_drafts_of_interrupted_saves_are_removed(tmp_path: Path, ranks: Pools) -> None:
    assert ranks(2).run(_started, tmp_path, timeout=180) == [[f".{FILE}.1", "notes.txt"]] * 2  # that process lives


def _sent(comm: Any, folder: Path) -> tuple[int, int, int]:
    """Return the bytes that this rank broadcasts as arrays and as objects, and those that are equal on all ranks."""
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.exact.variables import build
    from matex_data.training.restart import checkpoint

    channel = open_channel(comm)
    model = _model(1, 0.1)
    build(model, (tf.TensorSpec((None, problems.FEATURES)), tf.TensorSpec((None,), tf.int64)))
    arrays, objects = [], []
    broadcast, gather = channel.host.broadcast, channel.host.allgather_object
    channel.host.broadcast = lambda flat, root=0: (arrays.append(flat.nbytes), broadcast(flat, root))[1]  # type: ignore[method-assign]
    channel.host.allgather_object = lambda value: (objects.append(len(pickle.dumps(value))), gather(value))[1]  # type: ignore[method-assign]
    try:
        found = checkpoint.open_checkpoint(channel, folder)
        assert found is not None
        checkpoint.ModelState(model, channel).restore(found)
    finally:
        del channel.host.broadcast, channel.host.allgather_object
    kinds = ("common", "metrics", "own")
    tables = [t for name, t in found.facts["arrays"].items() if name.startswith(kinds)]
    return sum(arrays), sum(objects), sum(int(np.prod(s)) * np.dtype(d).itemsize for d, s in tables)


def test_arrays_are_broadcast_once(table: Path, tmp_path: Path, ranks: Pools) -> None:
    ranks(2).run(_fit, table, tmp_path, STOPPING, 7, timeout=180)
    for arrays, objects, stored in ranks(2).run(_sent, tmp_path, timeout=180):
        assert arrays == stored > 3000
        assert objects < 8000


def _resumed_with_two_optimizers(comm: Any, folder: Path) -> tuple[int, list[Any], list[Any]]:
    """Train two epochs at once, and one of them after another process has left; return steps, and weights of both."""
    import keras
    import tensorflow as tf

    from matex_data import training

    class Two(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                loss = self.compute_loss(x, y, self(x, training=True))
            for optimizer, layer in zip((self.optimizer, self.second), self.layers, strict=True):
                weights = layer.trainable_variables
                optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
            return {"loss": loss}

    def fit(epochs: int, **options: Any) -> Any:
        keras.utils.set_random_seed(1)
        model = Two([keras.Input((problems.FEATURES,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.second = keras.optimizers.SGD(0.01, momentum=0.9)
        model.compile(keras.optimizers.Adam(0.01), "mse")
        x, _ = problems.table(24)
        data = problems.shard((x, x[:, :1]), 12, comm.rank, comm.size)
        training.fit(model, data, epochs=epochs, comm=comm, verbose=0, **options)
        return model

    whole = fit(2)
    fit(1, checkpoint=folder)
    model = fit(2, checkpoint=folder)
    return int(model.second.iterations.numpy()), whole.get_weights(), model.get_weights()


@pytest.mark.rank_counts(2)
def test_a_second_optimizer_goes_on(pool: Pool, tmp_path: Path) -> None:
    for steps, whole, resumed in pool.run(_resumed_with_two_optimizers, tmp_path, timeout=120):
        assert steps == 4
        for one, other in zip(whole, resumed, strict=True):
            np.testing.assert_array_equal(one, other)


def _by_name(comm: Any, folder: Path) -> None:
    import keras
    import tensorflow as tf

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.exact.variables import build
    from matex_data.training.restart import checkpoint

    def model(*names: str, frozen: bool = False, kind: str = "float32") -> Any:
        layers = [keras.layers.Dense(4, name=name, dtype=kind) for name in names]
        made = keras.Sequential([keras.Input((4,)), *layers])
        layers[0].trainable = not frozen
        made.compile(keras.optimizers.Adam(0.1), "mse")
        made.optimizer.build(made.trainable_variables)
        return made

    channel = open_channel(comm)
    facts = {"position": {"epoch": 0, "step": 0, "steps": 1}, "data": [], "callbacks": [], "stopped": False}

    def moved(before: Any, after: Any) -> list[Any]:
        arrays, names = checkpoint.ModelState(before, channel).capture()
        checkpoint.write(folder, arrays, facts | names)
        found = checkpoint.open_checkpoint(channel, folder)
        assert found is not None
        state = checkpoint.ModelState(after, channel)
        state.restore(found)
        return problems.weights(after)

    first = model("a", "b")
    expected = problems.weights(first)
    assert [w.tobytes() for w in moved(first, model("b", "a"))] == [expected[i].tobytes() for i in (2, 3, 0, 1)]
    numbered = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4)])
    numbered.compile(keras.optimizers.Adam(0.1), "mse")
    numbered.optimizer.build(numbered.trainable_variables)
    again = keras.models.clone_model(
        keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(4)])
    )
    again.compile(keras.optimizers.Adam(0.1), "mse")
    again.optimizer.build(again.trainable_variables)
    for mine, other in zip(moved(numbered, again), problems.weights(numbered), strict=True):
        assert mine.tobytes() == other.tobytes()
    half = model("a", "b", kind="bfloat16")
    for mine, other in zip(moved(half, model("a", "b", kind="bfloat16")), half.get_weights(), strict=True):
        assert mine.dtype == other.dtype and mine.tobytes() == np.asarray(other).tobytes()
    for other in (model("a", "c"), model("a"), model("a", "b", kind="bfloat16")):
        with pytest.raises(PartitionError, match="another model"):
            moved(first, other)
    again.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    again.optimizer.build(again.trainable_variables)
    with pytest.raises(PartitionError) as error:
        moved(numbered, again)
    assert "model/" not in str(error.value) and "momentum" in str(error.value)
    assert checkpoint.rank_variables(model("a", "b", frozen=True)) == []

    def drawing(metrics: list[str], draws: int) -> Any:
        drop = keras.layers.Dropout(0.5, name="drop")
        made = keras.Sequential([keras.Input((4,)), drop, keras.layers.Dense(1, name="a")])
        made.compile("sgd", "mse", metrics=metrics)
        build(made, (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1))))
        drop.seed_generator.state.assign([7, draws])
        return made

    for metrics in (["mae"], [], ["mape", "mae"]):  # others than those of the checkpoint
        after = drawing(metrics, 0)
        moved(drawing(["mae"], 9), after)
        assert after.layers[0].seed_generator.state.numpy().tolist() == [7, 9]


def test_variables_match_by_name(tmp_path: Path, ranks: Pools) -> None:
    ranks(1).run(_by_name, tmp_path, timeout=180)


def _dropping(comm: Any, folder: Path, epochs: int) -> Any:
    import keras

    from matex_data import training

    model = keras.Sequential([keras.Input((problems.FEATURES,)), keras.layers.Dropout(0.5, seed=7)])
    model.compile("sgd", "mse")
    x, _ = problems.table(8)
    data = problems.shard((x, x), 4, comm.rank, comm.size)
    training.fit(model, data, comm=comm, verbose=0, epochs=epochs, checkpoint=folder, verify="never")
    return model.layers[0].seed_generator.state.numpy().tolist()


def test_another_number_of_ranks_goes_on_with_the_draws(tmp_path: Path, ranks: Pools) -> None:
    assert ranks(2).run(_dropping, tmp_path, 1) == [[7, 2]] * 2
    assert ranks(1).run(_dropping, tmp_path, 2) == [[7, 4]]


def _saved(comm: Any) -> Any:
    import keras

    from matex_data.training.comm.channel import open_channel
    from matex_data.training.exact.variables import broadcast
    from matex_data.training.restart import checkpoint

    model = keras.Sequential(
        [keras.Input((500,)), keras.layers.BatchNormalization(), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", metrics=["mae"])
    broadcast(model.trainable_variables, comm=comm)
    channel = open_channel(comm)
    before = []
    for i, variable in enumerate([*model.non_trainable_weights, *model.metrics_variables]):
        variable.assign(np.random.default_rng([i, comm.rank]).uniform(size=variable.shape).astype(np.float32))
        before.append(np.array(variable))
    arrays, names = checkpoint.ModelState(model, channel).capture()
    own = {name: array for name, array in arrays if name.startswith(("own", "metrics"))}
    found = checkpoint.Checkpoint(
        channel,
        Path(FILE),
        {**names, "arrays": comm.bcast({name: [str(array.dtype), array.shape] for name, array in own.items()})},
        dict(own),
    )
    metrics = [comm.allreduce(np.array(variable)) for variable in model.metrics_variables]  # of all ranks
    statistics = [np.array(v) for v in model.non_trainable_weights]
    restored = [*model.metrics_variables, *checkpoint.rank_variables(model)]
    current = [*metrics, *(np.array(variable) for variable in restored[len(metrics) :])]
    for variable in restored:
        variable.assign(np.zeros_like(variable))
    checkpoint.restore_rank_variables(found, model, of_all=True)
    return before, statistics, own, [np.array(variable) for variable in restored], current


def test_moving_statistics_are_stored_once(pool: Pool) -> None:
    outcomes = pool.run(_saved, timeout=60)
    befores, statistics, stored, rows, current = zip(*outcomes, strict=True)
    for values in zip(*befores, strict=True):
        if values[0].shape == (500,):
            mean = np.stack(values).astype(np.float64).mean(0).astype(np.float32)
            assert all(any(mean.tobytes() == x.tobytes() for x in after) for after in statistics)
    assert sum(array.size for array in stored[0].values()) < 30 * pool.size  # a vector has 500
    assert not any(stored[1:])  # of other ranks, rank 0 alone has values
    for own, expected in zip(rows, current, strict=True):
        for x, y in zip(own, expected, strict=True):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def _pipeline(comm: Any, path: Path, folder: Path | None, stop: int, seed: int | None = 5, batch: int = BATCH) -> Any:
    data = md.open_dataset(path, inputs="x", targets="y", comm=comm).tf_dataset(batch, shuffle=True, seed=seed)
    model = _model(1, 0.1)
    with contextlib.suppress(Interrupted):
        md.training.fit(
            model,
            data.map(lambda x, y: (2 * x, y)).prefetch(2),
            epochs=4,
            checkpoint=folder,
            save_every=2,
            comm=comm,
            verbose=0,
            callbacks=[_stop_at(stop)] if stop else [],
        )
    return problems.weights(model)


def test_a_pipeline_resumes_in_its_epoch(table: Path, tmp_path: Path, ranks: Pools) -> None:
    pool = ranks(1)
    straight = pool.run(_pipeline, table, None, 0, timeout=180)
    pool.run(_pipeline, table, tmp_path, 2 * STEPS + 4, timeout=180)
    for name, options in (("seed", {"seed": None}), ("batch_size", {"batch": 12})):
        (error,) = pool.outcomes(_pipeline, table, tmp_path, 0, **options, timeout=180)
        assert isinstance(error, DataError) and name in str(error)
    resumed = pool.run(_pipeline, table, tmp_path, 0, timeout=180)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(resumed[0], straight[0], strict=True))


def _steps_of_saves(comm: Any, begin: int, executed: int) -> list[int]:
    from matex_data.training.comm.channel import open_channel
    from matex_data.training.restart.resume import CheckpointSaver, TrainingPosition

    start, found = TrainingPosition(0, begin, 16), list[int]()
    run: Any = SimpleNamespace(channel=open_channel(comm), start=start, save_every=3, checkpoint=None)
    saver: Any = CheckpointSaver(run, [], lambda: None)
    saver.save = lambda epoch, step: found.append(step)
    saver._last = begin
    for step in range(begin + executed, 17, executed):
        saver.on_train_batch_end(step - 1)
    return found


def test_a_run_that_ended_between_saves_saves_after_the_same_steps(ranks: Pools) -> None:
    for begin, executed, expected in [(0, 1, [3, 6, 9, 12, 15]), (4, 1, [6, 9, 12, 15]), (4, 4, [8, 12])]:
        assert ranks(1).run(_steps_of_saves, begin, executed) == [expected], begin
    assert ranks(1).run(_steps_of_saves, 0, 4) == [[4, 8, 12]]


def test_a_folder_that_cannot_be_written_is_an_error_before_training(table: Path, tmp_path: Path, ranks: Pools) -> None:
    (tmp_path / "file").write_text("no folder")
    for error in ranks(2).outcomes(_fit, table, tmp_path / "file" / "run", {}, 1, timeout=180):  # it stops in step 1
        assert isinstance(error, DataError) and "cannot be written" in str(error) and "intact" not in str(error)


def _warnings_of_rates(comm: Any, folder: Path, rates: list[float]) -> list[str]:
    """Train an epoch more with each rate; return the warnings."""
    import keras

    with logged() as lines:
        for epochs, rate in enumerate(rates, 1):
            data = md.open_dataset({"x": np.ones((8, 2)), "y": np.ones((8, 1))}, inputs="x", targets="y", comm=comm)
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
            model.compile(keras.optimizers.SGD(rate), "mse")
            slower = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
            given = {"epochs": epochs, "checkpoint": folder, "callbacks": [slower], "verbose": 0}
            md.training.fit(model, data, batch_size=8, comm=comm, **given)
    return [line for line in lines if "learning rate" in line]


def test_another_learning_rate_is_told_and_that_of_the_checkpoint_taken(tmp_path: Path, ranks: Pools) -> None:
    ((told,),) = ranks(1).run(_warnings_of_rates, tmp_path, [0.5, 0.5, 0.1], timeout=60)
    assert "script is 0.1 now" in told and "checkpoint, 0.125" in told


def _told_of_variables(comm: Any, folder: Path) -> list[list[str]]:
    """Train models of which the checkpoint holds a counter, or does not; return the warnings of each."""
    import keras
    import tensorflow as tf

    class Counting(keras.Sequential):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            logs = super().train_step(data)
            self.counter.assign(self.counter * 0.5)
            return logs

    class Annealed(keras.losses.Loss):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.teacher = keras.Variable(1.0, trainable=False), tf.Variable(2.0)

        def call(self, y_true: Any, y_pred: Any) -> Any:
            loss = self.teacher * self.weight * keras.ops.mean((y_true - y_pred) ** 2, -1)
            self.weight.assign(0.5 * self.weight)
            return loss

    comm = comm.Dup()
    md.training.allreduce(tf.constant(1.0), comm=comm)  # makes the counter of collective operations
    told: list[list[str]] = []
    for kind in ("weight", "variable", "loss", "sections"):
        layers = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        model = Counting([keras.Input((2,)), *layers])
        model.counter = tf.Variable(1.0) if kind == "variable" else model.add_weight(shape=(), trainable=False)
        sections = kind == "sections"
        optimizer = keras.optimizers.Adam(use_ema=not sections)
        optimizer = optimizer if sections else keras.optimizers.LossScaleOptimizer(optimizer)
        model.compile(optimizer, Annealed() if kind == "loss" else "mse", metrics=["mae"])
        x = np.random.default_rng(1).normal(size=(32, 2))
        data = md.open_dataset({"x": x, "y": x[:, :1]}, inputs="x", targets="y", comm=comm)
        given: dict[str, Any] = {"validation_data": data, "checkpoint": folder / kind, "verbose": 0, "comm": comm}
        with logged() as lines:
            md.training.fit(model, data, batch_size=8, epochs=2, shard_optimizer=sections, **given)
        told.append([line for line in lines if "does not hold" in line])
    return told


@pytest.mark.rank_counts(2)
def test_variables_that_a_checkpoint_lacks_are_named(pool: Pool, tmp_path: Path) -> None:
    weight, (variable,), (loss,), sections = pool.run(_told_of_variables, tmp_path, timeout=120)[0]
    assert weight == sections == []
    assert "counter of Counting (float32[])" in variable
    assert "weight of Annealed (float32[])" in loss and "teacher" not in loss


def test_another_dataset_is_an_error(table: Path, tmp_path: Path, ranks: Pools) -> None:
    pool = ranks(2)
    pool.run(_fit, table, tmp_path, {}, 7, timeout=180)
    for name, options in (("batch_size", {"batch_size": 12}), ("seed", {"seed": 6}), ("shuffle", {"shuffle": False})):
        errors = pool.outcomes(_fit, table, tmp_path, {}, 0, **options, timeout=180)
        assert all(isinstance(error, PartitionError) and name in str(error) for error in errors)
        assert str(errors[0]) == str(errors[1])
