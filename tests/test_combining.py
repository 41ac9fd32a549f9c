"""Data sets made of several: compared with NumPy and xarray."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from mpi4py import MPI
from PIL import Image

from matex_data import DataError, Dataset, FormatError, concat, merge, mix, open_dataset
from tests.support.ranks import Pool

ROWS = (300, 120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write two data sets, of two contiguous files and of a chunked one, whose numbers differ."""
    folder = tmp_path_factory.mktemp("several")
    numbers = np.arange(sum(ROWS)).astype("f4")
    for path, part in (("a/0.h5", numbers[:200]), ("a/1.h5", numbers[200:300]), ("b/0.h5", numbers[300:])):
        (folder / path).parent.mkdir(exist_ok=True)
        with h5py.File(folder / path, "w") as file:
            chunks = (16, 2) if path[0] == "b" else None
            file.create_dataset("x", data=part[:, None] + [0, 0.5], chunks=chunks)
            file["label"] = (part % 4).astype("i4")
    return str(folder)


def _both(comm: MPI.Intracomm, folder: str, **options: Any) -> list[Dataset]:
    return [open_dataset(f"{folder}/{name}", inputs="x", targets="label", comm=comm, **options) for name in "ab"]


def _joined(comm: MPI.Intracomm, folder: str, kind: str) -> Dataset:
    if kind == "concat":
        return concat(_both(comm, folder))
    return mix(_both(comm, folder), weights=[0.7, 0.3], seed=1, stop=kind)


def _epochs(comm: MPI.Intracomm, folder: str, kind: str, shuffle: Any, start: Any, part: int | None = None) -> Any:
    """Return the numbers of this rank's samples in each batch of two epochs."""
    data = _joined(comm, folder, kind)
    if part is not None:
        data = data.split(0.75, 0.25, seed=5, stratify="label")[part]
    batches = data.batches(60, shuffle=shuffle, seed=2, start=start)
    found = [x[:, 0].copy() for _ in range(2) for x, _ in batches]
    return found, batches.state(2)


@pytest.mark.parametrize("kind", ["concat", "first", "longest"])
@pytest.mark.parametrize("shuffle", [False, True, "global"])
def test_every_number_of_ranks_has_the_batches_also_resumed(folder: str, pool: Pool, kind: str, shuffle: Any) -> None:
    expected, state = _epochs(MPI.COMM_SELF, folder, kind, shuffle, None)
    by_rank = pool.run(_epochs, folder, kind, shuffle, state)
    for number, batch in enumerate(expected[2:]):
        found = np.concatenate([batches[number] for batches, _ in by_rank])
        np.testing.assert_array_equal(np.sort(found), np.sort(batch))
    if shuffle is True:
        expected, _ = _epochs(MPI.COMM_SELF, folder, kind, True, None, 0)
        by_rank = pool.run(_epochs, folder, kind, True, None, 0)
        for number, batch in enumerate(expected):
            found = np.concatenate([batches[number] for batches, _ in by_rank])
            np.testing.assert_array_equal(np.sort(found), np.sort(batch))


