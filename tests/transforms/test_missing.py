"""Missing numbers are kept, replaced, masked or dropped, equally on every number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pytest
from mpi4py import MPI

from matex_data import DecodeError, FieldNotFound, FormatError, PartitionError, open_dataset
from tests.support.ranks import Pool

ROWS = 203


@pytest.fixture
def stored(tmp_path: Path) -> tuple[str, np.ndarray[Any, Any]]:
    """Write two files; return their paths and the rows of "x" of both. Field "number" counts the rows."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, 4, 3)).astype("f4")
    x[rng.random(x.shape) < 0.03] = np.nan
    for name, rows in (("a2.h5", slice(0, 90)), ("a10.h5", slice(90, ROWS))):
        with h5py.File(tmp_path / name, "w") as file:
            file.create_dataset("x", data=x[rows], chunks=(7, 2, 3), compression="gzip")
            file["number"] = np.arange(ROWS)[rows]
    return str(tmp_path / "*.h5"), x


def _read(comm: MPI.Intracomm, paths: str, missing: Any, shuffle: bool) -> dict[str, Any]:
    """Return the arrays of this rank in one epoch, and the number of samples."""
    data = open_dataset(paths, missing=missing, comm=comm)
    batches = [
        {name: array.copy() for name, array in batch.items()}
        for batch in data.batches(24, shuffle=shuffle, seed=5, remainder="keep")
    ]
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    return {"samples": len(data), "load": data.load(), **joined}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("missing", ["nan", "mask", "drop", -7.5])
def test_every_mode_on_every_number_of_ranks(stored: Any, pool: Pool, missing: Any, shuffle: bool) -> None:
    paths, x = stored
    absent = np.isnan(x)
    kept = ~absent.any(axis=(1, 2)) if missing == "drop" else np.ones(ROWS, bool)
    assert 0 < kept.sum() < ROWS or missing != "drop"
    expected = np.where(absent, {"nan": np.nan, "mask": 0, "drop": np.nan}.get(missing, missing), x)
    by_rank = pool.run(_read, paths, missing, shuffle)
    assert {arrays["samples"] for arrays in by_rank} == {kept.sum()}
    for found in (by_rank, [arrays["load"] for arrays in by_rank]):
        number = np.concatenate([arrays["number"] for arrays in found])
        assert np.array_equal(np.sort(number), np.flatnonzero(kept))
        np.testing.assert_array_equal(np.concatenate([arrays["x"] for arrays in found]), expected[number])
        if missing == "mask":
            assert np.array_equal(np.concatenate([arrays["x_mask"] for arrays in found]), ~absent[number])


def test_masks_are_fields(stored: Any) -> None:
    paths, x = stored
    data = open_dataset(paths, missing="mask", inputs=["x", "x_mask"], targets="number", comm=MPI.COMM_SELF)
    assert data.schema["x_mask"].dtype == bool and data.schema["x_mask"].shape == (4, 3)
    inputs, _ = next(iter(data.batches(10)))
    assert np.array_equal(inputs["x_mask"], ~np.isnan(x[:10]))
    bare = next(iter(open_dataset(paths, missing="mask", inputs="x", comm=MPI.COMM_SELF).batches(10)))
    assert np.array_equal(bare, np.nan_to_num(x[:10]))


def test_masks_mean_the_same_for_pad_and_for_missing(tmp_path: Path) -> None:
    dense = np.array([[1.0, 2.0, np.nan], [np.nan] * 3, [3.0, 4.0, 5.0]])
    with h5py.File(tmp_path / "m.h5", "w") as file:
        ragged = file.create_dataset("x", (3,), h5py.vlen_dtype("f8"))
        for i, row in enumerate(dense):
            ragged[i] = row[~np.isnan(row)]
        file["y"] = dense
    padded = open_dataset(tmp_path / "m.h5", inputs=["x", "x_mask"], pad={"x": 3}, comm=MPI.COMM_SELF).load()
    masked = open_dataset(tmp_path / "m.h5", inputs=["y", "y_mask"], missing="mask", comm=MPI.COMM_SELF).load()
    assert np.array_equal(padded["x"], masked["y"]) and np.array_equal(padded["x_mask"], masked["y_mask"])
    assert np.array_equal(masked["y_mask"], ~np.isnan(dense))


