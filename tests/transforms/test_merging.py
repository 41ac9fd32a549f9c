"""Merged data sets, compared with pandas: keys of other names, two keys, many samples to one, missing ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

import matex_data as md
from matex_data import FormatError, PartitionError
from matex_data.transforms.merging import Matches
from tests.support.ranks import Pool

RUNS, EVENTS = 9, 200
RNG = np.random.default_rng(3)
RUN = np.sort(RNG.integers(0, RUNS, EVENTS))
EVENT = RNG.permutation(EVENTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with events, conditions of most runs, and labels of most events."""
    folder = tmp_path_factory.mktemp("merging")
    with h5py.File(folder / "events.h5", "w") as file:
        file["run"], file["event"], file["x"] = RUN, EVENT, np.arange(EVENTS) * 0.5
    runs = RNG.permutation(RUNS)[:-2]
    names = [f"run {run}".encode() for run in runs]
    pd.DataFrame({"number": runs, "energy": runs * 10.0, "shots": runs + 100, "name": names}).to_parquet(
        folder / "runs.parquet"
    )
    kept = RNG.permutation(EVENTS)[:150]
    pd.DataFrame({"run": RUN[kept], "event": EVENT[kept], "label": kept % 3}).to_csv(folder / "labels.csv", index=False)
    return folder


def _tables(folder: Path) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    events = pd.DataFrame({"run": RUN, "event": EVENT, "x": np.arange(EVENTS) * 0.5})
    return events, pd.read_parquet(folder / "runs.parquet"), pd.read_csv(folder / "labels.csv")


def _runs(comm: Any, folder: Path, how: Any, in_memory: bool) -> Any:
    events = md.open_dataset(folder / "events.h5", comm=comm, inputs=["run", "x"], io="independent")
    table: Any = folder / "runs.parquet"
    if in_memory:
        frame = pd.read_parquet(table)
        table = {name: frame[name].to_numpy() for name in frame}
    runs = md.open_dataset(
        table, comm=comm, inputs=["energy", "shots", "name"], io="auto" if in_memory else "independent"
    )
    merged = md.merge(events, runs, left_on="run", right_on="number", how=how)
    return merged.load(), list(merged.batches(9, shuffle=True, seed=1))


@pytest.mark.rank_counts(3, slow=(1,))
@pytest.mark.parametrize(("how", "in_memory"), [("left", False), ("inner", True), ("inner", False)])
def test_many_events_have_the_conditions_of_one_run(pool: Pool, folder: Path, how: Any, in_memory: bool) -> None:
    events, runs, _ = _tables(folder)
    expected = events.merge(runs, left_on="run", right_on="number", how=how)
    loaded, batches = zip(*pool.run(_runs, folder, how, in_memory), strict=True)
    for name in ("run", "x", "energy", "shots"):
        np.testing.assert_array_equal(np.concatenate([part[name] for part in loaded]), expected[name], err_msg=name)
    names = np.concatenate([part["name"] for part in loaded])
    assert [name.decode() for name in names] == [
        n if isinstance(n, str) else n.decode() for n in expected["name"].fillna("")
    ]
    by_x = expected.set_index("x")
    for of_rank in batches:
        for batch in of_rank:
            np.testing.assert_array_equal(batch["shots"], by_x.loc[batch["x"], "shots"])


def _labels(comm: Any, folder: Path, how: Any) -> Any:
    events = md.open_dataset(folder / "events.h5", comm=comm, inputs="x", where="x < 90")
    labels = md.open_dataset(folder / "labels.csv", comm=comm, targets="label")
    merged = md.merge(events, labels, on=["run", "event"], how=how)
    train, test = merged.split(0.5, 0.5, seed=1)
    return [(part.load()["x"], part.load()["label"]) for part in (merged, train, test)]


@pytest.mark.rank_counts(3, slow=(1,))
@pytest.mark.parametrize("how", ["left", "inner"])
def test_keys_of_two_fields_and_what_lacks_a_counterpart(pool: Pool, folder: Path, how: Any) -> None:
    events, _, labels = _tables(folder)
    expected = events[events["x"] < 90].merge(labels, on=["run", "event"], how=how).set_index("x")["label"]
    by_rank = pool.run(_labels, folder, how)
    for number in range(3):
        x, label = (np.concatenate([of_rank[number][side] for of_rank in by_rank]) for side in (0, 1))
        np.testing.assert_array_equal(label, expected[x])
        assert len(x) == len(expected) if number == 0 else abs(len(x) - len(expected) / 2) <= 1


