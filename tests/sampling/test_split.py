"""Splits: disjoint, covering but for the gaps, and without a row of a window in two sets."""

from __future__ import annotations

from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from numpy.lib.stride_tricks import sliding_window_view

from matex_data import PartitionError, open_dataset
from matex_data.index.runs import Runs, compress
from matex_data.sampling.split import split
from tests.support.ranks import Pool

LENGTHS = (700, 30, 5, 265)


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write files of time steps, which are numbered over all files."""
    folder = tmp_path_factory.mktemp("series")
    for number, rows in enumerate(LENGTHS):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["t"] = np.arange(rows) + sum(LENGTHS[:number])
    return str(folder / "*.h5")


def _windows(window: int, horizon: int, stride: int) -> np.ndarray[Any, Any]:
    """Return the time steps of all windows with their targets, int64[windows, window + horizon]."""
    ends = np.cumsum(LENGTHS)
    steps = [np.arange(end - rows, end) for rows, end in zip(LENGTHS, ends, strict=True)]
    span = window + horizon
    return np.concatenate([sliding_window_view(t, span)[::stride] for t in steps if len(t) >= span])


def _sets(comm: MPI.Intracomm, path: str, fractions: tuple[float, ...], seed: int | None, **options: Any) -> list[Any]:
    """Return the time steps of this rank's windows in each set of a split."""
    data = open_dataset(path, inputs="t", comm=comm, **options)
    loaded = [subset.load() for subset in data.split(*fractions, seed=seed)]
    return [np.concatenate([arrays[name] for name in arrays], axis=1) for arrays in loaded]


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize(("window", "horizon", "stride"), [(12, 2, 1), (12, 2, 5), (4, 3, 9), (1, 1, 1)])
def test_no_row_is_in_two_sets(series: str, window: int, horizon: int, stride: int, seed: int | None) -> None:
    options = {"window": window, "horizon": horizon, "stride": stride}
    every = {tuple(steps) for steps in _windows(**options).tolist()}
    sets = _sets(MPI.COMM_SELF, series, (0.7, 0.2, 0.1), seed, **options)
    for number, steps in enumerate(sets):
        assert {tuple(row) for row in steps.tolist()} <= every
        others = np.concatenate([rows.ravel() for rows in sets[:number] + sets[number + 1 :]])
        assert len(steps) and not np.isin(steps, others).any()
    kept = sum(map(len, sets))
    assert kept >= (0.85 if seed else 0.95) * len(every)
    if horizon + window <= stride:
        assert kept == len(every)


def test_the_least_gap_is_left(series: str) -> None:
    (before, behind) = _sets(MPI.COMM_SELF, series, (0.5, 0.5), None, window=12, horizon=2, stride=5)
    assert 0 < behind[0, 0] - before[-1, -1] <= 5


def test_splits_of_a_split_share_no_rows(series: str) -> None:
    data = open_dataset(series, inputs="t", window=10, comm=MPI.COMM_SELF)
    rest, test = data.split(0.8, 0.2, seed=3)
    sets = [test, *rest.split(0.75, 0.25)]
    steps = [set(subset.load()["t"].ravel().tolist()) for subset in sets]
    assert all(steps) and sum(map(len, steps)) == len(set.union(*steps))


def test_the_border_of_a_file_needs_no_gap(series: str) -> None:
    data = open_dataset(series, inputs="t", window=10, comm=MPI.COMM_SELF)
    first = LENGTHS[0] - 9
    sets = data.split(first / len(data), 1 - first / len(data))
    assert [len(subset) for subset in sets] == [first, len(data) - first]
    assert len(data.split(first / len(data), 1 - first / len(data), gap=9)[0]) == first - 9


def test_a_gap_of_samples(series: str) -> None:
    data = open_dataset(series, comm=MPI.COMM_SELF)
    first, second = (subset.load()["t"] for subset in data.split(0.5, 0.5, gap=24))
    assert np.array_equal(first, np.arange(476)) and np.array_equal(second, np.arange(500, 1000))
    sets = [subset.load()["t"] for subset in data.split(0.6, 0.4, seed=2, gap=8)]
    assert min(abs(sets[0][:, None] - sets[1]).min(axis=1)) == 9
    windows = open_dataset(series, inputs="t", window=10, comm=MPI.COMM_SELF)
    assert sum(map(len, windows.split(0.5, 0.5, seed=2, gap=0))) == len(windows)


def test_every_number_of_ranks_has_the_sets(series: str, pool: Pool) -> None:
    options = {"window": 6, "horizon": 1}
    expected = _sets(MPI.COMM_SELF, series, (0.8, 0.2), 7, **options)
    by_rank = pool.run(_sets, series, (0.8, 0.2), 7, **options)
    for number, steps in enumerate(expected):
        np.testing.assert_array_equal(np.concatenate([sets[number] for sets in by_rank]), steps)