def _write_columns(path: Path) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(4)
    columns = rng.normal(size=(60, 2))
    columns[rng.random(columns.shape) < 0.2] = np.nan
    with h5py.File(path, "w") as file:
        file["a"], file["b"], file["label"] = columns[:, 0], columns[:, 1], np.arange(60)
    return columns


def test_a_stack_has_one_mask(tmp_path: Path) -> None:
    path = tmp_path / "s.h5"
    columns = _write_columns(path)
    names = ["inputs_mask", "label"]
    data = open_dataset(path, missing="mask", inputs=["a", "b"], targets=names, stack=True, comm=MPI.COMM_SELF)
    x, targets = next(iter(data.batches(60, shuffle=True, seed=1)))
    assert np.array_equal(x, np.nan_to_num(columns)[targets["label"]])
    assert np.array_equal(targets["inputs_mask"], ~np.isnan(columns)[targets["label"]])


@pytest.mark.parametrize("other", [np.array([0.5, 0.5]), np.array([5, 2**63], "u8")])
def test_integers_that_a_stack_cannot_hold_are_an_error(other: Any) -> None:
    data = {"a": np.array([1, 2**53 + 1]), "b": other}
    stacked = open_dataset(data, inputs=["a", "b"], stack=True, comm=MPI.COMM_SELF)
    with pytest.raises(DecodeError, match=r"(?s)field 'a', row 1.*9007199254740993"):
        stacked.load()


def test_masks_are_not_stacked(tmp_path: Path) -> None:
    path = tmp_path / "s.h5"
    _write_columns(path)
    with pytest.raises(FormatError, match=r"'a_mask'.*\n.*\n.*targets= may name"):
        open_dataset(path, missing="mask", inputs=["a", "a_mask"], stack=True, comm=MPI.COMM_SELF)


@pytest.mark.parametrize("missing", ["mask", 0.5])
def test_windows_of_missing_numbers(stored: Any, missing: Any) -> None:
    paths, x = stored
    data = open_dataset(paths, missing=missing, inputs="x", window=5, stride=2, comm=MPI.COMM_SELF)
    starts = np.concatenate([np.arange(0, 90 - 4, 2), np.arange(90, ROWS - 4, 2)])
    found = np.concatenate([batch.copy() for batch in data.batches(16, remainder="keep")])
    filled = np.where(np.isnan(x), 0 if missing == "mask" else missing, x)
    np.testing.assert_array_equal(found, filled[starts[:, None] + np.arange(5)])


@pytest.mark.parametrize("missing", ["mask", {"x": 0.0}])
def test_named_masks_of_windows_and_of_integers(missing: Any) -> None:
    table = {"x": np.array([1, np.nan, 3, 4]), "n": np.arange(4), "name": np.array(list("abca"))}
    names = ["x", "x_mask", "n", "n_mask"]
    first, then = open_dataset(table, inputs=names, window=2, horizon=1, missing=missing, comm=MPI.COMM_SELF).head(1)
    assert [first["x_mask"].tolist(), first["n_mask"].tolist()] == [[[True, False]], [[True, True]]]
    assert [then["x_ahead"].tolist(), then["x_ahead_mask"].tolist()] == [[[3]], [[True]]]
    if missing == "mask":  # all fields have their masks where none is named, those of the target, too
        whole = {"x": table["x"], "n": table["n"]}
        first, then = open_dataset(whole, window=2, horizon=1, missing=missing, comm=MPI.COMM_SELF).head(1)
        assert set(first) == {"x", "n", "x_mask"} and set(then) == {"x_ahead", "n_ahead", "x_ahead_mask"}
        assert [first["x_mask"].tolist(), then["x_ahead_mask"].tolist()] == [[[True, False]], [[True]]]
        _, later = open_dataset(whole, missing=missing, comm=MPI.COMM_SELF).window(2, horizon=1).head(1)
        assert set(later) == set(then)
    for sides in ({"inputs": ["x", "name", "name_mask"]}, {"inputs": "x", "targets": "x_mask", "window": 2}):
        with pytest.raises(FieldNotFound, match="no field has this mask"):
            open_dataset(table, missing=missing, comm=MPI.COMM_SELF, **sides)