REFUSED = {
    "texts": ({"k": np.array(["1", "2"])}, {"k": np.array([1, 2])}, "never equal"),
    "unsigned": ({"k": np.array([2**63 + 100], np.uint64)}, {"k": np.array([2.0**63])}, "compared exactly"),
    "signed": ({"k": np.array([2**63 + 100], np.uint64)}, {"k": np.array([-1])}, "compared exactly"),
    "float32": ({"k": np.array([2**24])}, {"k": np.array([2**24 + 1], "f4")}, r"compared exactly.*2\*\*24"),
    "float32 and float64": ({"k": np.array([2.0**24])}, {"k": np.array([2**24 + 1], "f4")}, "compared exactly"),
    "twice": ({"k": np.array([1, 2])}, {"k": np.array([2, 2])}, "twice in the second"),
    "no float": ({"k": np.array([1, 2])}, {"k": np.array([2]), "b": np.array([2**62 + 1])}, "not exact as float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_values_that_could_match_wrongly_are_an_error(case: str) -> None:
    first, second, message = REFUSED[case]
    sets = [md.open_dataset({**first, "a": np.arange(len(first["k"]))}, comm=MPI.COMM_SELF)]
    extra = {"b": np.arange(len(second["k"])), **second}
    sets.append(md.open_dataset(extra, comm=MPI.COMM_SELF))
    with pytest.raises(md.DataError, match=f"(?s){message}"):
        md.merge(sets[0], sets[1], on="k", how="left").load()


def _by_name(comm: Any, folder: Path, dtypes: list[dict[str, str]], how: Any) -> Any:
    events, names = (
        md.open_dataset(folder / f"{name}.csv", comm=comm, inputs=value, dtype=dtype)
        for name, value, dtype in zip(("shots", "names"), ("x", "z"), dtypes, strict=True)
    )
    return md.merge(events, names, on="name", how=how).load()


@pytest.mark.rank_counts(1, 3, slow=(2,))
@pytest.mark.parametrize("dtypes", [[{}, {}], [{"name": "category"}] * 2, [{"name": "category"}, {}]])
@pytest.mark.parametrize("how", ["left", "inner"])
def test_categories_are_equal_as_texts_and_a_missing_key_has_no_counterpart(
    pool: Pool, tmp_path: Path, dtypes: list[dict[str, str]], how: Any
) -> None:
    shots = pd.DataFrame({"name": [*"abcdab", None, *"dcb"], "x": np.arange(10.0)})
    names = pd.DataFrame({"name": [*"bda"], "z": [1.0, 2.0, 3.0]})  # other codes than those of the shots
    shots.to_csv(tmp_path / "shots.csv", index=False)
    names.to_csv(tmp_path / "names.csv", index=False)
    expected = shots.merge(names, on="name", how=how)
    parts = pool.run(_by_name, tmp_path, dtypes, how)
    for name in ("x", "z"):
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), expected[name])


def test_truth_values_are_keys() -> None:
    first = md.open_dataset({"k": np.array([True, False, True]), "x": np.arange(3)}, comm=MPI.COMM_SELF)
    second = md.open_dataset({"k": np.array([False, True]), "z": np.array([5, 6])}, comm=MPI.COMM_SELF)
    assert md.merge(first, second, on="k", how="left").load()["z"].tolist() == [6, 5, 6]


@pytest.mark.parametrize("missing", ["mask", 5, {"x": 5}])
def test_integers_that_were_missing_count_as_missing(missing: Any) -> None:
    first = md.open_dataset({"k": np.arange(1, 4)}, comm=MPI.COMM_SELF)
    table = pd.DataFrame({"k": [1, 2, 9], "x": pd.array([7, None, 2**60 + 1], "Int64")})
    second = md.open_dataset(table, missing=missing, comm=MPI.COMM_SELF)
    merged = md.merge(first, second, on="k", how="left")
    found, statistics = merged.load(), merged.statistics("x")
    np.testing.assert_array_equal(found["x"], [7, 0 if missing == "mask" else 5, np.nan])
    assert (statistics.count, statistics.missing, statistics.max) == (1, 2, 7)
    assert merged.derive({"twice": "2 * x"}).load()["twice"][0] == 14
    if missing == "mask":
        assert found["x_mask"].dtype == bool and found["x_mask"].tolist() == [True, False, False]


