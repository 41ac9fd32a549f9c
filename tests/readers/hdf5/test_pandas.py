"""Data frames that pandas writes by ``to_hdf``, against ``pandas.read_hdf``."""

from __future__ import annotations

import ast
import warnings
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
import numpy as np
import pandas as pd
import pytest
from mpi4py import MPI

from matex_data.errors import FieldNotFound, FormatError
from matex_data.opening.open import open_dataset
from matex_data.readers.hdf5.reader import index
from tests.support.launch import run_script
from tests.support.ranks import Pool
from tests.support.serial import every_row, random_rows, same

ROWS = 50
RANDOM = np.random.default_rng(1)
FRAME = pd.DataFrame(
    {
        "pt": RANDOM.normal(size=ROWS),
        "id": np.arange(ROWS),
        "eta": RANDOM.normal(size=ROWS),
        "small": RANDOM.normal(size=ROWS).astype("f4"),
        "name": [f"é{i}" for i in range(ROWS)],
        "good": RANDOM.random(ROWS) < 0.5,
        "when": pd.date_range("2020-01-01", periods=ROWS, freq="h").as_unit("ns"),
        2019: np.arange(ROWS, dtype="u2"),
    }
)
TABLE: dict[str, Any] = {"format": "table"}
FIXED: dict[str, Any] = {"format": "fixed"}
KINDS = [FIXED, TABLE, {**TABLE, "data_columns": ["eta", "name"]}, {**TABLE, "complevel": 5, "complib": "blosc"}]


def _write(path: Path, data: Any, key: str = "run/frame", **options: Any) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of pickled texts
        data.to_hdf(path, key=key, **options)
    return path


def _plain(column: Any) -> Any:
    """Return a column of pandas as the fields have it."""
    values = column.to_numpy()
    if values.dtype.kind == "M":
        return values.astype("i8")
    if values.dtype.kind in "OU":
        return np.array([text.encode() for text in values], object)
    return values


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_columns_have_the_values_of_pandas(tmp_path: Path, options: dict[str, Any]) -> None:
    path = _write(tmp_path / "a.h5", FRAME, **options)
    expected = pd.read_hdf(path)
    found = index(str(path))
    assert list(found.fields) == ["index", *map(str, expected.columns)]
    for column in expected.columns:
        name, values = str(column), _plain(expected[column])
        assert found.fields[name].shape == ()
        if values.dtype != object:
            assert found.fields[name].dtype == values.dtype
        assert every_row(found, name).tolist() == values.tolist()
        rows, numbers = random_rows(found, name, RANDOM)
        assert rows.tolist() == values[numbers].tolist()
    assert same(every_row(found, "index"), expected.index.to_numpy())
    assert found.fields["when"].attributes["units"] == "ns since 1970-01-01"


def _read(comm: Any, path: str) -> Any:
    data = open_dataset(path, inputs=["pt", "name"], targets="run/frame/id", comm=comm)
    return [({**x}, y) for x, y in data.batches(12, shuffle=True, seed=4)]


@pytest.mark.parametrize("options", KINDS[:2], ids=str)
def test_frames_on_every_number_of_ranks(tmp_path: Path, pool: Pool, options: dict[str, Any]) -> None:
    path = _write(tmp_path / "a.h5", FRAME, **options)
    for batches in pool.run(_read, str(path)):
        for x, number in batches:
            assert same(x["pt"], FRAME["pt"].to_numpy()[number])
            assert [text.decode() for text in x["name"]] == FRAME["name"].to_numpy()[number].tolist()


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_series(tmp_path: Path, options: dict[str, Any]) -> None:
    plain = {key: value for key, value in options.items() if key != "data_columns"}
    path = _write(tmp_path / "a.h5", FRAME.set_index("when")["pt"], **plain)
    found = index(str(path))
    assert list(found.fields) == ["index", "pt"]
    assert same(every_row(found, "pt"), FRAME["pt"].to_numpy())
    assert same(every_row(found, "index"), FRAME["when"].to_numpy().astype("i8"))