def test_splits_of_complete_samples_are_disjoint(stored: Any) -> None:
    data = open_dataset(stored[0], missing="drop", comm=MPI.COMM_SELF)
    first, second = data.split(0.6, 0.4, seed=1)
    numbers = np.concatenate([first.load()["number"], second.load()["number"]])
    assert np.array_equal(np.sort(numbers), np.sort(data.load()["number"]))


@pytest.mark.parametrize("missing", ["dorp", ""])
def test_an_unknown_mode(stored: Any, missing: Any) -> None:
    with pytest.raises(FormatError, match="unknown treatment of missing values"):
        open_dataset(stored[0], missing=missing, comm=MPI.COMM_SELF)


def _texts() -> pd.DataFrame:
    rng = np.random.default_rng(5)
    frame = pd.DataFrame({"number": np.arange(200), "x": rng.normal(size=200)})
    for name, share in (("x", 0.1), ("name", 0.1), ("kind", 0.2)):
        if name != "x":
            frame[name] = [f"{name} {i % 3}" for i in range(200)]
        frame.loc[rng.random(200) < share, name] = None
    return frame


def _numbers(comm: MPI.Intracomm, path: str, **options: Any) -> list[int]:
    return open_dataset(path, missing="drop", comm=comm, **options).load()["number"].tolist()


@pytest.mark.parametrize("options", [{}, {"dtype": {"kind": "category"}}], ids=["texts", "a category"])
def test_missing_texts_of_a_table_are_dropped(tmp_path: Path, pool: Pool, options: dict[str, Any]) -> None:
    frame, path = _texts(), tmp_path / "t.csv"
    frame.to_csv(path, index=False)
    expected = pd.read_csv(path).dropna()["number"].tolist()
    assert len(expected) < len(frame.dropna(subset="x"))
    assert [n for own in pool.run(_numbers, str(path), **options) for n in own] == expected
    some = pd.read_csv(path).dropna(subset=["x", "name"])["number"].tolist()
    assert _numbers(MPI.COMM_SELF, str(path), inputs=["number", "x", "name"], **options) == some


def test_an_empty_text_is_a_value_where_no_text_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("number,name\n0,a\n1,\n2,NA\n")
    assert pd.read_csv(path, keep_default_na=False).dropna()["number"].tolist() == [0, 1, 2]
    assert _numbers(MPI.COMM_SELF, str(path), keep_default_na=False) == [0, 1, 2]
    assert _numbers(MPI.COMM_SELF, str(path)) == [0]


@pytest.mark.parametrize("kind", [h5py.string_dtype(), "S8"], ids=["any length", "fixed length"])
def test_missing_texts_of_an_hdf5_file_are_dropped(tmp_path: Path, pool: Pool, kind: Any) -> None:
    frame, path = _texts(), tmp_path / "t.h5"
    with h5py.File(path, "w") as file:
        file["number"], file["x"] = frame["number"], frame["x"]
        for name in ("name", "kind"):
            texts = file.create_dataset(name, (200,), kind)  # what is not written is missing
            present = np.flatnonzero(frame[name].notna())
            texts[present] = frame[name].to_numpy(object)[present].astype("S8")
    expected = frame.dropna()["number"].tolist()
    assert [n for own in pool.run(_numbers, str(path)) for n in own] == expected


LARGE = (1 << 53) + 1


