"""Every text table of the corpus, on 1 to 7 ranks, against the rows of pandas with the same dialect."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from mpi4py import MPI

from matex_data import DataError, open_dataset
from matex_data.fields import EPOCH
from matex_data.readers.csv import reader as csv_reader
from matex_data.readers.csv import records
from matex_data.readers.text import scan as text_scan
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.ranks import Pools

pytestmark = needs_corpus

DIALECTS: dict[str, dict[str, Any]] = {
    "1206FUT.txt": {"sep": "\t"},
    "ch11b.dat.from_bgz": {"sep": r"\s+", "header": None},
    "fread_line_error.csv": {"header": None},
    "gb18030.txt": {"encoding": "gb18030"},
    "issue_1113_fread.txt": {"sep": r"\s+"},
    "issue_1330_fread.txt": {"sep": "\t"},
    "issue_1462_fread_quotes.txt": {"sep": "\t", "header": None},
    "issue_773_fread.txt": {"sep": "|"},
    "quoted_no_header.csv": {"header": None},
    "russellCRLF.csv": {"encoding": "cp1252"},
    "Bx_3d.txt": {"header": None},
    "StarWars.csv": {"encoding": "cp1252"},
    "realDonaldTrump.csv": {"encoding": "iso8859-1"},
    "binary.train": {"sep": "\t", "header": None},
    "multiclass.train": {"sep": "\t", "header": None},
    "comments1.csv": {"comment": "#"},
    "diabetes_data_raw.csv.gz": {"sep": r"\s+", "header": None},
    "linnerud_exercise.csv": {"sep": r"\s+"},
    "linnerud_physiological.csv": {"sep": r"\s+"},
    "fillheader.csv": {"index_col": False},
    "wine_data.csv": {"header": None, "skiprows": 1},
    "SA2-by-DJZ.csv": {"skiprows": 7, "header": None, "names": list("abcd")},
    "noquote.csv": {"skiprows": 1, "header": None},
}
"""Options that pandas needs; the reader detects those that are not in ``GIVEN``."""

GIVEN = {
    "gb18030.txt": ("encoding",),
    "wine_data.csv": ("skiprows",),
    "SA2-by-DJZ.csv": ("skiprows", "names"),
    "noquote.csv": ("skiprows",),
}
BROKEN = {
    "issue_3400_fread.txt": "NUL byte in line 5, column 1",
    "ragged-long.csv": "line 3 has too many fields, column 4",
    "SA2-by-DJZ.csv": "line 8 has too many fields, column 2",
    "noquote.csv": "line 2 has too many fields, column 4",
    "wine_data.csv": "line 2 has too many fields, column 6",
}
"""Files that need an option, or cannot be read, and the error without it."""


def _files() -> list[Path]:
    return [path for path in sorted(CORPUS.glob("csv/*/*")) if path.suffix != ".json"]


def _expected(path: Path) -> pd.DataFrame:
    options = {"index_col": False, **DIALECTS.get(path.name, {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pd.read_csv(path, float_precision="round_trip", **options)


@contextmanager
def _all_large(small: bool) -> Iterator[None]:
    """Make all ranks scan and sample every file, in small reads."""
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(csv_reader, "SMALL_BYTES", 1)
            patch.setattr(csv_reader, "HEAD_BYTES", 1 << 16)
            patch.setattr(text_scan, "READ_BYTES", 20_000)
            patch.setattr(records, "PROBE_BYTES", 300)
        yield


def _load_all(comm: MPI.Intracomm, paths: list[str], small: bool) -> list[Any]:
    results: list[Any] = []
    with _all_large(small), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for path in paths:
            name = Path(path).name
            options = {key: DIALECTS[name][key] for key in GIVEN.get(name, ())}
            try:
                data = open_dataset(path, format="csv", comm=comm, **options)
                results.append(({f.name: dict(f.attributes) for f in data.schema.values()}, data.load()))
            except DataError as error:
                results.append(error)
    return results


@pytest.fixture(scope="module")
def tables() -> dict[str, pd.DataFrame]:
    return {str(path): _expected(path) for path in _files() if path.name not in BROKEN or path.name in GIVEN}


MORE = [(3, False), *((size, True) for size in (1, 3, 4, 7))]


@pytest.mark.parametrize(
    ("size", "small"), [(1, False), (2, True), *(pytest.param(*more, marks=pytest.mark.slow) for more in MORE)]
)
def test_rows_are_those_of_pandas(ranks: Pools, tables: dict[str, pd.DataFrame], size: int, small: bool) -> None:
    by_rank = ranks(size).run(_load_all, list(tables), small, timeout=240)
    assert len(tables) > 50
    for (path, table), shares in zip(tables.items(), zip(*by_rank, strict=True), strict=True):
        assert not isinstance(shares[0], DataError), shares[0]
        attributes = shares[0][0]
        assert len(attributes) == table.shape[1] + (Path(path).name == "fillheader.csv")
        for number, label in enumerate(table.columns):
            name = list(attributes)[number]
            assert name == str(label)
            found = np.concatenate([load[name] for _, load in shares])
            _same(found, table[label], attributes[name], f"{path}: {name}")


def _same(found: np.ndarray, column: pd.Series, attributes: dict[str, Any], where: str) -> None:
    assert len(found) == len(column), where
    if found.dtype == object:
        texts = [b"" if value != value else str(value).encode() for value in column.tolist()]
        assert found.tolist() == texts, where
    elif attributes.get("units") == EPOCH:
        seconds = [np.nan if value != value else _seconds(value) for value in column.tolist()]
        np.testing.assert_array_equal(found, seconds, where)
    else:
        np.testing.assert_array_equal(found, column.to_numpy(float), where)
        integral = column.dtype.kind == "i"
        assert (found.dtype == np.int64) == integral, where


def _seconds(text: str) -> float:
    stamp = pd.Timestamp(text)
    stamp = stamp.tz_localize("UTC") if stamp.tz is None else stamp
    return stamp.to_pydatetime().timestamp()


@pytest.mark.parametrize("size", (1, pytest.param(3, marks=pytest.mark.slow)))
def test_the_detected_dialect_is_in_the_attributes(ranks: Pools, tables: dict[str, pd.DataFrame], size: int) -> None:
    for path, result in zip(tables, ranks(size).run(_load_all, list(tables), False, timeout=240)[0], strict=True):
        dialect = DIALECTS.get(Path(path).name, {})
        for shown in result[0].values():
            assert shown["sep"] == dialect.get("sep", ","), path
            assert shown["encoding"] == dialect.get("encoding", "utf-8"), path
            assert shown["comment"] == dialect.get("comment"), path
            assert shown["header"] == dialect.get("header", 0), path


def _errors(comm: MPI.Intracomm, paths: list[str], small: bool) -> list[str]:
    found = []
    with _all_large(small):
        for path in paths:
            with pytest.raises(DataError) as caught:
                open_dataset(path, format="csv", comm=comm).load()
            found.append(str(caught.value))
    return found


@pytest.mark.parametrize("small", [False, True], ids=["one rank each", "scanned collectively"])
@pytest.mark.parametrize("size", (1, 3))
def test_every_rank_raises_the_error(ranks: Pools, size: int, small: bool) -> None:
    paths = [str(path) for path in _files() if path.name in BROKEN]
    by_rank = ranks(size).run(_errors, paths, small)
    assert all(texts == by_rank[0] for texts in by_rank)
    for path, text in zip(paths, by_rank[0], strict=True):
        assert BROKEN[Path(path).name] in text
        assert path in text
