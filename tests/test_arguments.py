"""Arguments of another kind than a public function declares: an error that names argument, kinds and help."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from mpi4py import MPI

import matex_data as md
from matex_data.errors import ArgumentError
from tests.support.ranks import Pool


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("arguments") / "a.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["y"] = np.arange(60.0).reshape(20, 3), np.arange(20)
    return str(path)


CALLS: dict[str, tuple[Callable[[Any, str], Any], str, str]] = {
    "split": (lambda data, _: data.split([0.8, 0.2]), "takes no fractions", "a number"),
    "batch_size": (lambda data, _: data.batches("4"), "takes no batch_size=", "an integer"),
    "shuffle": (lambda data, _: data.batches(4, shuffle=1000), "takes no shuffle=", "True or False or 'global'"),
    "large": (lambda data, _: data.kfold(10**30), "takes no number=", "an integer"),
    "seed": (lambda data, _: data.tf_dataset(4, shuffle=True, seed="a"), "takes no seed=", "an integer or None"),
    "window": (lambda data, _: data.window(True), "takes no window=", "an integer"),
    "derive": (lambda data, _: data.derive({"z": 3}), "takes no expressions=", "a dict of: a text"),
    "names": (lambda data, _: data.load([1]), "takes no fields=", "a text, a list of: a text, or None"),
    "function": (lambda data, _: data.map("x"), "takes no function=", "a function"),
    "axis": (lambda data, _: data.statistics("x", axis="a"), "takes no axis=", "an integer, a list of"),
    "axis 0-d": (lambda data, _: data.statistics("x", axis=np.array(1)), "takes no axis=", "an integer, a list of"),
    "adapt": (lambda data, _: data.adapt("x"), "cannot be adapted", "a preprocessing layer"),
    "concat": (lambda data, _: md.concat([data, None]), "takes no datasets=", "a list of: Dataset"),
    "merge": (lambda data, _: md.merge(data, {"x": 3}), "takes no second=", "Dataset"),
    "paths": (lambda _, path: md.open_dataset(3), "takes no paths=", "a path"),
    "inputs": (lambda _, path: md.open_dataset(path, inputs=["x", 3]), "takes no inputs=", "a list of: a text"),
    "set": (lambda _, path: md.open_dataset(path, inputs={"x", "y"}), "takes no inputs=", "a list of: a text"),
    "absent": (lambda _, path: md.open_dataset(path, absent=[("x", 3)]), "takes no absent=", "a dict of: "),
    "absent date": (
        lambda _, path: md.open_dataset(path, absent={"t": np.datetime64("2000-01-01")}),
        "takes no absent=",
        "a number, a text",
    ),
    "absent duration": (lambda _, path: md.open_dataset(path, absent={"t": np.timedelta64(1)}), "no absent=", "a text"),
    "weights": (lambda _, path: md.open_dataset(path, weights=["x"]), "takes no weights=", "a text or None"),
    "too large": (lambda data, _: data.kfold(2, seed=2**64), "takes no seed=", "integers up to 9223372036854775807"),
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_another_kind(path: str, name: str) -> None:
    call, problem, expected = CALLS[name]
    data = md.open_dataset(path, comm=MPI.COMM_SELF)
    with pytest.raises(ArgumentError) as caught:
        call(data, path)
    assert problem in caught.value.problem and expected in str(caught.value.expected)
    assert isinstance(caught.value, md.PartitionError) and isinstance(caught.value, TypeError)


def test_numbers_and_lists_of_other_packages_are_taken(path: str) -> None:
    data = md.open_dataset(
        path, inputs=pd.Index(["x"]), targets=("y",), comm=MPI.COMM_SELF, window_bytes=np.int64(1 << 20)
    )
    train, test = data.split(np.float32(0.75), np.float64(0.25), seed=np.uint8(3))
    assert (len(train), len(test)) == (15, 5)
    assert len(data.batches(np.int32(4), shuffle=np.bool_(True), seed=0)) == 5
    for axis in (np.array([1]), np.int64(1), [np.int8(-1)]):
        assert data.statistics("x", axis=axis)["x"].mean.shape == (3,)
    options: dict[str, Any] = {"patch": (np.int64(2),), "patches_per_image": np.int32(4)}
    for patch in (np.int64(2), np.array([2])):
        assert len(md.open_dataset(path, inputs="x", comm=MPI.COMM_SELF, **{**options, "patch": patch})) == 80
    assert [len(part) for part in data.split(at=np.array([5, 9]), along="y")] == [5, 4, 11]


def _one_rank(comm: Any, path: str) -> int:
    data = md.open_dataset(path, comm=comm)
    return len(data.batches(4 if comm.rank else "4"))  # type: ignore[arg-type]


@pytest.mark.rank_counts(2, 3)
def test_the_error_of_one_rank_is_that_of_all(pool: Pool, path: str) -> None:
    errors = pool.outcomes(_one_rank, path)
    assert all(isinstance(error, ArgumentError) and "batch_size=" in str(error) for error in errors)