@pytest.mark.parametrize(
    "column",
    [
        lambda: pd.array([LARGE, None, 3], "Int64"),
        lambda: np.array([LARGE, None, 3], object),
        lambda: np.ma.array([LARGE, 7, 3], mask=[False, True, False]),
    ],
)
def test_integers_that_floats_cannot_hold_keep_a_mask(column: Any) -> None:
    frame = {"id": column(), "x": np.arange(3.0)}
    data = open_dataset(frame, missing="mask", comm=MPI.COMM_SELF)
    loaded = data.load()
    assert loaded["id"].dtype == np.int64 and loaded["id"].tolist() == [LARGE, 0, 3]
    assert loaded["id_mask"].tolist() == [True, False, True]
    assert open_dataset(frame, missing=-1, comm=MPI.COMM_SELF).load()["id"].tolist() == [LARGE, -1, 3]
    assert open_dataset(frame, missing={"id": 5}, comm=MPI.COMM_SELF).load()["id"].tolist() == [LARGE, 5, 3]
    assert open_dataset(frame, missing="drop", comm=MPI.COMM_SELF).load()["id"].tolist() == [LARGE, 3]
    assert data.value_counts("id") == {3: 1, LARGE: 1} and data.statistics("id").missing == 1
    for options in ({}, {"missing": {"x": 0}}):
        with pytest.raises(FormatError, match="no NaN"):
            open_dataset(frame, comm=MPI.COMM_SELF, **options)
    for options in ({"inputs": ["id", "x"], "stack": True}, {"derive": {"y": "id + 1"}}):
        with pytest.raises(FormatError, match="id"):
            open_dataset(frame, missing=0, comm=MPI.COMM_SELF, **options)


def test_small_integers_with_missing_values_are_floats() -> None:
    for column in (pd.array([1, None], "Int32"), np.array([1, None], object), np.ma.array([1, 2], mask=[False, True])):
        loaded = open_dataset({"n": column}, comm=MPI.COMM_SELF).load()["n"]
        np.testing.assert_array_equal(loaded, [1, np.nan])


def _filled(comm: MPI.Intracomm, path: str, missing: Any, split: bool) -> list[list[Any]]:
    try:
        data = open_dataset(path, missing=missing, comm=comm)
    except FormatError as error:
        return [[str(error)]]
    parts = data.split(0.75, 0.25) if split else (data,)
    loaded = [part.load() for part in parts]
    return [np.concatenate([one[name] for one in loaded]).tolist() for name in ("x", "name")]


@pytest.mark.parametrize("numbers", ["odd", "even", "wide"])
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.rank_counts(1, 2, 3)
def test_medians_and_texts_replace_missing_values(tmp_path: Path, pool: Pool, numbers: str, split: bool) -> None:
    frame, path = _texts(), tmp_path / "t.parquet"
    rows = 199 if numbers == "odd" else 200
    frame = frame[:rows]
    if numbers == "wide":  # zeros of both signs, ties, and numbers of all sizes
        frame["x"] = np.where(
            frame["x"].isna(), np.nan, np.tile([-1e308, -0.0, 0.0, 5e-324, 3.0, 3.0, 1e-9, 1e308], 25)
        )
    frame.to_parquet(path)
    learned = frame[: round(0.75 * rows)] if split else frame
    expected = frame["x"].fillna(np.median(learned["x"].dropna())), frame["name"].fillna("unknown")
    by_rank = pool.run(_filled, str(path), {"x": "median", "name": "unknown"}, split)
    if split:  # ranks have blocks of both sets
        assert sorted(v for x, _ in by_rank for v in x) == sorted(expected[0])
    else:
        assert [v for x, _ in by_rank for v in x] == expected[0].tolist()
        assert [v.decode() for _, name in by_rank for v in name] == expected[1].tolist()


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ({"x": "meen"}, ("'meen'", "one of ('nan', 'mean', 'median', 'mode') for numbers")),
        ({"*": "meen"}, ("cannot replace", "'meen'")),
        ({"name": "median"}, ('"mode"',)),
        ({"name": "mask"}, ("unknown treatment",)),
    ],
)
def test_texts_that_replace_nothing_are_errors(tmp_path: Path, pool: Pool, missing: Any, words: Any) -> None:
    _texts().to_parquet(tmp_path / "t.parquet")
    (error,) = {value[0][0] for value in pool.run(_filled, str(tmp_path / "t.parquet"), missing, False)}
    assert all(word in error for word in words), error


