"""Runs that resume on another mesh, and whole models that ranks save together."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from tests.support.ranks import Pools
from tests.training.layouts import models

STEPS = 4


def _train(comm, folder, epochs, shards, saved=None, shard_optimizer=False):
    """Train, resuming from the checkpoint of a folder; return the whole weights and the losses."""
    import tensorflow as tf

    from matex_data import training
    from matex_data.training.partition.parts import whole_on_all

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    mesh = training.Mesh(model=shards, comm=comm)
    layouts = mesh.layout_map()
    if shards > 1:
        for key, axes in models.LAYOUTS["mlp"].items():
            layouts[key] = axes
    with training.deferred(layouts):
        model = models.mlp()
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0  # replicas draw numbers of their own
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.3), "sparse_categorical_crossentropy", jit_compile=False)
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(STEPS, 8, 6)).astype("float32"), rng.integers(0, 3, (STEPS, 8))
    rows = slice(mesh.data.rank * 8 // mesh.data.size, (mesh.data.rank + 1) * 8 // mesh.data.size)
    data = tf.data.Dataset.from_tensor_slices((x[:, rows], y[:, rows]))
    saver = [] if saved is None else [keras.callbacks.ModelCheckpoint(str(saved))]
    options = {"checkpoint": folder, "verbose": 0, "callbacks": saver, "shard_optimizer": shard_optimizer}
    history = training.fit(model, data, epochs=epochs, mesh=mesh, **options)
    if saved is not None:
        training.save(model, Path(saved).with_suffix(".weights.h5"), comm=comm)
        with pytest.raises(Exception, match=r"training\.save"):
            model.save(Path(saved).with_name(f"own{comm.rank}.keras"))
    return {v.path: whole_on_all(v) for v in model.weights}, history.history["loss"]


@pytest.mark.parametrize(
    ("before", "shards_before", "after", "shards_after"),
    [
        (2, 2, 1, 1),
        pytest.param(4, 2, 1, 1, marks=pytest.mark.slow),
        pytest.param(1, 1, 4, 2, marks=pytest.mark.slow),
        pytest.param(2, 2, 2, 1, marks=pytest.mark.slow),
    ],
)
def test_runs_resume_on_any_mesh(
    tmp_path: Path, ranks: Pools, before: int, shards_before: int, after: int, shards_after: int
) -> None:
    ((expected, losses),) = ranks(1).run(_train, tmp_path / "whole", 3, 1)
    ranks(before).run(_train, tmp_path / "cut", 2, shards_before)
    for weights, own in ranks(after).run(_train, tmp_path / "cut", 3, shards_after):
        assert own == pytest.approx(losses[2:], rel=1e-5)
        for path, value in expected.items():
            np.testing.assert_allclose(weights[path], value, rtol=0, atol=1e-5, err_msg=path)


@pytest.mark.slow
def test_state_that_is_cut_over_replicas_resumes(tmp_path: Path, ranks: Pools) -> None:
    ((expected, _),) = ranks(1).run(_train, tmp_path / "whole", 3, 1)
    ranks(2).run(_train, tmp_path / "cut", 2, 1, None, True)
    for weights, _ in ranks(2).run(_train, tmp_path / "cut", 3, 1, None, True):
        for path, value in expected.items():
            np.testing.assert_allclose(weights[path], value, rtol=0, atol=1e-5, err_msg=path)


def test_ranks_save_a_whole_model_together(tmp_path: Path, ranks: Pools) -> None:
    weights, _ = ranks(2).run(_train, tmp_path / "run", 1, 2, tmp_path / "model.keras")[0]
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    again = models.mlp()
    again.load_weights(tmp_path / "model.weights.h5")
    for model in (loaded, again):
        for (path, value), variable in zip(weights.items(), model.weights, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value, err_msg=path)
    slots = {v.path: tuple(v.shape) for v in loaded.optimizer.variables}
    assert slots["adam/up_0_kernel_momentum"] == (6, 8)