def test_a_run_resumes_on_a_split_with_gaps(series: str) -> None:
    data = open_dataset(series, inputs="t", window=6, horizon=1, comm=MPI.COMM_SELF)
    training, _ = data.split(0.8, 0.2, seed=7)
    batches = [x.copy() for x, _ in training.batches(20, shuffle=True, seed=1)]
    again = data.split(0.8, 0.2, seed=7)[0].batches(20, shuffle=True, seed=1, start=training.state(5))
    np.testing.assert_array_equal(np.concatenate([x.copy() for x, _ in again]), np.concatenate(batches[5:]))
    with pytest.raises(PartitionError, match="another samples"):
        data.split(0.8, 0.2, seed=7, gap=0)[0].batches(20, shuffle=True, start=training.state(5))


@given(
    st.sets(st.integers(0, 300), min_size=1).map(sorted),
    st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any),
    st.none() | st.integers(0, 2**64),
    st.integers(0, 12),
    st.lists(st.integers(1, 300), max_size=4),
)
def test_sets_are_disjoint_with_gaps(
    numbers: list[int], weights: list[int], seed: int | None, gap: int, borders: list[int]
) -> None:
    files = np.array([0, *sorted(borders)])
    fractions = [weight / sum(weights) for weight in weights]
    runs = compress(np.array(numbers))
    try:
        sets = split(runs, fractions, seed, gap, files)
    except PartitionError:
        assert gap
        return
    own = [subset.numbers(np.arange(subset.total)) for subset in sets]
    every = np.concatenate(own)
    assert len(set(every.tolist())) == len(every) and set(every.tolist()) <= set(numbers)
    assert gap or len(every) == len(numbers)
    assert all(np.array_equal(samples, np.sort(samples)) for samples in own)
    for i, samples in enumerate(own):
        others = np.concatenate([*own[:i], *own[i + 1 :], []])
        near = abs(samples[:, None] - others) <= gap
        same = np.searchsorted(files, samples, side="right")[:, None] == np.searchsorted(files, others, side="right")
        assert not (near & same).any()


@pytest.mark.parametrize("seed", [-1, 1.5, 2.0, True, "1", np.float64(3)])
def test_a_seed_is_an_integer(series: str, seed: Any) -> None:
    data = open_dataset(series, comm=MPI.COMM_SELF)
    with pytest.raises(PartitionError, match=r"seed(.|\n)*integer"):
        data.split(0.5, 0.5, seed=seed)
    for shuffle in (True, "global", False):
        with pytest.raises(PartitionError, match=r"seed(.|\n)*integer"):
            data.batches(10, shuffle=shuffle, seed=seed)


def _seeds(comm: MPI.Intracomm, path: str) -> list[str]:
    data = open_dataset(path, comm=comm)
    found = []
    for seed in (-1, 0.5):
        with pytest.raises(PartitionError) as caught:
            data.batches(12, shuffle=True, seed=seed)  # type: ignore[arg-type]
        found.append(str(caught.value))
    return found


def test_every_rank_refuses_a_seed(series: str, pool: Pool) -> None:
    texts = pool.run(_seeds, series)
    assert all(found == texts[0] for found in texts)


def test_integers_of_numpy_are_seeds(series: str) -> None:
    data = open_dataset(series, comm=MPI.COMM_SELF)
    for seed in (np.int64(3), np.uint8(3)):
        first = next(iter(data.batches(10, shuffle=True, seed=seed)))["t"].tolist()
        assert first == next(iter(data.batches(10, shuffle=True, seed=3)))["t"].tolist()
        assert len(data.split(0.5, 0.5, seed=seed, gap=np.int32(0))) == 2
        assert type(data.state(1)["seed"]) is int


@pytest.mark.parametrize("gap", [-1, 0.5, True])
def test_a_gap_is_an_integer(series: str, gap: Any) -> None:
    with pytest.raises(PartitionError, match=r"gap(.|\n)*integer"):
        open_dataset(series, comm=MPI.COMM_SELF).split(0.5, 0.5, gap=gap)


def test_gaps_that_leave_nothing_are_an_error(series: str) -> None:
    data = open_dataset(series, inputs="t", window=600, comm=MPI.COMM_SELF)
    with pytest.raises(PartitionError, match=r"leave nothing of set 1 of 2(.|\n)*50 samples(.|\n)*gap="):
        data.split(0.5, 0.5)


def test_a_set_of_no_samples_is_empty() -> None:
    assert [subset.total for subset in split(Runs(np.array([0]), np.array([10])), (1, 0), None, 3)] == [10, 0]


def _dropped(comm: MPI.Intracomm, path: str) -> list[str]:
    data = open_dataset(path, comm=comm)
    found = []
    for options in ({}, {"shuffle": True, "seed": 1}, {"shuffle": "global", "seed": 1}):
        for make in (data.batches, data.tf_dataset):
            with pytest.raises(PartitionError) as caught:
                make(1200, **options)  # type: ignore[arg-type]
            found.append(str(caught.value))
    return found


def test_an_epoch_of_which_all_is_dropped_is_an_error(series: str, pool: Pool) -> None:
    texts = pool.run(_dropped, series)
    assert all(found == texts[0] for found in texts)
    assert all(part in texts[0][0] for part in ("1000 samples", "1200", 'remainder="keep"', 'remainder="pad"'))
    data = open_dataset(series, comm=MPI.COMM_SELF)
    assert [len(data.batches(1200, remainder=remainder)) for remainder in ("keep", "pad")] == [1, 1]
    assert len(data.batches(1000)) == 1