def test_a_text_that_is_too_long_for_its_field_is_an_error(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["name"] = np.array([b"abc", b"", b"de"])
    with pytest.raises(FormatError, match="a text that fits into"):
        open_dataset(tmp_path / "x.h5", missing={"name": "unknown"}, comm=MPI.COMM_SELF)
    data = open_dataset(tmp_path / "x.h5", missing={"name": "?"}, comm=MPI.COMM_SELF)
    assert data.load()["name"].tolist() == [b"abc", b"?", b"de"]


CLASSES = {"c": np.array(["a", "b", "b", "", "c"]), "x": np.arange(5.0)}


@pytest.mark.parametrize("stack", [False, True])
@pytest.mark.parametrize("classes", [{"one_hot": "c"}, {"dtype": {"c": "category"}}])
def test_classes_may_be_missing_before_they_are_vectors_or_stacked(classes: Any, stack: bool) -> None:
    options = {**classes, "inputs": ["c", "x"], "stack": stack, "comm": MPI.COMM_SELF}
    assert len(open_dataset(CLASSES, missing="drop", **options)) == 4
    assert len(open_dataset(CLASSES, missing="drop", window=2, **options)) == 2
    filled = open_dataset(CLASSES, missing={"c": "mode"}, **options).load()
    codes = filled["inputs"][:, :-1] if stack else filled["c"].reshape(5, -1)
    assert codes.tolist() == (np.eye(3) if "one_hot" in classes else np.arange(3)[:, None])[[0, 1, 1, 1, 2]].tolist()


@pytest.mark.parametrize("window", [{}, {"window": 2, "horizon": 1}])
def test_one_hot_vectors_have_no_mask(window: Any) -> None:
    """It was True everywhere: where a class is missing, the vector has zeros alone."""
    data = open_dataset(CLASSES, one_hot="c", missing="mask", comm=MPI.COMM_SELF, **window)
    assert not [name for name in data.schema if name.startswith("c") and name.endswith("mask")]
    with pytest.raises(FieldNotFound, match=r"no field has this mask(?s:.*)zeros alone where"):
        open_dataset(CLASSES, one_hot="c", inputs=["c", "c_mask"], missing="mask", comm=MPI.COMM_SELF, **window)


def test_columns_of_a_stack_are_named_as_their_fields() -> None:
    arrays = {"temp[K]": np.array([1.0, np.nan, 3.0]), "p[hPa]": np.array([4.0, 5.0, 6.0])}
    options = {"inputs": list(arrays), "targets": "inputs_mask", "stack": True, "comm": MPI.COMM_SELF}
    data = open_dataset(arrays, missing={"temp[K]": "mean"}, **options)
    assert data.load()["inputs"].tolist() == [[1, 4], [2, 5], [3, 6]]
    assert data.load()["inputs_mask"].tolist() == [[True, True], [False, True], [True, True]]
    found = data.statistics("inputs", axis=-1)
    assert found.missing.tolist() == [1, 0] and found.count.tolist() == [2, 3]


def test_a_split_after_an_operation_is_an_error_that_names_it() -> None:
    data = open_dataset({"v": np.array([0.0, np.nan, 2.0])}, missing={"v": "mean"}, comm=MPI.COMM_SELF)
    with pytest.raises(PartitionError, match=r"means of missing values anew(.*\n)*.*split before map\(\), derive\(\)"):
        data.derive({"w": "v + 1"}).split(0.5, 0.5)


@pytest.mark.parametrize("split", [False, True])
def test_windows_are_filled_by_statistics_of_their_rows(split: bool) -> None:
    v = np.array([0.0, 4.0, 8.0, np.nan, 16.0, 20.0, 24.0, 28.0, 32.0, 50.0])
    data = open_dataset({"v": v}, inputs="v", window=3, horizon=1, missing={"v": "mean"}, comm=MPI.COMM_SELF)
    parts = data.split(0.5, 0.5) if split else (data,)
    number = np.nanmean(v[: len(parts[0]) + 3] if split else v)
    for part in parts:
        arrays = part.load()
        assert not np.isnan([*arrays["v"].ravel(), *arrays["v_ahead"].ravel()]).any()
    arrays = parts[0].load()
    assert arrays["v_ahead"][0, 0] == number
    assert data.statistics("v_ahead").missing == 1


def test_a_pattern_passes_over_fields_that_it_does_not_fit() -> None:
    arrays = {"age": np.array([1.0, np.nan]), "n": np.arange(2), "s": np.array(["a", ""])}
    data = open_dataset(arrays, missing={"age": "mean", "*": "unknown"}, comm=MPI.COMM_SELF)
    assert data.load()["s"].tolist() == [b"a", b"unknown"] and data.load()["age"].tolist() == [1, 1]


def test_filled_classes_are_classes() -> None:
    arrays = {"s": np.array(["a", "b", "b", "", "b", "a"]), "x": np.arange(6)}
    data = open_dataset(arrays, inputs="x", targets="s", missing={"s": "mode"}, comm=MPI.COMM_SELF)
    assert data.value_counts("s") == {"b": 4, "a": 2} and data.class_weights("s") == {"a": 1.5, "b": 0.75}
    assert [part.value_counts("s") for part in data.split(0.5, 0.5, stratify="s")] == [{"b": 2, "a": 1}] * 2


def _loaded(comm: MPI.Intracomm, given: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the samples of this rank."""
    return open_dataset(given, comm=comm, **options).load()


@pytest.mark.parametrize("kind", ["csv", "parquet", "memory"])
def test_texts_are_filled_in_before_classes_are_made_of_them(tmp_path: Path, pool: Pool, kind: str) -> None:
    table = pd.DataFrame({"site": ["b", None, "a", "b"] * 3, "kind": ["x", "y"] * 6, "n": [1.0, np.nan, 2, 3] * 3})
    path = {"csv": str(tmp_path / "a.csv"), "parquet": str(tmp_path / "a.parquet")}.get(kind)
    if path is not None:
        getattr(table, f"to_{kind}")(path, index=False)
    given: Any = table if path is None else path
    one_hot: Any = {"one_hot": ["site", "kind"], "missing": {"site": "unknown", "kind": "none", "n": 0.0, "*": "mode"}}
    loaded = pool.run(_loaded, given, one_hot)
    wanted = pd.get_dummies(table[["site", "kind"]].fillna({"site": "unknown"}), dtype=np.float32)
    found = np.concatenate([np.concatenate([one[name] for one in loaded]) for name in ("site", "kind")], axis=1)
    np.testing.assert_array_equal(found, wanted.to_numpy())
    data = open_dataset(given, comm=MPI.COMM_SELF, **one_hot)
    assert data.schema["site"].attributes["categories"] == ["a", "b", "unknown"]
    assert data.value_counts("site") == {0: 3, 1: 6, 2: 3}
    chosen = open_dataset(given, comm=MPI.COMM_SELF, where="n > 2", **one_hot)
    assert chosen.schema["site"].shape == (3,)
    with pytest.raises(FormatError, match=r"(?s)cannot replace values.*leave the field out of dtype="):
        open_dataset(given, comm=MPI.COMM_SELF, dtype={"site": "category"}, missing={"site": "unknown"})


def test_classes_of_integers_that_float64_cannot_hold_are_filled() -> None:
    table = pd.DataFrame({"code": pd.array([2**60, None, 3, 2**60], "Int64"), "x": [1.0, np.nan, 3, 4]})
    data = open_dataset(table, comm=MPI.COMM_SELF, one_hot="code", missing={"x": 0.0, "code": "mode"})
    assert data.load()["code"].argmax(axis=1).tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("given", [{"missing": "mask"}, {"missing": {"x": 0.0}}, {"pad": {"lists": 3}}], ids=str)
@pytest.mark.parametrize(
    "use", [{"where": "{}"}, {"derive": {"y": "{} * 2"}}, {"weights": "{}"}, {"weights": "{} * 2"}]
)
def test_a_mask_in_an_expression_is_an_error_that_tells_when_masks_are_made(given: Any, use: Any) -> None:
    lists = np.empty(3, object)
    lists[:] = [np.ones(n) for n in (1, 2, 3)]
    arrays = {"x": np.array([1, np.nan, 3]), "lists": lists, "given_mask": np.ones(3)}
    name = "lists_mask" if "pad" in given else "x_mask"
    filled = {
        key: text.format(name) if isinstance(text, str) else {"y": text["y"].format(name)} for key, text in use.items()
    }
    for names in ({}, {"inputs": ["x"], "targets": "given_mask"}):
        with pytest.raises(FormatError, match="names a mask, and masks are made after") as raised:
            open_dataset(arrays, comm=MPI.COMM_SELF, **given, **filled, **names)
        assert "where() and map() of the data set have the masks" in str(raised.value)
    assert len(open_dataset(arrays, comm=MPI.COMM_SELF, where="given_mask > 0", **given)) == 3
