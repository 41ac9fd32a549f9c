"""Computed fields: what a window reads of the files, and what computations have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from mpi4py import MPI

from matex_data import Dataset, FormatError, PartitionError, concat, merge, mix, open_dataset
from matex_data.index.computed import Computed
from matex_data.readers.csv.rows import CsvRows
from tests.support.ranks import Pool

SELF = MPI.COMM_SELF
COLUMNS = [f"c{number}" for number in range(10)]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("table") / "a.csv"
    pd.DataFrame(np.arange(4000.0).reshape(400, 10), columns=COLUMNS).to_csv(path, index=False)
    return str(path)


def doubled(arrays: dict[str, Any]) -> dict[str, Any]:
    return {"twice": 2 * arrays["c1"]}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 4, "horizon": 2},
        {"derive": {"d": "c0 + c1", "e": "d * c2"}, "missing": "mask"},
        {"stack": True, "window": 3, "missing": 0.0},
    ],
)
def test_a_window_reads_and_parses_each_row_once(
    table: str, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], shuffle: bool
) -> None:
    parsed: list[int] = []
    columns = CsvRows.columns

    def counted(self: CsvRows, blocks: Any, targets: Any, data: Any) -> Any:
        parsed.append(int(self.block_sizes(blocks).sum()))
        return columns(self, blocks, targets, data)

    data = open_dataset(table, inputs=COLUMNS, comm=SELF, **options)
    if "derive" in options:
        data = data.map(doubled, schema={"twice": "f8"})
    monkeypatch.setattr(CsvRows, "columns", counted)
    before = data.profile.bytes
    for _ in data.batches(len(data), shuffle=shuffle, seed=1):
        pass
    assert sum(parsed) == 400
    assert data.profile.bytes - before <= Path(table).stat().st_size


@pytest.mark.parametrize("options", [{"missing": "mask"}, {"stack": True}, {"window": 2}, {"missing": 0.0}])
def test_units_are_compared_whatever_the_options(tmp_path: Path, options: dict[str, Any]) -> None:
    for unit in ("K", "degC"):
        field = xr.DataArray(np.arange(6.0), dims="time", attrs={"units": unit})
        xr.Dataset({"t": field}).to_netcdf(tmp_path / f"{unit}.nc")
    sets = [open_dataset(str(tmp_path / f"{unit}.nc"), inputs=["t"], comm=SELF, **options) for unit in ("K", "degC")]
    with pytest.raises(FormatError, match="do not agree on"):
        concat(sets)


@pytest.fixture(scope="module")
def series(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("series") / "a.h5"
    with h5py.File(path, "w") as file:
        file["time"], file["x"], file["y"] = np.arange(200), np.arange(200.0), -np.arange(200.0)
    return str(path)


@pytest.mark.parametrize("how", ["exact", "inner"])
@pytest.mark.parametrize("seed", [None, 3])
def test_a_split_of_merged_windows_shares_no_row(series: str, how: Any, seed: int | None) -> None:
    plain = open_dataset(series, inputs="x", where="time < 195" if how == "exact" else "time % 3 > 0", comm=SELF)
    windows = open_dataset(series, targets="y", window=5, comm=SELF)
    for one, other in ((plain, windows), (windows, plain)):
        parts = merge(one, other, on="time", how=how).split(0.6, 0.4, seed=seed)
        rows = [set((-part.load()["y"]).ravel().tolist()) for part in parts]
        assert min(map(len, rows)) > 20 and not rows[0] & rows[1]


def test_a_split_of_merged_objects_keeps_events_whole(tmp_path: Path) -> None:
    counts = np.random.default_rng(1).integers(1, 4, 60)
    with h5py.File(tmp_path / "events.h5", "w") as file:
        pt = file.create_dataset("pt", (60,), h5py.vlen_dtype("f8"))
        first = np.cumsum(counts) - counts
        for event, (count, begin) in enumerate(zip(counts, first, strict=True)):
            pt[event] = np.arange(begin, begin + count)
        file["event"] = np.arange(60)
    with h5py.File(tmp_path / "objects.h5", "w") as file:
        file["pt"], file["z"] = np.arange(counts.sum(), dtype="f8"), np.arange(counts.sum()) / 2
    objects = open_dataset(str(tmp_path / "events.h5"), inputs=["pt", "event"], flatten="pt", comm=SELF)
    others = open_dataset(str(tmp_path / "objects.h5"), targets="z", comm=SELF)
    parts = merge(others, objects, on="pt").split(0.5, 0.5)
    events = [set(part.load()["event"].tolist()) for part in parts]
    assert not events[0] & events[1] and len(events[0] | events[1]) == 60


def drawn(arrays: dict[str, Any], seeds: Any) -> dict[str, Any]:
    return {"seed": seeds}


def test_both_halves_of_joined_sets_draw_their_own_numbers(series: str) -> None:
    halves = [open_dataset(series, inputs="x", comm=SELF).map(drawn, schema={"seed": "i8"}, seed=1) for _ in range(2)]
    seeds = concat(halves).load()["seed"]
    assert len(set(seeds.tolist())) == 400


def test_integers_stay_integers_or_are_an_error(tmp_path: Path) -> None:
    large = (1 << 53) + 1
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["id"] = np.array([[large, 5], [3, large + 2]])
        lists = file.create_dataset("ids", (2,), h5py.vlen_dtype("i8"))
        lists[0], lists[1] = np.array([large, 1]), np.array([2])
    data = open_dataset(str(tmp_path / "a.h5"), inputs="m", derive={"m": "max(id)"}, comm=SELF)
    assert data.load()["m"].tolist() == [large, large + 2]
    assert len(open_dataset(str(tmp_path / "a.h5"), inputs="id", where=f"max(id) == {large}", comm=SELF)) == 1
    data = open_dataset(str(tmp_path / "a.h5"), inputs="m", derive={"m": "max(ids)"}, comm=SELF)
    with pytest.raises(FormatError, match="not exact in float64") as caught:
        data.load()
    assert caught.value.row == 0 and caught.value.found == str(large)


def test_the_mean_of_times_in_nanoseconds_is_that_of_numpy() -> None:
    times = np.arange(30).reshape(3, 10) + 1_600_000_000_000_000_000
    data = open_dataset({"t": times, "lists": [*times]}, derive={"m": "mean(t)", "n": "mean(lists)"}, comm=SELF)
    found = data.load()
    for name in ("m", "n"):
        np.testing.assert_allclose(found[name], times.mean(axis=1), rtol=1e-15)


def _shares(comm: MPI.Intracomm, paths: list[str], weights: list[float], shuffle: Any) -> Any:
    sets = [open_dataset(path, inputs="x", comm=comm) for path in paths]
    batches = mix(sets, weights=weights).batches(24, shuffle=shuffle, seed=1)
    return [x.copy() for x in batches]


@pytest.mark.parametrize("shuffle", [False, True, "global"])
def test_every_rank_has_the_shares_of_a_mixture(tmp_path: Path, pool: Pool, ranks: Any, shuffle: Any) -> None:
    paths = [str(tmp_path / f"{name}.h5") for name in "ab"]
    for sign, path in zip((1, -1), paths, strict=True):
        with h5py.File(path, "w") as file:
            file["x"] = sign * (1 + np.arange(240.0))
    expected = ranks(1).run(_shares, paths, [0.75, 0.25], shuffle)[0]
    by_rank = pool.run(_shares, paths, [0.75, 0.25], shuffle)
    each = 24 // len(by_rank)
    for batches in by_rank:
        assert max(abs(float((x < 0).sum()) - 0.25 * each) for x in batches) <= 1
    for step, batch in enumerate(expected):
        found = np.concatenate([batches[step] for batches in by_rank])
        np.testing.assert_array_equal(np.sort(found), np.sort(batch))


def _of_rank(comm: MPI.Intracomm, paths: list[str]) -> None:
    open_dataset(paths[min(comm.rank, len(paths) - 1)], comm=comm)


@pytest.mark.rank_counts(2, 3)
def test_ranks_that_are_given_different_paths_are_an_error(table: str, series: str, pool: Pool) -> None:
    outcomes = pool.outcomes(_of_rank, [table, series], timeout=60)
    assert all(isinstance(error, PartitionError) and "a.csv" in str(error) for error in outcomes)
    assert len({str(error) for error in outcomes}) == 1


def test_a_further_field_is_indexed_once_and_stored(
    tmp_path: Path, series: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matex_data.opening import indexing

    opened: list[Any] = []
    index_all = indexing._index_all
    monkeypatch.setattr(indexing, "_index_all", lambda *a, **k: opened.append(a) or index_all(*a, **k))
    for times in (2, 0):
        opened.clear()
        data = open_dataset(series, inputs="x", index=tmp_path / "a.matex", comm=SELF)
        for part in (data, *data.split(0.5, 0.5, stratify="time", seed=1)):
            assert sum(part.value_counts("time").values()) == len(part)
        assert len(opened) == times


def test_a_state_of_another_shuffle_resumes_with_the_next_epoch(series: str) -> None:
    data = open_dataset(series, inputs="x", comm=SELF)
    batches = data.batches(20, shuffle=True, seed=1)
    first, second = ([x.copy() for x in batches] for _ in range(2))
    state = batches.state(3)
    np.testing.assert_array_equal(next(iter(data.batches(20, shuffle=True, start=state))), first[3])
    old = {name: value for name, value in state.items() if name != "version"}
    with pytest.warns(UserWarning, match="resumes with epoch 1") as said:
        resumed = data.batches(20, shuffle=True, start=old)
    assert len(said) == 1
    np.testing.assert_array_equal(next(iter(resumed)), second[0])


def test_the_order_is_that_of_every_release(series: str) -> None:
    data = open_dataset(series, inputs="x", comm=SELF)
    x = next(iter(data.batches(8, shuffle="global", seed=1)))
    assert x.tolist() == ORDER


ORDER = [105.0, 4.0, 25.0, 180.0, 156.0, 126.0, 23.0, 9.0]
"""First samples of an order that a state of version 2 stands for."""


def _failing(comm: MPI.Intracomm, path: str) -> Any:
    data: Dataset = open_dataset(path, inputs="d", derive={"d": "6 // x"}, comm=comm)
    return data.load()


def test_an_integer_that_is_divided_by_zero_is_an_error(tmp_path: Path, pool: Pool) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(12)
    outcomes = pool.outcomes(_failing, str(tmp_path / "a.h5"), timeout=60)
    assert all(isinstance(error, FormatError) and "divided by others than 0" in str(error) for error in outcomes)


@pytest.mark.parametrize("then", ["nothing", "concat", "mix", "merge", "window", "map"])
def test_fields_are_made_of_filled_values_whatever_asks_for_them(then: str) -> None:
    data = open_dataset({"x": np.array([1.0, np.nan] * 4)}, inputs="x", missing=0.0, comm=SELF)
    other = open_dataset({"y": np.arange(8)}, comm=SELF)
    made = {
        "nothing": lambda: data,
        "concat": lambda: concat([data, data]),
        "mix": lambda: mix([data, data], weights=[0.5, 0.5]),
        "merge": lambda: merge(data, other, how="rows"),
        "window": lambda: data.window(1),
        "map": lambda: data.map(lambda arrays: arrays),
    }[then]()
    low = made.derive({"low": "max(x) < 0.5" if then == "window" else "x < 0.5"})
    half = len(made) // 2
    assert low.load()["low"].sum() == half
    assert low.value_counts("low") == {False: half, True: half}
    assert low.class_weights("low") == {False: 1.0, True: 1.0}
    assert len(low.where("low")) == half
    assert low.statistics("low").mean == 0.5
    assert made.statistics("x").missing == (0 if then == "map" else half)  # a function has got what is filled in


def test_computations_are_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    index = Computed.index
    monkeypatch.setattr(Computed, "index", lambda *given: (made.append(1), index(*given))[1])

    def count(fields: int) -> int:
        made.clear()
        arrays = {f"x{number}": [[1.0], [2.0, 3.0]] for number in range(fields)}
        derive = {f"y{number}": f"2 * sum(x{number})" for number in range(fields)}
        open_dataset(arrays, derive=derive, pad={"x*": 2}, comm=SELF)
        return len(made)

    assert count(3) == count(20)
    assert open_dataset({"x": np.arange(3)}, comm=SELF)._source.index.made is None  # nothing is computed