@pytest.mark.parametrize("how", ["exact", "inner", "left", "rows"])
def test_fields_that_cannot_be_missing_are_merged_where_each_sample_has_a_counterpart(how: Any) -> None:
    both = {"u": np.arange(6, dtype="u1").reshape(3, 2), "s": np.array([(1, 0.5), (2, 1.5), (3, 2.5)], "i4,f8")}
    first = md.open_dataset({"k": np.arange(3)}, comm=MPI.COMM_SELF)
    second = md.open_dataset({"k": np.arange(3), **both}, comm=MPI.COMM_SELF, inputs=list(both))
    merged = md.merge(first, second, on=None if how == "rows" else "k", how=how).load()
    for name, expected in both.items():
        assert merged[name].dtype == expected.dtype
        np.testing.assert_array_equal(merged[name], expected)


@pytest.mark.parametrize("keys", [{}, {"on": "k", "left_on": "k"}, {"left_on": ["a", "b"], "right_on": "a"}])
def test_keys_that_are_not_clear_are_an_error(keys: dict[str, Any]) -> None:
    data = md.open_dataset({"k": np.arange(3)}, comm=MPI.COMM_SELF)
    with pytest.raises(md.PartitionError, match="not clear"):
        md.merge(data, data, **keys)


def test_integers_of_two_kinds_are_equal_exactly() -> None:
    large = 2**62 + np.arange(4)
    first = md.open_dataset({"k": large.astype(np.uint64)}, comm=MPI.COMM_SELF)
    second = md.open_dataset({"k": large[[2, 0]], "b": np.array([5, 6])}, comm=MPI.COMM_SELF, inputs="b")
    merged = md.merge(first, second, on="k", how="inner").load()
    assert merged["b"].tolist() == [6, 5]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), max_size=30), st.integers(1, 4), st.data())
def test_runs_of_pairs_are_the_pairs(steps: list[tuple[int, int]], parts: int, data: st.DataObject) -> None:
    first = np.cumsum([step for step, _ in steps]).astype(np.int64)
    second = np.array([number for _, number in steps], np.int64)
    edges = sorted(data.draw(st.lists(st.integers(0, len(first)), min_size=parts - 1, max_size=parts - 1)))
    divided = zip(np.split(first, edges), np.split(second, edges), strict=True)
    pairs = Matches.joined([Matches.of(*part) for part in divided])
    expected = np.full(int(first[-1] if len(first) else 0) + 3, -1)
    expected[first] = second
    np.testing.assert_array_equal(pairs.counterparts(np.arange(len(expected))), expected)
    low, high = sorted(data.draw(st.tuples(st.integers(0, len(expected)), st.integers(0, len(expected)))))
    np.testing.assert_array_equal(pairs.of_rows(low, high).counterparts(np.arange(high - low)), expected[low:high])


def _by_rows(comm: Any, folder: Path, kind: str) -> Any:
    events = md.open_dataset(folder / "events.parquet", inputs=["x", "run"], comm=comm)
    scores = md.open_dataset(folder / "scores.npy", comm=comm)
    if kind == "chosen":
        events, scores = (data.split(0.6, 0.4, seed=3)[0] for data in (events, scores))
    merged = md.merge(events, scores, how="rows")
    batches = list(merged.batches(12, shuffle=True, seed=1, remainder="keep"))
    return merged.load(), batches, [data.load() for data in (events, scores)]


