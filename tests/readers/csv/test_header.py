"""Headers: tables as pandas and NumPy write them are read with all their rows and no other, or not at all."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mpi4py import MPI

from matex_data import FormatError, open_dataset
from tests.support.ranks import Pool

RNG = np.random.default_rng(0)
FLOATS, WHOLE = RNG.normal(size=(30, 4)), RNG.integers(0, 256, (30, 4))
YEARS = [2018, 2019, 2020, 2021]
LENGTHS = [400.0, 412.5, 431.0, 460.2]  # wavelengths
LETTERS = ["a", "b", "c", "d"] * 7 + ["e", "f"]
NAMES = [f"name {i}" for i in range(30)]

Table = tuple[pd.DataFrame, dict[str, Any]]
NAMED: dict[str, Table] = {
    "floats": (pd.DataFrame(FLOATS), {}),
    "whole numbers": (pd.DataFrame(WHOLE), {}),
    "floats without index": (pd.DataFrame(FLOATS), {"index": False}),
    "sampled rows": (pd.DataFrame(WHOLE).sample(frac=0.5, random_state=1), {}),
    "one column": (pd.DataFrame(WHOLE[:, :1]), {}),
    "years": (pd.DataFrame(FLOATS, columns=YEARS), {}),
    "years of countries": (pd.DataFrame(FLOATS, NAMES, YEARS), {}),
    "years of named countries": (pd.DataFrame(FLOATS, pd.Index(NAMES, name="country"), YEARS), {}),
    "years without index": (pd.DataFrame(FLOATS, columns=YEARS), {"index": False}),
    "years above whole numbers": (pd.DataFrame(WHOLE, columns=YEARS), {"index": False}),
    "years of names": (pd.DataFrame(WHOLE, pd.Index(NAMES, name="country"), YEARS), {}),
    "wavelengths": (pd.DataFrame(abs(FLOATS), columns=LENGTHS), {}),
    "wavelengths in micrometres": (pd.DataFrame(abs(FLOATS), columns=[0.4, 0.5, 0.61, 0.9]), {}),
    "pixels": (pd.DataFrame(RNG.integers(0, 256, (30, 64))), {"index": False}),
    "a class beside": (pd.concat([pd.DataFrame(FLOATS), pd.Series(WHOLE[:, 0])], axis=1), {}),
    "texts": (pd.DataFrame({0: NAMES, 1: LETTERS}), {"index": False}),
    "dates": (pd.DataFrame(FLOATS, columns=pd.date_range("2020-01-01", periods=4).astype(str)), {"index": False}),
    "dates below": (pd.DataFrame({0: pd.date_range("2020-01-01", periods=30), 1: WHOLE[:, 0]}), {"index": False}),
    "zeros kept": (pd.DataFrame(np.round(FLOATS[:, :2] * 2) / 2), {"index": False}),
    "decimal comma": (pd.DataFrame(FLOATS), {"sep": ";", "decimal": ","}),
    "whole numbers without index": (pd.DataFrame(WHOLE), {"index": False}),
    "two columns": (pd.DataFrame(FLOATS[:, :2]), {"index": False}),
    "one column without index": (pd.DataFrame(WHOLE[:, :1]), {"index": False}),
    "a single record": (pd.DataFrame(FLOATS[:1]), {}),
    "missing numbers": (pd.DataFrame(np.where(FLOATS > 1, np.nan, FLOATS)), {}),
}
"""Tables, and options of ``to_csv``, whose numbers, years and lengths name the columns."""

OPEN: dict[str, Table] = {
    "many wavelengths": (pd.DataFrame(RNG.random((30, 50)), columns=np.linspace(400, 800, 50)), {"index": False}),
    "few wavelengths": (pd.DataFrame(FLOATS, columns=LENGTHS), {"index": False}),
    "wavelengths among values": (pd.DataFrame(RNG.random((30, 12)), columns=np.arange(1, 13) / 16), {"index": False}),
}
"""Tables whose first record rises, and the next one does not."""

VALUES: dict[str, tuple[Any, dict[str, Any]]] = {
    "default format": (FLOATS, {}),
    "rounded": (FLOATS, {"fmt": "%.2f"}),
    "shortest": (FLOATS, {"fmt": "%g"}),
    "one column": (FLOATS[:, 0], {}),
    "a curve": (np.stack([np.arange(30) * 0.1, np.cos(np.arange(30) * 0.1)], axis=1), {"fmt": "%.3f"}),
    "numbered": (np.concatenate([np.arange(5, 35)[:, None], WHOLE], axis=1), {"fmt": "%d"}),
    "classes": (WHOLE % 2, {"fmt": "%d"}),
    "times": (np.stack([1e9 + 60 * np.arange(30), WHOLE[:, 0]], axis=1), {"fmt": "%d"}),
}
"""Arrays, and options of ``savetxt``."""


def _write(path: Path, table: Table) -> int:
    frame, options = table
    frame.to_csv(path, **options)
    return len(frame)


@pytest.mark.parametrize("kind", NAMED)
def test_numbers_name_the_columns(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "table.csv"
    rows = _write(path, NAMED[kind])
    dialect = {name: value for name, value in NAMED[kind][1].items() if name != "index"}
    data, expected = open_dataset(path, comm=MPI.COMM_SELF, **dialect), pd.read_csv(path, **dialect)
    assert len(data) == rows == len(expected)
    assert list(data.schema) == [str(name) for name in expected.columns]
    loaded = data.load()
    for name in expected.select_dtypes("number"):
        np.testing.assert_array_equal(loaded[str(name)], expected[name].to_numpy(float))


@pytest.mark.parametrize("kind", OPEN)
def test_what_stays_open_is_an_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "table.csv"
    rows = _write(path, OPEN[kind])
    with pytest.raises(FormatError, match=r"first record(.|\n)*table\.csv(.|\n)*header=0(.|\n)*header=None"):
        open_dataset(path, comm=MPI.COMM_SELF)
    assert len(open_dataset(path, comm=MPI.COMM_SELF, header=0)) == rows
    assert len(open_dataset(path, comm=MPI.COMM_SELF, header=None)) == rows + 1


@pytest.mark.parametrize("kind", VALUES)
def test_values_are_values(tmp_path: Path, kind: str) -> None:
    values, options = VALUES[kind]
    path = tmp_path / "table.csv"
    np.savetxt(path, values, delimiter=",", **options)
    with pytest.warns(UserWarning, match=r"the first record(.|\n)*is a sample"):
        loaded = open_dataset(path, comm=MPI.COMM_SELF).load()
    expected = np.loadtxt(path, delimiter=",", ndmin=2)
    np.testing.assert_array_equal(np.stack(list(loaded.values()), axis=1), expected)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("Bob,15,17\nAnn,20,20\nBob,3,7\n", None),
        ("Bob,17,15\nAnn,20,20\nBob,3,7\n", False),
        ("5.1,3.5,setosa\n4.9,3.0,setosa\n", False),
        ("2020-01-01,5\n2020-01-02,7\n", False),
        ("True,0.5\nFalse,0.7\n", False),
        ("7,,3\n8,4,5\n", False),
        ("# x y\n1 2\n3 4\n", False),
        (",2019,2020\nBob,5,7\nAnn,6,8\n", True),
        ('"1" "2"\n"a" 5 7\n"b" 6 8\n', True),
        ("1,2\n", False),
        ("Bob,15,17\nAnn,20,20\n", None),
        (",1.25,0.5\nBob,1.5,0.25\nAnn,1.75,0.75\n", True),
        ("1,2\n3,4\n", False),
        ("0,1\n0.1,0.9\n0.2,0.8\n", True),
        ("2,0,3\n1,5,4\n", False),
    ],
)
def test_texts_and_missing_cells(tmp_path: Path, text: str, named: bool | None) -> None:
    path = tmp_path / "table.csv"
    path.write_text(text)
    if named is None:
        with pytest.raises(FormatError, match=r"header=0(.|\n)*header=None"):
            open_dataset(path, comm=MPI.COMM_SELF)
    else:
        records = sum(not line.startswith("#") for line in text.splitlines())
        assert len(open_dataset(path, comm=MPI.COMM_SELF)) == records - named


def _fails(comm: MPI.Intracomm, path: str) -> str:
    with pytest.raises(FormatError) as caught:
        open_dataset(path, comm=comm)
    return str(caught.value)


def test_every_rank_raises_the_error(pool: Pool, tmp_path: Path) -> None:
    for number in range(2):
        _write(tmp_path / f"{number}.csv", OPEN["few wavelengths"])
    texts = pool.run(_fails, str(tmp_path / "*.csv"))
    assert len(set(texts)) == 1 and "0.csv" in texts[0]


def _said(comm: MPI.Intracomm, path: str) -> tuple[int, int]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = open_dataset(path, comm=comm)
    return len(data), sum("is a sample" in str(warning.message) for warning in caught)


def test_all_files_follow_the_first_one(pool: Pool, tmp_path: Path) -> None:
    """Read files without names as NumPy writes them, although some of them could begin with names."""
    for number, begin in enumerate(([5, 3], [0, 1], [2018, 2019], [7, 7])):
        values = np.array([begin, [4, 2], [9, 1]])
        np.savetxt(tmp_path / f"{number}.csv", values, delimiter=",", fmt="%d")
    by_rank = pool.run(_said, str(tmp_path / "*.csv"))
    assert [rows for rows, _ in by_rank] == [12] * pool.size
    assert [said for _, said in by_rank] == [1] + [0] * (pool.size - 1)
