"""Replicas, stages, parts of layers and sections of optimizers: weights, logs and checkpoints of one process."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.support.ranks import Pools
from tests.training.model_parallel.layouts import models
from tests.training.model_parallel.stages.problems import OPTIMIZERS

BATCH = 8


def _train(
    comm: Any,
    shape: tuple[int, int],
    optimizer: str = "adam",
    epochs: int = 2,
    name: str = "mlp",
    folder: str | None = None,
    deferred: bool = True,
    precision: str = "float64",
    **options: Any,
) -> dict[str, Any]:
    """Train; return weights by path on the ranks that have them, losses, and the number of elements of slots."""
    with models.precision(precision):
        return _trained(comm, shape, optimizer, epochs, name, folder, deferred, **options)


def _trained(
    comm: Any,
    shape: tuple[int, int],
    optimizer: str,
    epochs: int,
    name: str,
    folder: str | None,
    deferred: bool,
    **options: Any,
) -> dict[str, Any]:
    import tensorflow as tf

    from matex_data import training
    from matex_data.training.model_parallel.deferred import is_absent
    from matex_data.training.partition.parts import whole_on_all

    keras.backend.clear_session()
    keras.utils.set_random_seed(5)
    stages, parts = shape
    mesh = training.Mesh(stages=stages, model=parts, comm=comm)
    layouts = mesh.layout_map(auto=name not in models.LAYOUTS)
    if parts > 1:
        for key, axes in models.LAYOUTS.get(name, {}).items():
            layouts[key] = axes
    with training.deferred(layouts) if deferred and mesh.world.size > 1 else contextlib.nullcontext():
        model = getattr(models, name)()
    for layer in model._flatten_layers():
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0  # replicas draw numbers of their own
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy"], jit_compile=False)
    x, y = models.arrays(name)
    x = x.astype(keras.config.floatx()) if x.dtype.kind == "f" else x
    rows = slice(mesh.data.rank * BATCH // mesh.data.size, (mesh.data.rank + 1) * BATCH // mesh.data.size)
    data = tf.data.Dataset.from_tensor_slices(
        tuple(array.reshape(-1, BATCH, *array.shape[1:])[:, rows] for array in (x, y))
    )
    held: list[int] = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: held.append(sum(int(np.prod(v.shape)) for v in model.optimizer.variables))
    )
    if stages > 1:
        options.setdefault("micro_batches", 2)
    given = {"mesh": mesh, "verbose": 0, "checkpoint": folder, "callbacks": [count]}
    losses: list[float] = []
    for first in range(epochs - 1 if folder is None else 0):  # each fit takes up the parts that the one before has left
        history = training.fit(model, data, initial_epoch=first, epochs=first + 1, **given, **options)
        losses += history.history["loss"]
    last = {} if folder else {"initial_epoch": epochs - 1}
    history = training.fit(model, data, epochs=epochs, **last, **given, **options)
    weights = {v.path: whole_on_all(v) for v in model.weights if not is_absent(v)}
    file = None if folder is None else Path(folder) / "model.weights.h5"
    if file is not None:
        training.save(model, file, comm=comm)
    return {"weights": weights, "losses": [*losses, *history.history["loss"]], "held": max(held, default=0)}


def _check(results: list[dict[str, Any]], expected: dict[str, Any], atol: float = 1e-11, rtol: float = 1e-9) -> None:
    found: set[str] = set()
    for result in results:
        for path, value in result["weights"].items():
            np.testing.assert_allclose(value, expected["weights"][path], rtol=0, atol=atol, err_msg=path)
        found |= result["weights"].keys()
        np.testing.assert_allclose(result["losses"], expected["losses"][-len(result["losses"]) :], rtol=rtol)
    assert found == expected["weights"].keys()


STAGES_AND_PARTS, PARTS, STAGES, ONE = (2, 2), (1, 2), (2, 1), (1, 1)


OWNED = {"shard_optimizer": True}
UNCUT_STAGE = {"epochs": 1, "deferred": False, "split_after": ["down_conv"]}


@pytest.mark.parametrize(
    ("count", "shape", "optimizer", "name", "options"),
    [
        pytest.param(4, STAGES_AND_PARTS, "adam", "mlp", {"epochs": 1}, marks=pytest.mark.openmpi),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (4, STAGES_AND_PARTS, "adam", "mlp", {}),
                (4, PARTS, "scaled", "mlp", OWNED),
                (4, STAGES, "scaled", "mlp", OWNED),
                (4, PARTS, "sgd", "vocabulary", OWNED),
                (4, STAGES, "ema", "mlp", {**OWNED, "deferred": False}),
                (4, PARTS, "ema", "mlp", {**OWNED, "deferred": False}),
                (4, STAGES_AND_PARTS, "scaled", "mlp", {"deferred": False}),
                (4, STAGES_AND_PARTS, "clipped", "convolutions", {"epochs": 1}),
                (4, STAGES_AND_PARTS, "sgd", "convolutions", UNCUT_STAGE),
                (4, STAGES_AND_PARTS, "sgd", "transformer", {}),
                (8, STAGES_AND_PARTS, "scaled", "mlp", OWNED),
            )
        ),
    ],
)
def test_weights_are_those_of_one_process(
    ranks: Pools, count: int, shape: tuple[int, int], optimizer: str, name: str, options: dict[str, Any]
) -> None:
    epochs = options.get("epochs", 2)
    if name == "convolutions":  # normalizes each micro-batch
        (expected,) = ranks(2).run(_train, STAGES, optimizer, epochs, name, deferred=False, timeout=200)[:1]
    else:
        (expected,) = ranks(1).run(_train, ONE, optimizer, epochs, name, timeout=200)
    results = ranks(count).run(_train, shape, optimizer, name=name, timeout=200, **options)
    _check(results, expected)
    if options.get("shard_optimizer"):
        plain = ranks(count).run(_train, shape, optimizer, name=name, timeout=200, **{**options, **NOT_OWNED})
        for one, other in zip(results, plain, strict=True):
            assert one["held"] < 0.62 * other["held"]


NOT_OWNED = {"shard_optimizer": False}


@pytest.mark.slow
@pytest.mark.openmpi
@pytest.mark.parametrize(("optimizer", "atol"), [("sgd", 1e-6), ("adam", 1e-5)])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 3, "recompute": True}], ids=["even", "uneven"])
def test_single_precision(ranks: Pools, optimizer: str, atol: float, options: dict[str, Any]) -> None:
    (expected,) = ranks(1).run(_train, ONE, optimizer, precision="float32", timeout=200)
    results = ranks(4).run(_train, STAGES_AND_PARTS, optimizer, precision="float32", timeout=200, **options)
    _check(results, expected, atol, rtol=1e-5)


@pytest.mark.slow  # test_stages.py and layouts/test_resume.py resume on other meshes
@pytest.mark.parametrize("optimizer", ["adam", pytest.param("sgd", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "runs",
    [
        [(4, STAGES_AND_PARTS, {}), (1, ONE, {})],
        *(
            pytest.param(runs, marks=pytest.mark.slow)
            for runs in (
                [(1, ONE, {}), (4, STAGES_AND_PARTS, {})],
                [(4, PARTS, OWNED), (4, STAGES, OWNED), (2, ONE, OWNED)],
                [(8, STAGES_AND_PARTS, OWNED), (2, PARTS, {}), (8, STAGES_AND_PARTS, OWNED)],
            )
        ),
    ],
    ids=lambda runs: " ".join(f"{count}x{shape}" for count, shape, _ in runs) if isinstance(runs, list) else runs,
)
def test_any_mesh_resumes(ranks: Pools, tmp_path: Path, optimizer: str, runs: list[Any]) -> None:
    (expected,) = ranks(1).run(_train, ONE, optimizer, len(runs), timeout=120)
    for epochs, (count, shape, options) in enumerate(runs, 1):
        results = ranks(count).run(_train, shape, optimizer, epochs, folder=str(tmp_path), timeout=200, **options)
        for result in results:
            np.testing.assert_allclose(result["losses"], expected["losses"][:epochs], rtol=1e-9)
    _check(results, expected)
    with models.precision("float64"):
        keras.backend.clear_session()  # also forgets the policy of an earlier precision
        model = models.mlp()
    model.load_weights(tmp_path / "model.weights.h5")
    for variable, value in zip(model.weights, expected["weights"].values(), strict=True):
        np.testing.assert_allclose(variable.numpy(), value, rtol=0, atol=1e-11)