@pytest.mark.rank_counts(1, 2, 3)
@pytest.mark.parametrize("kind", ["all", "chosen"])
def test_rows_of_two_files_belong_together(pool: Pool, tmp_path: Path, kind: str) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"x": np.arange(101.0), "run": rng.integers(0, 3, 101)})
    frame.to_parquet(tmp_path / "events.parquet", row_group_size=17)
    scores = rng.normal(size=(101, 2))
    np.save(tmp_path / "scores.npy", scores)
    answers = pool.run(_by_rows, tmp_path, kind, timeout=60)
    name = next(name for name in answers[0][0] if name not in ("x", "run"))
    rows = {part: np.concatenate([answer[0][part] for answer in answers]) for part in ("x", "run", name)}
    assert len(rows["x"]) == (101 if kind == "all" else 61)
    of_batches = {part: np.concatenate([b[part] for answer in answers for b in answer[1]]) for part in rows}
    assert sorted(of_batches["x"]) == sorted(rows["x"])
    for found in (rows, of_batches):
        at = found["x"].astype(int)
        np.testing.assert_array_equal(found["run"], frame["run"].to_numpy()[at])
        np.testing.assert_array_equal(found[name], scores[at])


def test_rows_that_cannot_belong_together_are_an_error() -> None:
    first, second = md.open_dataset({"x": np.arange(5)}), md.open_dataset({"y": np.arange(6)})
    with pytest.raises(FormatError, match=r"differ in length[\s\S]*5 samples[\s\S]*6 in the second"):
        md.merge(first, second, how="rows")
    with pytest.raises(PartitionError, match=r"none of them with how=\"rows\""):
        md.merge(first, first, on="x", how="rows")
    with pytest.raises(PartitionError, match="takes no how="):
        md.merge(first, second, how="row")  # type: ignore[arg-type]


DAYS = 20000 + np.arange(8) / 1440
"""Minutes, in days since 1970."""
TIMES: dict[str, Any] = {
    "minutes in days": ((DAYS, "days since 1970-01-01"), (DAYS[::2], "days since 1970-01-01"), [0, 2, 4, 6]),
    "hours and days": ((np.arange(72), "hours since 1970-01-01"), (np.arange(3), "days since 1970-01-01"), [0, 24, 48]),
    "another origin": ((np.arange(9), "days since 1970-01-01"), (np.arange(2), "days since 1970-01-05"), [4, 5]),
    "units of one": ((DAYS, "days since 1970-01-01"), (DAYS[1::4], ""), [1, 5]),
    "no time": ((DAYS, "m"), (DAYS[1::4] + 1e-9, "m"), []),
    "large": ((2**62 + np.arange(3), "ns since 1900-01-01"), (2**62 + np.arange(1, 3), "ns since 1900-01-01"), [1, 2]),
}


def _time(path: Path, times: Any, **attributes: str) -> md.Dataset:
    with h5py.File(path, "w") as file:
        file["time"], file[path.stem] = times, np.arange(len(times))
        file["time"].attrs.update(attributes)
    return md.open_dataset(path, inputs=path.stem, comm=MPI.COMM_SELF)


@pytest.mark.parametrize("case", TIMES)
def test_times_are_equal_to_a_millisecond_in_any_units(tmp_path: Path, case: str) -> None:
    (times, units), (others, of_others), pairs = TIMES[case]
    first, second = _time(tmp_path / "a.h5", times, units=units), _time(tmp_path / "b.h5", others, units=of_others)
    if pairs:
        found = md.merge(first, second, on="time", how="inner").load()
        assert (found["a"].tolist(), found["b"].tolist()) == (pairs, list(range(len(pairs))))
    else:
        with pytest.raises(PartitionError, match="no values of the data sets are equal"):
            md.merge(first, second, on="time", how="inner")


@pytest.mark.parametrize(
    ("units", "calendar", "found"),
    [
        ("days since 2000-01-01", "noleap", "'standard'.*'noleap'"),
        ("months since 2000-01-01", "standard", "'days since 2000-01-01'.*'months since"),
        ("days since 2000-01-01", "proleptic_gregorian", ""),
    ],
)
def test_times_of_two_calendars_are_never_equal(tmp_path: Path, units: str, calendar: str, found: str) -> None:
    days = np.arange(400.0)
    first = _time(tmp_path / "a.h5", days, units="days since 2000-01-01", calendar="standard")
    second = _time(tmp_path / "b.h5", days, units=units, calendar=calendar)
    if found:
        with pytest.raises(FormatError, match=f"cannot be compared[\\s\\S]*{found}"):
            md.merge(first, second, on="time")
    else:
        assert len(md.merge(first, second, on="time")) == 400
