"""Files of one data set whose fields differ: united dtypes, missing values, folders; values by pandas and awkward."""

from __future__ import annotations

import decimal
import warnings
from pathlib import Path
from typing import Any

import awkward as ak
import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
from mpi4py import MPI

from matex_data import DecodeError, FieldNotFound, FormatError, open_dataset
from matex_data.io.counters import process_profile
from tests.support.ranks import Pool

SAID = "fields that files or samples lack are missing there"


def _loaded(comm: MPI.Intracomm, path: str, options: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = open_dataset(path, comm=comm, **options)
    parts = comm.allgather(data.load())
    whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return whole, [str(one.message) for one in caught if SAID in str(one.message)]


def loaded(pool: Pool, path: Path, **options: Any) -> dict[str, Any]:
    """Return all rows, read by all ranks of a pool; rank 0 alone says what is missing, once."""
    by_rank = pool.run(_loaded, str(path), options, timeout=60)
    assert [len(said) for _, said in by_rank[1:]] == [0] * (pool.size - 1)
    assert len(by_rank[0][1]) <= 1
    return by_rank[0][0]  # type: ignore[no-any-return]


def alone(path: Path | list[Path], **options: Any) -> dict[str, Any]:
    """Return all rows, read by one rank."""
    return open_dataset(path, comm=MPI.COMM_SELF, **options).load()


def same(found: dict[str, Any], frame: pd.DataFrame) -> None:
    """Compare fields with a frame of pandas: numbers with NaN, and texts that are empty where they are missing."""
    assert set(found) == set(frame.columns)
    for name, column in frame.items():
        if found[name].dtype == object:
            texts = ["" if pd.isna(text) else text for text in column]
            assert [text.decode() for text in found[name]] == texts, name
        else:
            np.testing.assert_array_equal(
                found[name].astype(float), column.astype("Float64").to_numpy(float, na_value=np.nan)
            )


FRAMES = (
    pd.DataFrame(
        {"n": pd.array([1, 2, 3], "int32"), "x": [1.5, 2.5, 3.5], "flag": [True, False, True], "t": ["a", "b", "c"]}
    ),
    pd.DataFrame({"n": pd.array([1 << 40, 2], "int64"), "x": pd.array([1, None], "Int64"), "t": [None, None]}),
    pd.DataFrame({"n": pd.array([5], "int64"), "flag": [True], "late": pd.array([7], "int16"), "t": ["d"]}),
    pd.DataFrame(
        {"n": pd.array([6, 7], "int8"), "x": [0.5, np.nan], "flag": pd.array([True, None], "boolean"), "t": ["e", None]}
    ),
)


@pytest.mark.parametrize("kind", ["parquet", "feather", "jsonl", "csv", "csv.gz"])
def test_frames_of_pandas(tmp_path: Path, pool: Pool, kind: str) -> None:
    for number, frame in enumerate(FRAMES):
        path = tmp_path / f"{number}.{kind}"
        if kind == "parquet":
            frame.to_parquet(path)
        elif kind == "feather":
            frame.to_feather(path)
        elif kind == "jsonl":
            frame.to_json(path, orient="records", lines=True)
        else:
            frame.to_csv(path, index=False)
    found = loaded(pool, tmp_path)
    whole = pd.concat(FRAMES, ignore_index=True)
    if kind == "csv" or kind == "csv.gz":  # of which the booleans are texts beside missing ones
        whole["flag"] = whole["flag"].map({True: 1.0, False: 0.0})
    same(found, whole)
    assert found["n"].dtype == np.int64
    filled = loaded(pool, tmp_path, inputs=["x", "late"], missing=-1)
    np.testing.assert_array_equal(filled["late"], whole["late"].astype(float).fillna(-1))
    np.testing.assert_array_equal(filled["x"], whole["x"].astype(float).fillna(-1))


@pytest.mark.parametrize("kind", ["parquet", "feather", "jsonl"])
@pytest.mark.parametrize("order", [1, -1])
def test_times_and_plain_numbers_are_not_united(tmp_path: Path, kind: str, order: int) -> None:
    """The numbers may count milliseconds, as those of ``to_json`` do."""
    times = pd.DataFrame({"t": pd.to_datetime(["2020-01-01", "2021-01-01"])})
    for number, frame in enumerate((times, times.astype("int64"))[::order]):
        path = tmp_path / f"{number}.{kind}"
        if kind == "parquet":
            frame.to_parquet(path)
        elif kind == "feather":
            frame.to_feather(path)
        else:
            frame.to_json(path, orient="records", lines=True, date_format="iso")
    with pytest.raises(FormatError, match=r"agree on 'units' of 't'(.|\n)*1970"):
        alone(tmp_path)


def test_what_cannot_be_united_names_both_files(tmp_path: Path, pool: Pool) -> None:
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / "0.parquet")
    pd.DataFrame({"x": [2]}).to_parquet(tmp_path / "1.parquet")
    pd.DataFrame({"x": ["text"]}).to_parquet(tmp_path / "2.parquet")
    for error in pool.outcomes(_loaded, str(tmp_path), {}):
        assert isinstance(error, FormatError) and "0.parquet" in str(error) and "2.parquet" in str(error), error
    pd.DataFrame({"x": pd.array([2], "uint64")}).to_parquet(tmp_path / "2.parquet")
    with pytest.raises(FormatError, match=r"2\.parquet(.|\n)*int64(.|\n)*0\.parquet(.|\n)*uint64"):
        alone(tmp_path)
    pd.DataFrame({"x": [1], "y": [1]}).to_parquet(tmp_path / "1.parquet")
    pd.DataFrame({"y": [1]}).to_parquet(tmp_path / "0.parquet")  # lacks it, which makes other integers floats
    with pytest.raises(FormatError, match=r"2\.parquet(.|\n)*int64(.|\n)*1\.parquet(.|\n)*uint64"):
        alone(tmp_path)
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / "0.parquet")
    pd.DataFrame({"other": [2]}).to_parquet(tmp_path / "2.parquet")
    with pytest.raises(FormatError, match=r"2\.parquet(.|\n)*x(.|\n)*0\.parquet(.|\n)*other"):
        alone(tmp_path)


