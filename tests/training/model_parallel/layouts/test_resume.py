"""Runs that resume on another mesh, and whole models that ranks save together."""

from __future__ import annotations

import contextlib
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.support.ranks import Pools, RanksFailed
from tests.training.model_parallel.layouts import models

STEPS = 4
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.3),
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
}


def _train(comm, folder, epochs, shape, optimizer="adam", saved=None, shard_optimizer=False, dtype="float64", **kept):
    """Train, resuming from the checkpoint of a folder; return the whole weights and the losses.

    In double precision what one rank computes differs from what several compute by less than 1e-12, and what is saved
    or restored wrongly does not hide in rounding.
    """
    with models.precision(dtype):
        return _trained(comm, folder, epochs, shape, optimizer, saved, shard_optimizer, **kept)


def _trained(comm, folder, epochs, shape, optimizer, saved, shard_optimizer, kept=(), alone=False):
    import tensorflow as tf

    from matex_data import training
    from matex_data.training.partition.parts import whole_on_all

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    stages, parts = shape
    mesh = training.Mesh(stages=stages, model=parts, comm=comm)
    layouts = mesh.layout_map()
    if parts > 1:
        for key, axes in models.LAYOUTS["mlp"].items():
            layouts[key] = axes
    with training.deferred(layouts) if stages == 1 else contextlib.nullcontext():
        model = models.mlp()
    for layer in model.layers:
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0  # replicas draw numbers of their own
    model.compile(OPTIMIZERS[optimizer](), "sparse_categorical_crossentropy", jit_compile=False)
    rng = np.random.default_rng(4)
    x, y = rng.normal(size=(STEPS, 8, 6)).astype(keras.config.floatx()), rng.integers(0, 3, (STEPS, 8))
    rows = slice(mesh.data.rank * 8 // mesh.data.size, (mesh.data.rank + 1) * 8 // mesh.data.size)
    data = tf.data.Dataset.from_tensor_slices((x[:, rows], y[:, rows]))
    saver = [] if saved is None else [keras.callbacks.ModelCheckpoint(str(saved))]
    own = [] if alone and comm.rank else kept
    callbacks = saver + [keras.callbacks.EarlyStopping(restore_best_weights=True, **options) for options in own]
    options = {"checkpoint": folder, "verbose": 0, "callbacks": callbacks, "shard_optimizer": shard_optimizer}
    history = training.fit(model, data, epochs=epochs, mesh=mesh, **options)
    if saved is not None:
        training.save(model, Path(saved).with_suffix(".weights.h5"), comm=comm)
        with pytest.raises(Exception, match=r"training\.save"):
            model.save(Path(saved).with_name(f"own{comm.rank}.keras"))
    return {v.path: whole_on_all(v) for v in model.weights}, history.history.get("loss", [])


ONE, PARTS, STAGES = (1, 1), (1, 2), (2, 1)


@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "runs",
    [
        [(2, PARTS), (1, ONE)],
        *(
            pytest.param(runs, marks=pytest.mark.slow)
            for runs in (
                [(4, PARTS), (1, ONE)],
                [(1, ONE), (4, PARTS)],
                [(4, ONE), (1, ONE)],
                [(1, ONE), (4, ONE)],
                [(2, STAGES), (2, PARTS), (2, ONE)],
                [(4, STAGES), (4, PARTS), (4, ONE), (1, ONE)],
            )
        ),
    ],
    ids=lambda runs: " ".join(f"{count}x{shape}" for count, shape in runs) if isinstance(runs, list) else str(runs),
)
def test_runs_resume_on_any_mesh(tmp_path: Path, ranks: Pools, optimizer: str, runs: list) -> None:
    ((expected, losses),) = ranks(1).run(_train, None, 1 + len(runs), ONE, optimizer)
    for epochs, (count, shape) in enumerate(runs, 1):
        last = epochs == len(runs)
        outcomes = ranks(count).run(_train, tmp_path / "run", epochs + last, shape, optimizer)
        for weights, own in outcomes:
            assert own == pytest.approx(losses[: epochs + last], rel=1e-10)
            if last:
                for path, value in expected.items():
                    np.testing.assert_allclose(weights[path], value, rtol=0, atol=1e-12, err_msg=path)


@pytest.mark.slow
def test_state_that_is_cut_over_replicas_resumes(tmp_path: Path, ranks: Pools) -> None:
    ((expected, _),) = ranks(1).run(_train, None, 3, ONE)
    ranks(2).run(_train, tmp_path / "cut", 2, ONE, "adam", None, True)
    for weights, _ in ranks(2).run(_train, tmp_path / "cut", 3, ONE, "adam", None, True):
        for path, value in expected.items():
            np.testing.assert_allclose(weights[path], value, rtol=0, atol=1e-12, err_msg=path)


@pytest.mark.parametrize("resumed", [(2, PARTS), (1, ONE), pytest.param((2, STAGES), marks=pytest.mark.slow)], ids=str)
def test_the_best_weights_of_parts_are_kept_whole(tmp_path: Path, ranks: Pools, resumed: tuple) -> None:
    kept = [{"monitor": "loss", "mode": "max", "patience": 2}]
    ((expected, losses),) = ranks(1).run(_train, None, 5, ONE, kept=kept)
    ranks(2).run(_train, tmp_path / "run", 2, PARTS, kept=kept)
    for weights, own in ranks(resumed[0]).run(_train, tmp_path / "run", 5, resumed[1], kept=kept):
        assert own == pytest.approx(losses, rel=1e-10) and len(own) == 3
        for path, value in expected.items():
            np.testing.assert_allclose(weights[path], value, rtol=0, atol=1e-12, err_msg=path)


def test_best_weights_of_one_rank_are_an_error(tmp_path: Path, ranks: Pools) -> None:
    with pytest.raises(RanksFailed, match="PartitionError: the ranks have other callbacks that keep weights"):
        ranks(2).run(_train, tmp_path / "run", 2, PARTS, kept=[{"monitor": "loss"}], alone=True)


def test_ranks_save_a_whole_model_together(tmp_path: Path, ranks: Pools) -> None:
    weights, _ = ranks(2).run(_train, None, 1, PARTS, "adam", tmp_path / "model.keras", dtype="float32")[0]
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    again = models.mlp()
    again.load_weights(tmp_path / "model.weights.h5")
    for model in (loaded, again):
        for (path, value), variable in zip(weights.items(), model.weights, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value, err_msg=path)
    slots = {v.path: tuple(v.shape) for v in loaded.optimizer.variables}
    assert slots["adam/up_0_kernel_momentum"] == (6, 8)
