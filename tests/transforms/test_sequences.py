"""Sliding windows, compared with plain slicing."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI
from numpy.lib.stride_tricks import sliding_window_view

from matex_data import FormatError, PartitionError, open_dataset
from matex_data.io.counters import process_profile
from tests.support.ranks import Pool

LENGTHS = (120, 7, 61)


@pytest.fixture(scope="module", params=[None, (10, 3)], ids=["contiguous", "chunked"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sequences")
    rng = np.random.default_rng(0)
    for number, rows in enumerate(LENGTHS):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            chunks = request.param and (min(rows, request.param[0]), 3)
            file.create_dataset("t", data=rng.normal(size=(rows, 3)), chunks=chunks)
            file["y"] = np.arange(rows) + 1000 * number
    return folder


def _expected(folder: Path, name: str, window: int, stride: int, horizon: int, ahead: bool) -> list[Any]:
    result = []
    for path in sorted(folder.iterdir()):
        with h5py.File(path) as file:
            rows = file[name][:]
        for begin in range(0, len(rows) - window - horizon + 1, stride):
            end = begin + window
            result.append(rows[end : end + horizon] if ahead else rows[begin:end])
    return result


def _read(comm: MPI.Intracomm, folder: Path, **options: Any) -> list[Any]:
    data = open_dataset(str(folder), comm=comm, **options)
    batches = data.batches(12, shuffle=True, seed=1, remainder="keep")
    return [tuple(np.array(arrays) for arrays in batch) for batch in batches]


@pytest.mark.parametrize(("window", "stride", "horizon"), [(5, 1, 1), (4, 3, 2), (1, 1, 1), (3, 7, 4)])
def test_windows_and_their_targets(folder: Path, pool: Pool, window: int, stride: int, horizon: int) -> None:
    shape = {"window": window, "stride": stride, "horizon": horizon}
    by_rank = pool.run(_read, folder, inputs="t", targets="y", **shape)
    x = np.concatenate([batch[0] for batches in by_rank for batch in batches])
    y = np.concatenate([batch[1] for batches in by_rank for batch in batches])
    order = np.argsort(y[:, 0])
    np.testing.assert_array_equal(x[order], _expected(folder, "t", window, stride, horizon, False))
    np.testing.assert_array_equal(y[order], _expected(folder, "y", window, stride, horizon, True))


def test_targets_from_the_inputs(folder: Path) -> None:
    data = open_dataset(str(folder), inputs="t", window=6, horizon=2, comm=MPI.COMM_SELF)
    loaded = data.load()
    np.testing.assert_array_equal(loaded["t"], _expected(folder, "t", 6, 1, 2, False))
    np.testing.assert_array_equal(loaded["t_ahead"], _expected(folder, "t", 6, 1, 2, True))
    x, y = next(iter(data.tf_dataset(12)))
    assert x.shape == (12, 6, 3) and y.shape == (12, 2, 3)


def test_without_names_windows_of_all_fields_have_those_behind_them_as_targets(folder: Path) -> None:
    for data in (
        open_dataset(str(folder), window=3, horizon=2, comm=MPI.COMM_SELF),
        open_dataset(str(folder), comm=MPI.COMM_SELF).window(3, horizon=2),
    ):
        x, y = data.head(1)
        named = open_dataset(str(folder), inputs=["t", "y"], window=3, horizon=2, comm=MPI.COMM_SELF)
        expected = named.head(1)
        for name in ("t", "y"):
            np.testing.assert_array_equal(x[name], expected[0][name])
            np.testing.assert_array_equal(y[f"{name}_ahead"], expected[1][f"{name}_ahead"])


def test_windows_without_targets(folder: Path) -> None:
    data = open_dataset(str(folder), inputs=["t", "y"], window=6, stride=2, comm=MPI.COMM_SELF)
    batch = next(iter(data.batches(4)))
    assert batch["t"].shape == (4, 6, 3) and batch["y"].tolist()[1] == list(range(2, 8))


def test_shared_rows_are_read_once(folder: Path) -> None:
    data = open_dataset(str(folder), inputs="t", window=20, horizon=1, comm=MPI.COMM_SELF)
    before = process_profile().bytes
    for _ in data.batches(12, shuffle=True, seed=1, remainder="keep"):
        pass
    read = process_profile().bytes - before
    assert read <= 1.05 * sum(LENGTHS) * 3 * 8 + 10 * 3 * 8


def test_windows_of_small_rows_take_no_position_for_each_of_their_rows(tmp_path: Path) -> None:
    rows, length = 1 << 16, 64
    values = np.arange(rows, dtype=np.int8)
    np.save(tmp_path / "x.npy", values)
    data = open_dataset(tmp_path / "x.npy", window=length)
    tracemalloc.start()
    try:
        windows = data.load()["data"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(windows, sliding_window_view(values, length))
    assert peak < 6 * windows.nbytes


def test_errors(folder: Path) -> None:
    with pytest.raises(FormatError, match="at least 501 rows"):
        open_dataset(str(folder), inputs="t", window=500, horizon=1, comm=MPI.COMM_SELF)
    with pytest.raises(PartitionError, match="stride=0"):
        open_dataset(str(folder), inputs="t", window=5, stride=0, comm=MPI.COMM_SELF)


@pytest.mark.parametrize("names", [{}, {"inputs": ["x", "x_ahead"], "targets": "x"}])
def test_an_input_has_not_the_name_of_a_target(names: dict[str, Any]) -> None:
    arrays = {"x": np.arange(5.0), "x_ahead": np.arange(5.0)}
    for make in (
        lambda: open_dataset(arrays, window=2, horizon=1, comm=MPI.COMM_SELF, **names),
        lambda: open_dataset(arrays, comm=MPI.COMM_SELF, **names).window(2, horizon=1),
    ):
        with pytest.raises(FormatError, match=r"the name of a target.*'x_ahead'"):
            make()
    data = open_dataset(arrays, inputs="x", targets="x_ahead", window=2, horizon=1, comm=MPI.COMM_SELF)
    assert data.head(1)[1].shape == (1, 1)


def test_rows_between_a_window_and_its_target_need_not_be_samples() -> None:
    """All pairs of windows and targets, of all rows, of which the rows themselves pass the condition."""
    kept = np.arange(40) % 7 != 3
    rows = open_dataset({"n": np.arange(40), "kept": kept}, inputs="n", where="kept == 1", comm=MPI.COMM_SELF)
    inputs, targets = rows.window(2, stride=2, lead=3, horizon=2)[:]
    expected = [n for n in range(0, 40 - 5, 2) if kept[[n, n + 1, n + 4, n + 5]].all()]
    np.testing.assert_array_equal(inputs[:, 0], expected)
    np.testing.assert_array_equal(targets[:, 0], np.array(expected) + 4)