@pytest.mark.parametrize("shuffle", [False, True, "global"])
def test_shares_of_a_mixture(folder: str, shuffle: Any) -> None:
    data = _joined(MPI.COMM_SELF, folder, "first")
    assert sum(len(y) for _, y in data.batches(60, shuffle=shuffle, seed=2)) == 6 * 60
    rows_of_a, rows_of_b = (300, 120) if shuffle == "global" else (6 * 42, 6 * 18)  # of all samples, which are kept
    most = 20 * rows_of_a + 8 * 16 * 16 + 4 * 120  # of b all eight chunks, the last of which is not full
    assert 20 * (rows_of_a + rows_of_b) <= data.profile.bytes <= most
    first, _ = _epochs(MPI.COMM_SELF, folder, "first", shuffle, None)
    assert len(first) == 2 * (120 // 18) and all((batch >= 300).sum() == 18 for batch in first)
    if shuffle:  # the longer one goes on in the second epoch
        of_a = np.concatenate([batch[batch < 300] for batch in first])[: 7 * 42]
        assert len(set(of_a.tolist())) == 7 * 42
    longest, _ = _epochs(MPI.COMM_SELF, folder, "longest", shuffle, None)
    assert len(longest) == 2 * (300 // 42) and all((batch >= 300).sum() == 18 for batch in longest)
    of_a = np.concatenate([batch[batch < 300] for batch in longest[:7]])
    of_b = np.concatenate([batch[batch >= 300] for batch in longest[:7]])
    assert len(set(of_a.tolist())) == 7 * 42 and len(set(of_b[: 6 * 18].tolist())) == 6 * 18
    if shuffle:
        assert of_a.tolist() != sorted(of_a.tolist())


def test_concatenated_data_are_one_data_set(folder: str) -> None:
    data = _joined(MPI.COMM_SELF, folder, "concat")
    np.testing.assert_array_equal(data.load()["x"][:, 0], np.arange(420))
    assert data.statistics("x").mean == pytest.approx(np.arange(420).mean() + 0.25)
    low, high = (
        open_dataset(f"{folder}/{n}", inputs="x", where=w, comm=MPI.COMM_SELF)
        for n, w in zip("ab", ("label<2", "label==3"), strict=True)
    )
    chosen = np.arange(420)
    chosen = chosen[np.where(chosen < 300, chosen % 4 < 2, chosen % 4 == 3)]
    np.testing.assert_array_equal(concat([low, high]).load()["x"][:, 0], chosen)
    groups = [part.load()["x"][:, 0] % 4 for part in concat([low, high]).split(0.5, 0.5, groups="label")]
    assert not set(groups[0]) & set(groups[1])
    assert data.read_plan(30, ranks=2).steps == 14


@pytest.fixture(scope="module")
def variables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write one variable a folder: yearly files of one, monthly files of the other, which begins later."""
    folder, rng = tmp_path_factory.mktemp("variables"), np.random.default_rng(0)
    time = pd.date_range("2010-01-01", "2011-12-31", freq="D")
    data = xr.Dataset({"z": (("time", "lat"), rng.normal(size=(len(time), 3)))}, coords={"time": time})
    data["t"] = ("time", rng.normal(size=len(time)))
    # Contiguous, so that bytes can be counted; a chunk of an unlimited dimension has 512 rows.
    for name, key, part in (
        ("z", "time.year", data[["z"]]),
        ("t", "time.month", data[["t"]].isel(time=slice(40, 300))),
    ):
        (folder / name).mkdir()
        for number, group in part.groupby(key):
            units = "hours since 1900-01-01" if name == "z" else "days since 2000-01-01"
            group.to_netcdf(folder / name / f"{number}.nc", encoding={"time": {"units": units}})
    data.to_netcdf(folder / "all.nc")
    return folder


def _merged(comm: MPI.Intracomm, folder: Path, shuffle: Any, start: Any = None) -> list[Any]:
    z = open_dataset(str(folder / "z"), inputs="z", comm=comm)
    t = open_dataset(str(folder / "t"), targets="t", comm=comm)
    data = merge(z, t, on="time", how="inner")
    batches = data.batches(24, shuffle=shuffle, seed=1, remainder="keep", start=start)
    found = [(x.copy(), y.copy()) for x, y in batches]
    return [data.load(), found, data.profile.bytes, batches.state(4)]


@pytest.mark.parametrize("shuffle", [False, True, "global"])
def test_merged_variables_are_those_of_xarray(variables: Path, pool: Pool, shuffle: Any) -> None:
    expected = xr.load_dataset(variables / "all.nc").isel(time=slice(40, 300))
    by_rank = pool.run(_merged, variables, shuffle)
    for name in ("z", "t"):
        found = np.concatenate([loaded[name] for loaded, *_ in by_rank])
        np.testing.assert_array_equal(found, expected[name].values)
    target = dict(zip(expected.z.values[:, 0].tolist(), expected.t.values.tolist(), strict=True))
    pairs = [(x, y) for _, batches, *_ in by_rank for xs, ys in batches for x, y in zip(xs, ys, strict=True)]
    assert len(pairs) == 260 and all(target[float(x[0])] == y for x, y in pairs)
    needed = 2 * 260 * (3 + 1) * 8  # of the batches, and of load
    assert needed <= sum(nbytes for _, _, nbytes, _ in by_rank) <= 1.01 * needed  # gaps of up to 1 % are read as well
    _, batches, _, state = _merged(MPI.COMM_SELF, variables, shuffle)
    resumed = pool.run(_merged, variables, shuffle, state)
    for step, (_, y) in enumerate(batches[4:]):
        found = np.concatenate([of_rank[step][1] for _, of_rank, *_ in resumed])
        np.testing.assert_array_equal(np.sort(found), np.sort(y))


def _errors(comm: MPI.Intracomm, folder: str, variables: Path) -> list[str]:
    a, b = _both(comm, folder)
    plain = open_dataset(f"{folder}/b", inputs="label", comm=comm)
    z = open_dataset(str(variables / "z"), inputs="z", comm=comm)
    t = open_dataset(str(variables / "t"), inputs="t", comm=comm)
    attempts = [
        lambda: concat([a, plain]),
        lambda: concat([z, t]),
        lambda: mix([a, b], weights=[0.7, 0.7]),
        lambda: mix([a, b], weights=[0.5, 0.5], stop="never"),
        lambda: mix([a, b], weights=[0.99, 0.01]).batches(12),
        lambda: mix([a, b], weights=[0.5, 0.5]).batches(12, remainder="keep"),
        lambda: concat([mix([a, b], weights=[0.5, 0.5]), a]),
        lambda: merge(z, t, on="time"),
        lambda: merge(z, t, on="times"),
        lambda: merge(a, b, on="label"),
        lambda: merge(z, z, on="time"),
    ]
    found = []
    for attempt in attempts:
        with pytest.raises(DataError) as caught:
            attempt()
        found.append(str(caught.value))
    return found


def test_every_rank_raises_the_errors(folder: str, variables: Path, pool: Pool) -> None:
    by_rank = pool.run(_errors, folder, variables)
    assert by_rank == [by_rank[0]] * pool.size
    expected = ("same fields", "same fields", "sum is 1", "stop=", "no sample of", "remainder=", "cannot be combined")
    for text, part in zip(by_rank[0], (*expected, "in length", "times", "in length", "of this name"), strict=True):
        assert part in text


@pytest.mark.parametrize("kind", ["category", "one_hot", "folders"])
def test_codes_of_different_categories_are_not_concatenated(tmp_path: Path, kind: str) -> None:
    parts = []
    for number, names in enumerate((["a", "b"], ["b", "z"])):
        path = tmp_path / f"{number}.csv"
        path.write_text("\n".join(["name,x", *(f"{name},{number}" for name in names)]) + "\n")
        options: Any = {"one_hot": "name"} if kind == "one_hot" else {"dtype": {"name": "category"}}
        if kind == "folders":
            path, options = tmp_path / str(number), {"inputs": "image", "targets": "label"}
            for name in names:
                (path / name).mkdir(parents=True)
                Image.new("L", (4, 4), number).save(path / name / "0.png")
        parts.append(open_dataset(path, comm=MPI.COMM_SELF, **options))
    for combine in (concat, functools.partial(mix, weights=[0.5, 0.5], seed=1)):
        with pytest.raises(FormatError, match=r"(?s)agree on .*expected: .'a', 'b'.*found: .'b', 'z'"):
            combine(parts)
    assert len(concat([parts[0], parts[0]])) == 4


def test_lists_with_padding_are_not_joined_to_arrays() -> None:
    lists = open_dataset({"x": [np.arange(2.0), np.ones(1)]}, inputs="x", pad={"x": 3}, comm=MPI.COMM_SELF)
    arrays = open_dataset({"x": np.ones((2, 3))}, inputs="x", comm=MPI.COMM_SELF)
    with pytest.raises(FormatError, match=r"(?s)made a field of different ones.*ragged.*float64 of shape \(3,\)"):
        concat([lists, arrays])
    assert concat([lists, lists]).value_counts("x") == {1.0: 4, 0.0: 2}


@pytest.mark.parametrize("units", [("K", "degC"), ("K", None)])
@pytest.mark.parametrize("kind", ["files", "concat", "memory"])
def test_numbers_in_different_units_are_not_joined(tmp_path: Path, kind: str, units: tuple[str, str | None]) -> None:
    paths, sets = [], []
    for number, unit in enumerate(units):
        attributes = {} if unit is None else {"units": unit}
        paths.append(tmp_path / f"{number}.h5")
        with h5py.File(paths[-1], "w") as file:
            file["t"] = np.arange(3.0)
            file["t"].attrs.update(attributes)
        sets.append(open_dataset(paths[-1], comm=MPI.COMM_SELF))
        if kind == "memory":
            sets[-1] = open_dataset(xr.Dataset({"t": ("x", np.arange(3.0), attributes)}), comm=MPI.COMM_SELF)

    def joined() -> Any:
        return open_dataset(paths, comm=MPI.COMM_SELF) if kind == "files" else concat(sets)

    if units[1] is None:
        assert len(joined()) == 6 and joined().schema["t"].attributes["units"] == "K"
    else:
        with pytest.raises(FormatError, match=r"(?s)do not agree on 'units' of 't'.*expected: K,.*found: degC"):
            joined()
