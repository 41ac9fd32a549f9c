"""Training in stages has the weights and the logs of one process that accumulates the same micro-batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from matex_data.training.exact.variables import seeds
from matex_data.training.model_parallel.mesh import Mesh
from matex_data.training.trainer import fit
from tests.support.ranks import Pool, Pools
from tests.training.model_parallel.stages.problems import (
    BATCH,
    ROWS,
    accumulated,
    build,
    dataset,
    deferred_in_stages,
    in_stages,
    looked_at,
    predicted,
    resumed,
    samples,
    trained_model,
    weights_of,
)

LINEAR = ("sgd", "clipped", "ema")
"""Optimizers that do not divide by gradients, which enlarges their rounding."""


def _check(pool: Pool, name: str, optimizer: str, stages: int, micro_batches: int, **options: Any) -> None:
    weights, losses = accumulated(name, optimizer, micro_batches, pool.size // stages, 2)
    results = pool.run(in_stages, name, optimizer, stages, micro_batches, timeout=120, **options)
    tolerance = 1e-6 if optimizer in LINEAR else 1e-5
    for found, logs in results:
        for one, other in zip(found, weights, strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(logs["loss"], losses, rtol=1e-5)
        assert logs == results[0][1]


@pytest.mark.parametrize(
    ("name", "optimizer", "micro_batches", "recompute"),
    [
        ("skips", "sgd", 5, False),
        ("normalized", "sgd", 3, True),  # more would normalize so few rows that rounding grows
        ("shared", "clipped", 3, False),
        pytest.param("chain", "sgd", 1, False, marks=pytest.mark.slow),
        pytest.param("several", "adam", 3, False, marks=pytest.mark.slow),
        pytest.param("several", "sgd", 5, True, marks=pytest.mark.slow),
        pytest.param("shared", "adam", 5, True, marks=pytest.mark.slow),
        pytest.param("nested", "adam", 3, False, marks=pytest.mark.slow),
        pytest.param("text", "adam", 3, True, marks=pytest.mark.slow),
        pytest.param("text", "sgd", 1, False, marks=pytest.mark.slow),
        pytest.param("normalized", "sgd", 2, False, marks=pytest.mark.slow),
        pytest.param("skips", "scaled", 3, False, marks=pytest.mark.slow),
        pytest.param("skips", "ema", 3, True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.rank_counts(2)
def test_two_stages(pool: Pool, name: str, optimizer: str, micro_batches: int, recompute: bool) -> None:
    _check(pool, name, optimizer, 2, micro_batches, recompute=recompute)


@pytest.mark.openmpi
@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize(
    ("name", "optimizer", "micro_batches", "recompute"),
    [
        ("skips", "sgd", 1, False),
        ("skips", "adam", 5, True),
        ("skips", "scaled", 3, False),
        ("shared", "clipped", 3, True),
        ("several", "adam", 3, False),
        ("text", "sgd", 3, False),
        ("chain", "ema", 3, False),
    ],
)
@pytest.mark.rank_counts(4)
def test_four_ranks(pool: Pool, name: str, optimizer: str, stages: int, micro_batches: int, recompute: bool) -> None:
    options = {"split_after": ["first", "second", "third"]} if (name, stages) == ("skips", 4) else {}
    _check(pool, name, optimizer, stages, micro_batches, recompute=recompute, **options)


@pytest.mark.parametrize(
    ("name", "optimizer", "last"),
    [
        ("frozen", "clipped", "dense1"),  # one stage alone has weights to train
        pytest.param("nested", "sgd", "block", marks=pytest.mark.slow),
    ],
)
def test_named_layers_end_the_stages(ranks: Pools, name: str, optimizer: str, last: str) -> None:
    _check(ranks(2), name, optimizer, 2, 3, split_after=[last])


def _seeds_after(comm: Any) -> list[Any]:
    """Return the seeds of both stages after an epoch, which are others on each rank before."""
    mesh, model = Mesh(stages=2, comm=comm), build("normalized")
    for seed in seeds(model):
        seed.assign([7 + comm.rank, 0])
    fit(model, dataset("normalized"), verbose=0, mesh=mesh, micro_batches=1)
    return [seed.numpy().tolist() for seed in seeds(model)]


def test_a_script_draws_after_training_what_one_process_draws(ranks: Pools) -> None:
    assert ranks(2).run(_seeds_after, timeout=120) == [[[7, ROWS // BATCH]] * 2] * 2


def test_validation_is_that_of_one_process(ranks: Pools) -> None:
    (weights, logs), *_ = ranks(2).run(in_stages, "skips", "sgd", 2, 3, epochs=1, validate=True, timeout=120)
    model = build("skips")
    model.set_weights(weights)
    x, y, sample_weight = samples("skips")
    expected = model.evaluate(x, y, sample_weight=sample_weight, batch_size=BATCH, verbose=0, return_dict=True)
    assert ROWS % BATCH == 0
    assert [*expected] == ["loss", "mae"]
    np.testing.assert_allclose([logs[f"val_{key}"][0] for key in ("loss", "mae")], [*expected.values()], rtol=1e-5)


class _BatchLogs(keras.callbacks.Callback):
    """Callback that records the logs of batches, and changes the learning rate by them."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))
        self.model.optimizer.learning_rate.assign(0.05 / (1 + logs["loss"]))

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))


