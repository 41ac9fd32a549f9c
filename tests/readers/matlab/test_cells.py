"""Cells of arrays of other lengths, as trials are stored: version 5 by SciPy, version 7.3 by hdf5storage."""

from pathlib import Path
from typing import Any

import hdf5storage
import numpy as np
import pytest
import scipy.io
from mpi4py import MPI

import matex_data as md
from tests.support.loading import check_samples
from tests.support.ranks import Pool

pytestmark = pytest.mark.rank_counts(1, 3)
RNG = np.random.default_rng(7)
TRIALS = [RNG.normal(size=(n, 3)) for n in (4, 2, 0, 7, 5, 2)]
SPIKES = [RNG.normal(size=n).astype("f4") for n in (4, 1, 9, 0, 2, 2)]
EQUAL = [RNG.integers(0, 99, (2, 5)).astype("i2") for _ in range(6)]


def _cell(arrays: Any, row: bool) -> Any:
    cell = np.empty((1, len(arrays)) if row else (len(arrays), 1), object)
    for at, array in zip(np.ndindex(cell.shape), arrays, strict=True):
        cell[at] = array
    return cell


def _save(path: Path, content: dict[str, Any], version: str) -> None:
    if version == "5":
        scipy.io.savemat(path, content)
    else:
        hdf5storage.savemat(str(path), content, format="7.3")


@pytest.mark.parametrize("row", [True, False])
@pytest.mark.parametrize("version", ["5", "7.3"])
def test_cells_of_arrays(pool: Pool, tmp_path: Path, version: str, row: bool) -> None:
    path = tmp_path / "trials.mat"
    vectors = [spikes[None] if row else spikes[:, None] for spikes in SPIKES]
    content = {
        "trial": _cell(TRIALS, row),
        "spikes": _cell(vectors, row),
        "equal": _cell(EQUAL, row),
        "label": np.arange(6.0)[:, None],
    }
    _save(path, content, version)
    wanted: dict[str, Any] = {"trial": TRIALS, "spikes": SPIKES, "equal": EQUAL, "label": np.arange(6.0)}
    shapes = {"trial": (None, 3), "spikes": (None,), "equal": (2, 5), "label": ()}
    check_samples(pool, str(path), wanted, shapes)


@pytest.mark.parametrize("version", ["5", "7.3"])
def test_cells_of_other_contents(tmp_path: Path, version: str) -> None:
    path = tmp_path / "mixed.mat"
    content = {"mixed": _cell([np.zeros((2, 3)), "a text"], False), "x": np.arange(2.0)[:, None]}
    _save(path, content, version)
    with pytest.warns(UserWarning, match="left out"):
        assert list(md.open_dataset(path).schema) == ["x"]
    with pytest.raises(md.FormatError):
        md.open_dataset(path, inputs="mixed")


@pytest.mark.parametrize("version", ["5", "7.3"])
def test_cells_of_one_shape_in_a_file_are_united_with_those_of_others(tmp_path: Path, version: str) -> None:
    numbers = np.arange(60.0).reshape(-1, 3)
    for lengths in ([(4, 4), (2, 5)], [(2, 5), (4, 4)], [(4, 4), (3, 3)], [(3,), (4,)]):
        trials = [[numbers[:rows] * (at + 1) for at, rows in enumerate(of_file)] for of_file in lengths]
        for number, rows in enumerate(trials):
            content = {"trial": _cell(rows, True), "vector": _cell([row[:, :1] for row in rows], True)}
            _save(tmp_path / f"{number}.mat", content, version)
        data = md.open_dataset(tmp_path, inputs=["trial", "vector"], comm=MPI.COMM_SELF)
        assert data.schema["trial"].sample_shape == (None, 3)
        found = data.load()
        for at, row in enumerate(trials[0] + trials[1]):
            np.testing.assert_array_equal(found["trial"][at], row)
            np.testing.assert_array_equal(found["vector"][at], row[:, 0])