LARGE = 2**53 + 1
INEXACT: dict[str, tuple[list[Any], list[Any], Any]] = {
    "beside missing ones": ([1, LARGE], [1, None], None),
    "beside fractions": ([1, 2**63 - 1], [0.5], None),
    "lists": ([[], [1, LARGE]], [[0.5]], None),
    "arrays": ([[3, 1], [1, LARGE]], [[0.5], []], pa.list_(pa.int64(), 2)),
    "lists of lists": ([[[1]], [[], [1, LARGE]]], [[[0.5]]], None),
}


@pytest.mark.parametrize("kind", INEXACT)
@pytest.mark.filterwarnings("error")
def test_an_integer_that_the_common_dtype_does_not_hold(tmp_path: Path, kind: str) -> None:
    first, second, dtype = INEXACT[kind]
    pq.write_table(pa.table({"x": pa.array(first, dtype)}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"x": pa.array(second)}), tmp_path / "1.parquet")
    with pytest.raises(
        DecodeError, match=r"0\.parquet(.|\n)*'x'(.|\n)*row 1(.|\n)*(9007199254740993|9223372036854775807)"
    ):
        alone(tmp_path)


def test_lists_of_lists_of_two_dtypes(tmp_path: Path) -> None:
    for number, lists in enumerate(([[[1], [], [2, 3]], []], [[[0.5, 4.0]], [[]]])):
        pq.write_table(pa.table({"x": pa.array(lists)}), tmp_path / f"{number}.parquet")
    found = alone(tmp_path)["x"]
    assert [[one.tolist() for one in sample] for sample in found] == [[[1], [], [2, 3]], [], [[0.5, 4]], [[]]]
    assert {one.dtype for sample in found for one in sample} == {np.dtype(float)}


def test_a_named_field_that_a_file_lacks(tmp_path: Path, pool: Pool) -> None:
    for number in range(30):
        columns = {"x": [number]} if number in (0, 17) else {"x": [number], "y": [number * 2]}
        pd.DataFrame(columns).to_parquet(tmp_path / f"{number:02d}.parquet")
    found = loaded(pool, tmp_path, inputs=["y"])
    expected = [np.nan if number in (0, 17) else number * 2 for number in range(30)]
    np.testing.assert_array_equal(found["y"], expected)
    for error in pool.outcomes(_loaded, str(tmp_path), {"inputs": ["x", "z"]}):
        assert isinstance(error, FieldNotFound) and "'z'" in str(error), error


def test_lists_and_arrays_of_numbers(tmp_path: Path, pool: Pool) -> None:
    arrays = [
        ak.Array([{"a": [1, 2], "d": [1.0, 2.0]}, {"a": [], "d": [3.0, 4.0]}]),
        ak.Array([{"a": [1.5], "d": [1.0, 2.0]}, {"a": None, "d": [0.0, 1.0]}]),
    ]
    for number, array in enumerate(arrays):
        ak.to_parquet(array, tmp_path / f"{number}.parquet")
    pq.write_table(pa.table({"d": pa.array([[1, 2]], pa.list_(pa.int32(), 2))}), tmp_path / "2.parquet")
    found = loaded(pool, tmp_path)
    assert [one.tolist() for one in found["a"]] == [[1, 2], [], [1.5], [], []]
    assert [one.tolist() for one in found["d"]] == [[1, 2], [3, 4], [1, 2], [0, 1], [1, 2]]
    assert {one.dtype for one in (*found["a"], *found["d"])} == {np.dtype(float)}