def _logs_of_batches(comm: Any, stages: int, folder: str) -> Any:
    """Return the logs of an epoch, and of another one after a restart, and the weights."""
    mesh, callback = Mesh(stages=stages, comm=comm), _BatchLogs()
    data = dataset("chain", mesh.coordinates.replica, mesh.shape[0])
    options = {"mesh": mesh, "micro_batches": 1} if stages > 1 else {}
    for epochs in (1, 2):
        model = build("chain")
        options |= {"epochs": epochs, "checkpoint": folder}
        fit(model, data, validation_data=data, verbose=0, callbacks=[callback], **options)
    return callback.logs, weights_of(model)


def test_logs_of_batches_are_those_of_all_replicas(ranks: Pools, tmp_path: Path) -> None:
    ((expected, weights),) = ranks(1).run(_logs_of_batches, 1, f"{tmp_path}/one")
    for logs, found in ranks(4).run(_logs_of_batches, 2, f"{tmp_path}/stages", timeout=120):
        for one, other in zip(logs, expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5)
        for value, reference in zip(found, weights, strict=True):
            np.testing.assert_allclose(value, reference, rtol=1e-5, atol=1e-6)


SHORT = 60
"""Samples of which the last batch has fewer."""


def _compiled(losses: str) -> Any:
    """Return a model with losses that are one number for a batch, a sum and a mean; or that are not reduced."""
    model = build("several")
    of_batch = {
        "early": lambda y, p: keras.ops.sum(keras.ops.square(y - p)),
        "late": lambda y, p: keras.ops.mean(keras.ops.abs(y - p)),
    }
    of_rows = keras.losses.MeanSquaredError(reduction="none")
    model.compile(keras.optimizers.SGD(0.01), of_batch if losses == "batch" else dict.fromkeys(of_batch, of_rows))
    return model


def _fit_losses(comm: Any, losses: str) -> tuple[Any, Any]:
    mesh, model = Mesh(stages=2, comm=comm), _compiled(losses)
    data = dataset("several", mesh.coordinates.replica, mesh.shape[0], SHORT)
    history = fit(model, data, verbose=0, mesh=mesh, micro_batches=3)
    return weights_of(model), history.history


@pytest.mark.rank_counts(2, slow=(4,))
@pytest.mark.parametrize("losses", ["batch", "rows"])
def test_losses_that_are_no_means_over_the_samples(pool: Pool, losses: str) -> None:
    model = _compiled(losses)
    expected = model.fit(dataset("several", rows=SHORT), shuffle=False, verbose=0).history
    for weights, logs in pool.run(_fit_losses, losses, timeout=60):
        for one, other in zip(weights, weights_of(model), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert logs["loss"] == pytest.approx(expected["loss"], rel=1e-5)


@pytest.mark.rank_counts(2, slow=(4,))
def test_predictions_and_evaluations_of_stages_are_those_of_one_process(pool: Pool, tmp_path: Path) -> None:
    file = str(tmp_path / "model.weights.h5")
    results = pool.run(predicted, file, timeout=120)
    model = build("several")
    model.load_weights(file)
    x, y = samples("several")
    expected = model.predict(x, batch_size=20, verbose=0)
    evaluated = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    for found in results:
        assert found[0][1] == pytest.approx(evaluated, rel=1e-5)
        for predictions, _ in found:
            keras.tree.map_structure(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), predictions, expected)