@pytest.mark.parametrize("options", KINDS[:2], ids=str)
def test_several_frames_have_their_names_in_front(tmp_path: Path, options: dict[str, Any]) -> None:
    path = _write(tmp_path / "a.h5", FRAME[["pt", "id"]], "a", **options)
    _write(path, FRAME[["eta"]], "b", **options)
    found = index(str(path))
    assert list(found.fields) == ["a/index", "a/pt", "a/id", "b/index", "b/eta"]
    assert same(every_row(found, "b/eta"), FRAME["eta"].to_numpy())
    assert list(index(str(path), ["a/*"]).fields) == ["a/index", "a/pt", "a/id"]
    with pytest.raises(FieldNotFound):
        index(str(path), ["pt"])


@pytest.mark.parametrize("options", KINDS[:2], ids=str)
def test_the_levels_of_an_index(tmp_path: Path, options: dict[str, Any]) -> None:
    runs, events = np.arange(ROWS) // 10 + 7, np.arange(ROWS) % 10
    levels = pd.MultiIndex.from_arrays([runs, events], names=["run", "event"])
    path = _write(tmp_path / "a.h5", FRAME[["pt"]].set_index(levels), **options)
    found = index(str(path))
    assert list(found.fields) == ["run", "event", "pt"]
    values = every_row(found, "run")
    enum = found.fields["run"].attributes.get("enum")
    if enum is not None:
        names = {code: int(name) for name, code in enum.items()}
        values = np.array([names[code] for code in values.tolist()])
    assert same(values, runs)


@pytest.mark.parametrize("options", [FIXED, TABLE], ids=str)
def test_names_of_columns_in_levels(tmp_path: Path, options: dict[str, Any]) -> None:
    columns = pd.MultiIndex.from_tuples([("q", 1), ("p", 1), ("q", 2)], names=["det", "n"])
    frame = pd.DataFrame({name: np.arange(ROWS) * (i + 1.5) for i, name in enumerate(columns)}, columns=columns)
    path = _write(tmp_path / "a.h5", frame, **options)
    found, expected = index(str(path)), pd.read_hdf(path)
    assert list(found.fields) == ["index", "q/1", "p/1", "q/2"]
    for det, n in columns:
        assert same(every_row(found, f"{det}/{n}"), expected[det, n].to_numpy())


def test_categories_are_codes_with_names(tmp_path: Path) -> None:
    frame = FRAME[["pt"]].assign(kind=pd.Categorical(RANDOM.choice(["muon", "pion"], ROWS)))
    path = _write(tmp_path / "a.h5", frame, **TABLE)
    found = index(str(path))
    names = {code: name for name, code in found.fields["kind"].attributes["enum"].items()}
    assert [names[code] for code in every_row(found, "kind").tolist()] == pd.read_hdf(path)["kind"].tolist()
    other = frame.assign(kind=frame["kind"].cat.reorder_categories(["pion", "muon"]))
    with pytest.raises(FormatError, match="do not agree on 'enum' of 'kind'"):
        open_dataset([path, _write(tmp_path / "b.h5", other, **TABLE)], comm=MPI.COMM_SELF)


