"""Data-parallel training with an optimizer whose state is cut over the ranks."""

from __future__ import annotations

import functools
import io
import os
import zipfile
from pathlib import Path
from types import SimpleNamespace

import h5py
import keras
import numpy as np
import pytest

from tests.support.ranks import Pool, Pools, RanksFailed

OPTIMIZERS = {
    "adamw": lambda: keras.optimizers.AdamW(0.01, global_clipnorm=0.5),
    "sgd": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 3, 0.5), momentum=0.9),
    "ema": lambda: keras.optimizers.RMSprop(0.01, use_ema=True, ema_momentum=0.5),
    "clipped": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.1)),
}


def _train(comm, name, shard, fits=1, embedding=False, callbacks=(), **options):
    """Train on this rank's rows; return weights, state of the optimizer and the largest state within training."""
    import tensorflow as tf

    from matex_data import training

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    first = [keras.layers.Embedding(3, 4), keras.layers.Flatten()] if embedding else []
    layers = [keras.Input((5,)), *first, keras.layers.Dense(7, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(OPTIMIZERS[name](), "mse", jit_compile=False)
    rng = np.random.default_rng(2)
    x, y = rng.normal(size=(4, 12, 5)).astype("float32"), rng.normal(size=(4, 12, 1)).astype("float32")
    x = (np.abs(x) * 2).clip(0, 2).astype("int32") if embedding else x
    own = slice(comm.rank * 12 // comm.size, (comm.rank + 1) * 12 // comm.size)
    data = tf.data.Dataset.from_tensor_slices((x[:, own], y[:, own]))
    held = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: held.append(sum(int(np.prod(v.shape)) for v in model.optimizer.variables))
    )
    for _ in range(fits):
        options |= {"shard_optimizer": shard, "verbose": 0, "callbacks": [count, *(make() for make in callbacks)]}
        training.fit(model, data, epochs=2, comm=comm, **options)
    state = {v.path: v.numpy() for v in model.optimizer.variables}
    return {v.path: v.numpy() for v in model.weights}, state, max(held)


@pytest.mark.openmpi
def test_sections_know_their_size_where_gradients_do_not_know_theirs() -> None:
    """Those of a MultiHeadAttention do not, unless the number of rows of a batch is known."""
    import tensorflow as tf

    from matex_data.training.zero.sections import FlatSection

    part = FlatSection(SimpleNamespace(rank=0, size=2), (3, 3))  # type: ignore[arg-type]
    spec = tf.TensorSpec([None, None])
    assert tf.function(part.rows).get_concrete_function(spec).output_shapes == tf.TensorShape([2, 5])


@pytest.mark.parametrize(
    "name", ["adamw", *(pytest.param(n, marks=pytest.mark.slow) for n in ("sgd", "ema", "scaled"))]
)
def test_weights_are_those_of_an_allreduce(ranks: Pools, name: str) -> None:
    plain, cut = ranks(2).run(_train, name, False, 2), ranks(2).run(_train, name, True, 2)
    exact = (
        name == "sgd"
    )  # elsewhere norms are summed in another order, or roots at the end of an array round differently
    for (weights, state, held), (own, own_state, own_held) in zip(plain, cut, strict=True):
        for expected, found in ((weights, own), (state, own_state)):
            assert expected.keys() == found.keys()
            for path, value in expected.items():
                np.testing.assert_allclose(found[path], value, rtol=0, atol=0 if exact else 1e-6, err_msg=path)
        assert own_held <= 0.55 * held + 8  # the step counters are whole


@pytest.mark.parametrize("name", ["model.keras", pytest.param("model.weights.h5", marks=pytest.mark.slow)])
def test_callbacks_save_the_whole_state(tmp_path: Path, ranks: Pools, name: str) -> None:
    path = tmp_path / name
    saver = functools.partial(keras.callbacks.ModelCheckpoint, str(path), save_weights_only=name != "model.keras")
    _, state, _ = ranks(2).run(_train, "adamw", True, callbacks=[saver])[0]
    saved = path.read_bytes() if name != "model.keras" else zipfile.ZipFile(path).read("model.weights.h5")
    with h5py.File(io.BytesIO(saved)) as file:
        for i, value in enumerate(state.values()):
            np.testing.assert_array_equal(file[f"optimizer/vars/{i}"], value)


def _own_checkpoint(folder):
    return keras.callbacks.ModelCheckpoint(f"{folder}/{os.getpid()}.keras")


def test_callbacks_that_save_other_files_are_an_error(tmp_path: Path, ranks: Pools) -> None:
    """Rank 0 alone would write, and where it alone has the callback, it would wait for the others."""
    with pytest.raises(RanksFailed, match="PartitionError: each rank has a part of what ModelCheckpoint saves"):
        ranks(2).run(_train, "adamw", True, callbacks=[functools.partial(_own_checkpoint, str(tmp_path))])


def _saves_again(comm, path):
    """Train with sections, then without, with one callback."""
    import tensorflow as tf

    from matex_data import training

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensor_slices((np.ones((1, 2, 3)) + comm.rank, np.ones((1, 2, 1))))
    saver = keras.callbacks.ModelCheckpoint(path)
    for cut in (True, False):
        training.fit(model, data, comm=comm, shard_optimizer=cut, callbacks=[saver], verbose=0)
    return keras.saving.load_model(path).get_weights(), model.get_weights()


def test_a_callback_of_two_fits_saves_as_each_needs(tmp_path: Path, ranks: Pools) -> None:
    saved, own = ranks(2).run(_saves_again, str(tmp_path / "model.keras"))[0]
    for array, other in zip(saved, own, strict=True):
        np.testing.assert_array_equal(array, other)


def test_a_backup_of_one_section_is_an_error(tmp_path: Path, ranks: Pools) -> None:
    backup = functools.partial(keras.callbacks.BackupAndRestore, str(tmp_path))
    with pytest.raises(RanksFailed, match="PartitionError: BackupAndRestore"):
        ranks(2).run(_train, "adamw", True, callbacks=[backup])


class TwoParts(keras.Model):
    """Model without ``call``, as in Keras's example of a GAN: its step trains two parts with an optimizer for each."""

    def compile(self, **options):
        super().compile(**options)
        self.parts = [keras.Sequential([keras.layers.Dense(n)]) for n in (3, 1)]
        self.own = [keras.optimizers.Adam(0.01) for _ in self.parts]

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        for part, optimizer in zip(self.parts, self.own, strict=True):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(part(x) - y))
            optimizer.apply_gradients(
                zip(tape.gradient(loss, part.trainable_weights), part.trainable_weights, strict=True)
            )
        return {"loss": loss}


def _train_two_parts(comm, shard):
    import tensorflow as tf

    from matex_data import training

    keras.utils.set_random_seed(3)
    model = TwoParts()
    model.compile(jit_compile=False)
    x, y = np.random.default_rng(2).normal(size=(2, 4, 12, 1)).astype("float32")
    own = slice(comm.rank * 12 // comm.size, (comm.rank + 1) * 12 // comm.size)
    data = tf.data.Dataset.from_tensor_slices((x[:, own], y[:, own]))
    training.fit(model, data, epochs=2, comm=comm, shard_optimizer=shard, verbose=0)
    return model.get_weights()


def test_models_without_call(ranks: Pools) -> None:
    plain, cut = (ranks(2).run(_train_two_parts, shard)[0] for shard in (False, True))
    assert len(plain) == len(cut) == 4
    for expected, found in zip(plain, cut, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_more_ranks(ranks: Pools, count: int) -> None:
    plain, cut = ranks(count).run(_train, "sgd", False), ranks(count).run(_train, "sgd", True)
    for path, value in plain[0][0].items():
        np.testing.assert_allclose(cut[0][0][path], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("wire_dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.rank_counts(3, slow=(2, 4))
def test_gradients_are_rounded_as_in_an_allreduce(pool: Pool, wire_dtype: str) -> None:
    (exact, *_), *_ = pool.run(_train, "sgd", True)
    plain = pool.run(_train, "sgd", False, wire_dtype=wire_dtype)
    for (expected, *_), (found, *_) in zip(plain, pool.run(_train, "sgd", True, wire_dtype=wire_dtype), strict=True):
        for path, value in expected.items():
            np.testing.assert_array_equal(found[path], value, err_msg=path)
        assert any((found[path] != value).any() for path, value in exact.items())


@pytest.mark.parametrize("name", ["ema", "clipped"])
@pytest.mark.rank_counts(3, slow=(2,))
def test_rows_of_an_embedding_count_as_often_as_they_occur(pool: Pool, name: str) -> None:
    """Compare with RMSprop and norms, which square each of them: another sum than the square of their sum."""
    plain, cut = pool.run(_train, name, False, 1, True), pool.run(_train, name, True, 1, True)
    for (weights, state, _), (own, own_state, _) in zip(plain, cut, strict=True):
        for path, value in {**weights, **state}.items():
            np.testing.assert_allclose({**own, **own_state}[path], value, rtol=0, atol=1e-6, err_msg=path)