@pytest.mark.parametrize("before", ["predict", "evaluate"])
@pytest.mark.rank_counts(2, slow=(4,))
def test_a_deferred_model_may_be_looked_at_before_and_after(pool: Pool, tmp_path: Path, before: str) -> None:
    results = pool.run(looked_at, before, str(tmp_path), timeout=120)
    model = keras.saving.load_model(tmp_path / "model.keras")
    untrained = build("chain")
    x, y = samples("chain", weights=False)
    assert not np.allclose(model.get_weights()[0], untrained.get_weights()[0], atol=1e-3)
    assert not np.allclose(model.get_weights()[-2], untrained.get_weights()[-2], atol=1e-3)
    predictions = model.predict(x, verbose=0)
    again = build("chain")
    again.load_weights(tmp_path / "again.weights.h5")
    for value, other in zip(again.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, other)
    loss, *_ = model.evaluate(x, y, verbose=0)
    assert sum(found["own"] for found in results) == 2 * ROWS  # both stages return the rows of their replica
    for found in results:
        for name in ("all", "batches", "batch", "again"):
            np.testing.assert_allclose(found[name], predictions, atol=1e-6, err_msg=name)
        np.testing.assert_allclose(np.loadtxt(tmp_path / "scores.csv", skiprows=1), predictions[:, 0], atol=1e-6)
        for name in ("evaluated", "evaluated again", "test_on_batch"):
            assert found[name] == pytest.approx(loss, rel=1e-5), name


@pytest.mark.parametrize(
    ("before", "after", "optimizer", "save_every", "stop"),
    [
        (2, 1, "adam", 1, 4),
        pytest.param(1, 2, "sgd", 1, 4, marks=pytest.mark.slow),
        pytest.param(4, 1, "adam", None, 3, marks=pytest.mark.slow),
        pytest.param(1, 4, "adam", 1, 2, marks=pytest.mark.slow),
        pytest.param(4, 2, "scaled", 1, 4, marks=pytest.mark.slow),
    ],
)
def test_any_mesh_resumes_a_run(
    ranks: Pools, tmp_path: Path, before: int, after: int, optimizer: str, save_every: int | None, stop: int
) -> None:
    expected, _ = accumulated("chain", optimizer, 1, 1, 3)
    folder = str(tmp_path)
    ranks(before).run(resumed, folder, "chain", optimizer, before, 3, save_every, stop, timeout=120)
    weights, *_ = ranks(after).run(resumed, folder, "chain", optimizer, after, 3, save_every, timeout=120)
    for one, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("scaled", marks=pytest.mark.slow)])
@pytest.mark.rank_counts(2, slow=(4,))
def test_each_rank_has_the_weights_of_its_stage_of_a_deferred_model(pool: Pool, tmp_path: Path, optimizer: str) -> None:
    tolerance = 1e-6 if optimizer in LINEAR else 1e-5
    expected, _ = trained_model("chain", optimizer, 3, 1, 2)
    paths = [v.path for v in expected.weights]
    file = str(tmp_path / "model.keras")
    held = pool.run(deferred_in_stages, "chain", optimizer, pool.size, file, checkpoint=str(tmp_path), timeout=120)
    assert sorted(path for weights in held for path in weights) == sorted(paths)
    assert all(held)
    for variable in expected.weights:
        (one,) = (weights[variable.path] for weights in held if variable.path in weights)
        np.testing.assert_allclose(one, variable.numpy(), rtol=tolerance, atol=tolerance)
    weights, *_ = pool.run(resumed, str(tmp_path), "chain", optimizer, 1, 2, None, timeout=120)
    saved = keras.saving.load_model(file)
    for found in (weights, saved.get_weights()):
        for one, other in zip(found, weights_of(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)
    for slot, other in zip(saved.optimizer.variables, expected.optimizer.variables, strict=True):
        np.testing.assert_allclose(slot, other, rtol=tolerance, atol=tolerance, err_msg=other.path)
