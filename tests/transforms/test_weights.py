"""Sample weights from a field: elements, padding, and training on two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from matex_data import DataError, FieldNotFound, FormatError, PartitionError, open_dataset
from tests.support.ranks import Pool, Pools
from tests.transforms.events import write_events

SELF = MPI.COMM_SELF
XY = {"inputs": "vertex", "targets": "MET"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def events(folder: Path) -> ak.Array:
    return write_events(folder)


def _weights(comm: MPI.Intracomm, folder: Path, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return targets and weights of this rank, of arrays and of tensors."""
    data = open_dataset(str(folder), weights="genWeight", comm=comm, **XY)
    batches = [(y.copy(), w.copy()) for _, y, w in data.batches(24, **options)]
    tensors = [(y.numpy(), w.numpy()) for _, y, w in data.tf_dataset(24, **options)]
    return batches, tensors


@pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
def test_weights_of_every_remainder(folder: Path, events: ak.Array, pool: Pool, remainder: str) -> None:
    by_rank = pool.run(_weights, folder, remainder=remainder)
    rows = 168 if remainder == "drop" else len(events)
    expected = np.array([ak.to_numpy(events[name])[:rows] for name in ("MET", "genWeight")], "f4")
    assert (expected[1] < 0).any()
    for kind in (0, 1):
        steps = zip(*(found[kind] for found in by_rank), strict=True)
        found = np.concatenate([np.stack(element) for step in steps for element in step], axis=1)
        padded = found[0] == 0
        assert padded.sum() == (9 if remainder == "pad" else 0) and not found[:, padded].any()
        np.testing.assert_array_equal(found[:, ~padded], expected)


def test_weights_of_dicts(folder: Path, events: ak.Array) -> None:
    data = open_dataset(str(folder), weights="nMuon", comm=SELF)
    batch = next(iter(data.batches(24)))
    assert batch["sample_weight"].dtype == np.float32
    np.testing.assert_array_equal(batch["sample_weight"], batch["nMuon"])
    spec = data.tf_dataset(24).element_spec
    assert spec["sample_weight"].shape == (24,) and spec["nMuon"].dtype.name == "int32"


def test_weights_of_objects_are_those_of_their_events(folder: Path, events: ak.Array) -> None:
    options = {"inputs": ["Muon_pt"], "targets": "Muon_charge", "weights": "genWeight", "comm": SELF}
    data = open_dataset(str(folder), flatten="Muon_*", stack=True, where="nMuon > 1", **options)
    found = np.concatenate([w.copy() for _, _, w in data.batches(24, remainder="keep")])
    chosen = events[events["nMuon"] > 1]
    np.testing.assert_array_equal(found, np.repeat(ak.to_numpy(chosen["genWeight"]), chosen["nMuon"]).astype("f4"))


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"inputs": "vertex", "weights": "genWeight"}, FormatError, "second item of"),
        ({"targets": "MET", "weights": "genWeight"}, FormatError, "weights= needs inputs"),
        ({"weights": "genWieght"}, FieldNotFound, "'genWeight'"),
        ({"weights": "vertex", **XY}, FormatError, "one number for each sample"),
        ({"weights": "Muon_pt", **XY}, FormatError, "ragged"),
        ({"weights": "genWeight", "window": 2, **XY}, PartitionError, "exclude each other"),
    ],
)
def test_wrong_weights(folder: Path, events: ak.Array, options: Any, kind: type[DataError], text: str) -> None:
    with pytest.raises(kind, match=text):
        open_dataset(str(folder), comm=SELF, **options)


@pytest.mark.parametrize("options", [{"one_hot": "w"}, {"dtype": {"w": "category"}}])
def test_codes_are_no_weights(options: Any) -> None:
    data = {"x": np.arange(6.0), "w": np.array([1, 2, 3] * 2), "y": np.arange(6)}
    with pytest.raises(FormatError, match=r"found: codes of categories\n.*remedy: leave the field out of dtype= and"):
        open_dataset(data, inputs="x", targets="y", weights="w", comm=SELF, **options)


def test_weights_that_map_makes_are_numbers() -> None:
    data = open_dataset({"x": np.arange(6.0), "w": np.ones(6)}, weights="w", comm=SELF)
    with pytest.raises(FormatError, match="weights= needs one number for each sample"):
        data.map(lambda arrays: {"w": arrays["w"][:, None]}, schema={"w": ((1,), "f8")})


def test_a_state_belongs_to_the_same_weights(folder: Path, events: ak.Array) -> None:
    state = open_dataset(str(folder), weights="genWeight", comm=SELF, **XY).state(1)
    with pytest.raises(PartitionError, match="another fields"):
        open_dataset(str(folder), weights="nMuon", comm=SELF, **XY).batches(24, start=state)


def _train(comm: MPI.Intracomm, folder: Path, weights: str | None) -> tuple[NDArray[Any], dict[str, list[float]]]:
    """Return the weights of a linear model after two epochs, and its logs."""
    import keras

    from matex_data.training import fit

    keras.utils.set_random_seed(2)
    data = open_dataset(str(folder), weights=weights, comm=comm, **XY)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3), "mse", metrics=["mae"], weighted_metrics=["mse"])
    batches = data.tf_dataset(24, shuffle=True, seed=1, remainder="pad")
    history = fit(model, batches, validation_data=data.tf_dataset(24, remainder="pad"), epochs=2, comm=comm)
    return np.concatenate([np.ravel(weight) for weight in model.get_weights()]), history.history


def test_two_ranks_train_with_the_weights_of_one(folder: Path, events: ak.Array, ranks: Pools) -> None:
    ((alone, logs),) = ranks(1).run(_train, folder, "genWeight", timeout=240)
    ((unweighted, _),) = ranks(1).run(_train, folder, None, timeout=240)
    assert np.abs(alone - unweighted).max() > 1e-3
    for found, logs_of_rank in ranks(2).run(_train, folder, "genWeight", timeout=240):
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-5 * np.abs(alone).max())
        for name, values in logs.items():
            np.testing.assert_allclose(logs_of_rank[name], values, rtol=1e-4)


def test_the_loss_is_that_of_keras(folder: Path, events: ak.Array, ranks: Pools) -> None:
    (loss, expected), *others = ranks(2).run(_first_loss, folder, timeout=240)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert all(np.isclose(other, loss) for other, _ in others)


def _first_loss(comm: MPI.Intracomm, folder: Path) -> tuple[float, float]:
    """Return the loss of the first batch as ``fit`` reports it, and sum(w * loss) / batch over all ranks."""
    import keras

    from matex_data.training import fit

    keras.utils.set_random_seed(2)
    data = open_dataset(str(folder), weights="genWeight", comm=comm, **XY)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-9), "mse")
    x, y, w = next(iter(data.batches(24)))
    own = float(np.sum(w * np.square(model(x).numpy()[:, 0] - y)))
    history = fit(model, data.tf_dataset(24), steps_per_epoch=1, epochs=1, comm=comm)
    return history.history["loss"][0], comm.allreduce(own) / 24