def test_categories_of_anndata_are_those_of_all_files(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.h5ad" for number in range(2)]
    for path, names in zip(paths, (["B", "T"], ["NK", "T"]), strict=True):
        with h5py.File(path, "w") as file:
            column = file.create_group("obs/cell_type")
            column.attrs["encoding-type"] = "categorical"
            column["codes"], column["categories"] = np.array([1, 0], "i1"), names
    options: Any = {"inputs": "obs/cell_type/codes", "comm": MPI.COMM_SELF}
    data = open_dataset(paths[0], **options)
    assert data.schema["obs/cell_type/codes"].attributes["enum"] == {"B": 0, "T": 1}
    with pytest.raises(FormatError, match="do not agree on 'enum'"):
        open_dataset(paths, **options)


FIRST = """
import os, sys, h5py, matex_data as md
for path, name, offsets in zip(*[iter(sys.argv[1:])] * 3):
    if os.fork() == 0:  # nothing has asked for filters in this process yet
        given = {"offsets": {name: offsets}} if offsets else {}
        print([value.tolist() for value in md.open_dataset(path, inputs=name, **given).load()[name]], flush=True)
        os._exit(0)
    os.wait()
"""


def test_what_describes_samples_may_have_a_filter_of_hdf5plugin(tmp_path: Path) -> None:
    """In a process in which nothing has registered the filters yet: labels, categories, axes, offsets."""
    frame = pd.DataFrame({"x": FRAME["pt"], "kind": pd.Categorical(list("ab") * (ROWS // 2))})
    paths = []
    for library in ("blosc", "bzip2"):
        packed = {"complevel": 5, "complib": library}
        paths.append(_write(tmp_path / f"{library}.table.h5", frame, **TABLE, **packed))
        paths.append(_write(tmp_path / f"{library}.fixed.h5", frame[["x"]], **FIXED, **packed))
    for path in paths:
        assert "x" in pd.read_hdf(path)
    events = tmp_path / "events.h5"
    with h5py.File(events, "w") as file:
        file.create_dataset("n", data=np.array([2, 0, 3]), chunks=(3,), **hdf5plugin.Zstd())
        file.create_dataset("pt", data=np.arange(5.0), chunks=(3,), **hdf5plugin.Zstd())
        file.create_dataset("wf/cumulative_length", data=np.array([2, 5]), chunks=(2,), **hdf5plugin.Zstd())
        file.create_dataset("wf/flattened_data", data=np.arange(5.0), chunks=(3,), **hdf5plugin.Zfp(reversible=True))
    given = [(path, "x", "") for path in paths] + [(events, "pt", "n"), (events, "wf", "")]
    finished = run_script(0, FIRST, *[str(word) for words in given for word in words], forked=False)
    found = [ast.literal_eval(line) for line in finished.stdout.splitlines()]
    assert found == [FRAME["pt"].tolist()] * 4 + [[[0, 1], [], [2, 3, 4]], [[0, 1], [2, 3, 4]]], finished.stderr


def test_a_frame_that_is_read_as_it_is_stored_says_why(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.h5", FRAME[["pt", "eta"]], **FIXED)
    with h5py.File(path, "a") as file:
        del file["run/frame/axis0"], file["run/frame/block0_items"]
    with pytest.warns(UserWarning, match="'run/frame' is read as its datasets are stored: the data frame cannot be"):
        assert open_dataset(path).schema["run/frame/block0_values"].shape == (2,)


def test_an_index_beside_a_column_of_that_name(tmp_path: Path) -> None:
    frame = FRAME[["pt"]].assign(index=np.arange(ROWS) * 2).set_index(np.arange(ROWS) * 3)
    found = index(str(_write(tmp_path / "a.h5", frame, **FIXED)))
    assert list(found.fields) == ["level_0", "pt", "index"]
    assert same(every_row(found, "index"), np.arange(ROWS) * 2)
    assert same(every_row(found, "level_0"), np.arange(ROWS) * 3)


def test_objects_that_are_no_texts_are_an_error(tmp_path: Path) -> None:
    frame = FRAME[["pt"]].assign(thing=[{"a": i} for i in range(ROWS)])
    path = _write(tmp_path / "a.h5", frame, **FIXED)
    with pytest.warns(UserWarning, match="'thing'"):
        data = open_dataset(path, comm=MPI.COMM_SELF)
    assert list(data.schema) == ["index", "pt"]
    with pytest.raises(FormatError, match="no text"):
        index(str(path), ["thing"])


def test_a_pickle_may_not_run_programs(tmp_path: Path) -> None:
    frame = FRAME[["pt"]].assign(path=[Path("x")] * ROWS)
    with pytest.raises(FormatError, match=r"pathlib"):
        index(str(_write(tmp_path / "a.h5", frame, **FIXED)), ["path"])
