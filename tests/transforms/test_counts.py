"""Counts of values and weights of classes over the ranks, compared with pandas and scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from mpi4py import MPI
from sklearn.utils.class_weight import compute_class_weight

from matex_data import FieldNotFound, FormatError, open_dataset
from matex_data.transforms import counts
from tests.support.ranks import Pool

ROWS = 1001


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {
            "label": np.sort(rng.poisson(2, ROWS)),  # sorted: the ranks have other classes
            "name": rng.choice(["é", "b", "NA value", "zz"], ROWS, p=[0.5, 0.3, 0.1, 0.1]),
            "flag": rng.random(ROWS) < 0.3,
            "x": rng.integers(0, 3, ROWS) / 4,
        }
    )
    frame.loc[rng.random(ROWS) < 0.1, ["name", "x"]] = None
    path = tmp_path_factory.mktemp("counts") / "table.csv"
    frame.to_csv(path, index=False)
    return path


def _counts(comm: MPI.Intracomm, path: Path, name: str, most: int) -> list[tuple[Any, int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts, "MOST_VALUES", most)
        return list(open_dataset(path, comm=comm).value_counts(name).items())


def _by_count(series: Any) -> list[tuple[Any, int]]:
    return sorted(series.value_counts().sort_index().items(), key=lambda item: -item[1])


@pytest.mark.parametrize("most", [1_000_000, 12], ids=["one exchange", "several exchanges"])
@pytest.mark.parametrize("name", ["label", "name", "flag", "x"])
def test_counts_are_those_of_pandas(table: Path, pool: Pool, name: str, most: int) -> None:
    expected = _by_count(pd.read_csv(table)[name])
    for found in pool.run(_counts, table, name, most):
        assert found == expected
        assert all(type(count) is int and type(value) in (int, str, bool, float) for value, count in found)


def _refused(comm: MPI.Intracomm, path: Path, name: str, most: int) -> str:
    with pytest.raises(FormatError) as caught:
        _counts(comm, path, name, most)
    return str(caught.value)


def test_too_many_values_are_an_error_on_every_rank(table: Path, pool: Pool) -> None:
    texts = set(pool.run(_refused, table, "label", 5))
    assert len(texts) == 1
    assert "'label'" in next(iter(texts)) and "statistics()" in next(iter(texts))


def test_elements_of_arrays_and_texts_of_hdf5(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    masks, names = rng.integers(0, 4, (50, 6, 5)).astype("u1"), rng.choice([b"cat", b"dog"], 50)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["mask"], file["name"] = masks, names
        file["z"] = np.ones(50, complex)
    data = open_dataset(tmp_path / "a.h5", comm=MPI.COMM_SELF)
    assert list(data.value_counts("mask").items()) == _by_count(pd.Series(masks.ravel()))
    assert list(data.value_counts("name").items()) == _by_count(pd.Series(names.astype(str)))
    first, second = data.split(0.4, 0.6, seed=1)
    assert sum(first.value_counts("mask").values()) == len(first) * 30
    assert first.value_counts("name")["cat"] + second.value_counts("name")["cat"] == (names == b"cat").sum()
    with pytest.raises(FieldNotFound, match="'name'"):
        data.value_counts("nmae")
    with pytest.raises(FormatError, match=r"not counted(.|\n)*'z'"):
        data.value_counts("z")


def test_codes_of_categories_are_counted(table: Path) -> None:
    data = open_dataset(table, dtype={"name": "category"}, comm=MPI.COMM_SELF)
    names = data.schema["name"].attributes["categories"]
    found = {names[code]: count for code, count in data.value_counts("name").items()}
    assert found == dict(_by_count(pd.read_csv(table)["name"]))


def _weights(comm: MPI.Intracomm, path: Path, name: str) -> dict[Any, float]:
    return open_dataset(path, comm=comm).class_weights(name)


@pytest.mark.parametrize("name", ["label", "name"])
def test_class_weights_are_those_of_scikit_learn(table: Path, pool: Pool, name: str) -> None:
    values = pd.read_csv(table)[name].dropna().to_numpy()
    classes = np.unique(values)
    expected = dict(zip(classes.tolist(), compute_class_weight("balanced", classes=classes, y=values), strict=True))
    for found in pool.run(_weights, table, name):
        assert found == pytest.approx(expected, rel=1e-14)
        assert list(found) == classes.tolist()


@pytest.mark.parametrize("call", ["statistics", "value_counts", "class_weights", "vocabulary"])
def test_a_list_of_names_is_an_error_that_says_so(table: Path, call: str) -> None:
    data = open_dataset(table, comm=MPI.COMM_SELF)
    with pytest.raises(FieldNotFound, match="given by its name"):
        getattr(data, call)(["label"])