def test_lists_that_are_missing(tmp_path: Path) -> None:
    """Spark, awkward and pandas write null for a list that is missing."""
    table = pa.table(
        {
            "lists": pa.array([[1, 2], None, [], [3]]),
            "fixed": pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int64(), 2)),
            "records": pa.array([[{"a": 1.5}], None, [], [{"a": 2.5}]]),
            "deep": pa.array([[[1], [2, 3]], None, [None], [[4]]]),
        }
    ).slice(0, 4)
    pq.write_table(table, tmp_path / "a.parquet")
    pyarrow.feather.write_feather(table, tmp_path / "a.feather")
    for name in ("a.parquet", "a.feather"):
        found = alone(tmp_path / name)
        assert [one.tolist() for one in found["lists"]] == [one or [] for one in table["lists"].to_pylist()]
        expected = [one or [np.nan] * 2 for one in table["fixed"].to_pylist()]
        np.testing.assert_array_equal(found["fixed"], expected)
        assert [one.tolist() for one in found["records.a"]] == [[1.5], [], [], [2.5]]
        assert [[inner.tolist() for inner in one] for one in found["deep"]] == [[[1], [2, 3]], [], [[]], [[4]]]


@pytest.mark.parametrize(
    "kind", [pa.decimal128(18, 2), pa.decimal128(38, 18), pa.decimal256(60, 20), pa.decimal128(10, 0)]
)
def test_decimals_as_spark_writes_them(tmp_path: Path, kind: pa.DataType) -> None:
    texts = (
        ["1.5", "-0.07", "123456789.12", None, "0", "-98765432.1"] if kind.scale else ["1", "-7", None, "1234567890"]
    )
    numbers = [None if text is None else decimal.Decimal(text) for text in texts]
    pq.write_table(pa.table({"x": pa.array(numbers, kind)}), tmp_path / "a.parquet")
    found = alone(tmp_path / "a.parquet")["x"]
    np.testing.assert_array_equal(found, [np.nan if text is None else float(text) for text in texts])


def test_a_decimal_that_no_float_holds(tmp_path: Path) -> None:
    number = decimal.Decimal("1234567890123456.78")
    pq.write_table(
        pa.table({"x": pa.array([decimal.Decimal(1), number], pa.decimal128(18, 2))}), tmp_path / "a.parquet"
    )
    with pytest.raises(DecodeError, match=r"'x'(.|\n)*row 1(.|\n)*1234567890123456\.78(.|\n)*dtype="):
        alone(tmp_path / "a.parquet")
    assert alone(tmp_path / "a.parquet", dtype={"x": "float64"})["x"].tolist() == [1.0, float(number)]


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_folders_below_what_the_user_names(tmp_path: Path, pool: Pool, kind: str) -> None:
    root = tmp_path / "user=me" / "data"
    frame = pd.DataFrame({"x": range(6), "fold": ["01", "1", "extra", "1", "extra", None]})
    content = pa.Table.from_pandas(frame)
    partitioned = {"partitioning": ["fold"], "partitioning_flavor": "hive"}
    pyarrow.dataset.write_dataset(content, root, format=kind, **partitioned)
    for path in (root, root / "fold=*" / f"*.{kind}"):
        found = loaded(pool, path)
        rows = sorted(zip(found["x"].tolist(), found["fold"], strict=True))
        assert [(x, text.decode()) for x, text in rows] == list(zip(frame["x"], frame["fold"].fillna(""), strict=True))
    one = next((root / "fold=extra").iterdir())
    assert set(alone(one)) == {"x"} == set(alone(root / "fold=extra")) == set(alone([one, one]))


def test_the_fields_of_hdf5_and_a_stored_index(tmp_path: Path, pool: Pool) -> None:
    kinds = ("i4", "i8", "f4")
    for number, kind in enumerate(kinds):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"] = np.arange(4, dtype=kind) + number
            file["image"] = np.full((4, 2, 2), number, "u1")
            if number != 1:
                file["y"] = np.arange(4, dtype="i4")
    for _ in range(2):  # the second time by the stored index
        found = loaded(pool, tmp_path / "*.h5", index=str(tmp_path / "all.matex"))
        np.testing.assert_array_equal(found["x"], np.concatenate([np.arange(4) + number for number in range(3)]))
        assert found["x"].dtype == np.float64 and found["image"].dtype == np.uint8
        np.testing.assert_array_equal(found["y"], [*range(4), *[np.nan] * 4, *range(4)])
    kept = loaded(pool, tmp_path / "*.h5", inputs=["x", "y"], missing="drop")
    np.testing.assert_array_equal(kept["x"], [0, 1, 2, 3, 2, 3, 4, 5])


def test_lines_of_united_columns_are_read_once(tmp_path: Path) -> None:
    for number, step in enumerate((1, 0.5)):
        frame = pd.DataFrame({f"c{i}": np.arange(50) * step for i in range(4)})
        frame.to_json(tmp_path / f"{number}.jsonl", orient="records", lines=True)
    data = open_dataset(tmp_path, comm=MPI.COMM_SELF)
    assert {field.dtype for field in data.schema.values()} == {np.dtype(float)}
    before = process_profile().bytes
    data.load()
    assert process_profile().bytes - before == sum(path.stat().st_size for path in tmp_path.iterdir())
