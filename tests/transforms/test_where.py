"""Events selected by an expression, compared with boolean masks of awkward and NumPy."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import awkward as ak
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mpi4py import MPI

from matex_data import DataError, FieldNotFound, FormatError, PartitionError, open_dataset
from matex_data.index.runs import Chosen
from matex_data.io.counters import process_profile
from matex_data.transforms import select
from matex_data.transforms.evaluation import Values, evaluate
from matex_data.transforms.expressions import parse
from tests.support.ranks import Pool
from tests.transforms.events import global_batches, joined, load, read, write_events

SELF = MPI.COMM_SELF
CONDITIONS = {
    "nMuon >= 2": lambda e: e["nMuon"] >= 2,
    "(MET > 30.1) & (nMuon < 4)": lambda e: (ak.values_astype(e["MET"], "f8") > 30.1) & (e["nMuon"] < 4),
    "(`jets/pt` > 0) | ~(MET**2 < sqrt(400))": lambda e: (e["jets/pt"] > 0) | ~(e["MET"] ** 2 < 20),
    "where(nMuon == 1, MET, -MET) > 0": lambda e: (e["nMuon"] == 1) & (e["MET"] > 0),
    "nMuon / 2 > 1.4": lambda e: e["nMuon"] / 2 > 1.4,  # no division of integers
    "nMuon % 2 == 1": lambda e: e["nMuon"] % 2 == 1,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def events(folder: Path) -> ak.Array:
    return write_events(folder)


@pytest.mark.parametrize("where", CONDITIONS)
def test_selected_events(folder: Path, events: ak.Array, pool: Pool, where: str) -> None:
    chosen = events[CONDITIONS[where](events)]
    assert 0 < len(chosen) < len(events)
    blocks = pool.run(load, folder, where=where)
    assert {samples for samples, _ in blocks} == {len(chosen)}
    found = joined([block for _, block in blocks])
    for name in ("number", "MET", "jets/pt"):
        np.testing.assert_array_equal(found[name], ak.to_numpy(chosen[name]))
    assert [row.tolist() for row in found["Muon_pt"]] == chosen["Muon_pt"].to_list()


def test_batches_of_selected_events(folder: Path, events: ak.Array, ranks: Any) -> None:
    options = {"where": "nMuon >= 2", "pad": {"Muon_pt": 3}, "inputs": ["Muon_pt", "number"]}  # nMuon is not requested
    chosen = ak.to_numpy(events["number"][events["nMuon"] >= 2])
    by_rank = {size: ranks(size).run(read, folder, **options) for size in (1, 3)}
    assert set(by_rank[3][0][0]) == {"Muon_pt", "number"}
    assert len({len(batches) for batches in by_rank[3]}) == 1
    alone, shared = (global_batches(batches) for batches in by_rank.values())
    for one, other in zip(alone, shared, strict=True):
        np.testing.assert_array_equal(np.sort(one["number"]), np.sort(other["number"]))
    numbers = joined(shared[: len(shared) // 2])["number"]
    np.testing.assert_array_equal(np.sort(numbers), chosen)
    rest = global_batches(ranks(3).run(read, folder, step=2, **options))
    np.testing.assert_array_equal(np.sort(rest[0]["number"]), np.sort(alone[2]["number"]))


def test_splits_of_selected_events(folder: Path, events: ak.Array) -> None:
    first, second = open_dataset(str(folder), where="nMuon >= 2", comm=SELF).split(0.5, 0.5, seed=1)
    numbers = np.concatenate([first.load()["number"], second.load()["number"]])
    np.testing.assert_array_equal(np.sort(numbers), ak.to_numpy(events["number"][events["nMuon"] >= 2]))


def test_selected_events_without_missing_numbers(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(2, 200))
    x[rng.random(200) < 0.2] = np.nan
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["y"] = x, y
    data = open_dataset(tmp_path / "a.h5", where="y > 0", missing="drop", comm=SELF)
    np.testing.assert_array_equal(data.load()["x"], x[(y > 0) & ~np.isnan(x)])


def test_a_field_that_is_called_nan(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", nan=np.arange(6), x=np.ones(6))
    data = open_dataset(tmp_path / "a.npz", where="(`nan` + x) in [1, 2, 5]", comm=SELF)
    np.testing.assert_array_equal(data.load()["nan"], [0, 1, 4])


def test_only_the_columns_are_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"], file["large"] = np.arange(1000.0), np.zeros((1000, 100))
    before = process_profile().bytes
    assert len(open_dataset(tmp_path / "a.h5", where="x < 10", comm=SELF)) == 10
    assert process_profile().bytes - before == 8000


def test_nothing_selected(folder: Path, events: ak.Array, pool: Pool) -> None:
    for samples, block in pool.run(load, folder, where="MET < 0"):
        assert samples == 0 and len(block["MET"]) == 0


@pytest.mark.parametrize("dtype", ["i1", "u2", "u4", "u8", "f2", "f4", "?"])
def test_columns_of_any_dtype(tmp_path: Path, dtype: str) -> None:
    values = np.random.default_rng(2).integers(0, 100, 300).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = values
    where = "x" if dtype == "?" else "x * x > 2500"  # of int8: no overflow
    expected = values if dtype == "?" else values.astype("f8") ** 2 > 2500
    np.testing.assert_array_equal(open_dataset(tmp_path / "a.h5", where=where, comm=SELF).load()["x"], values[expected])


@pytest.mark.parametrize(
    ("where", "kind", "text"),
    [
        ("nMoun > 1", FieldNotFound, "'nMoun'(.*\n)*.*'nMuon'"),
        ("jets / pt > 1", FieldNotFound, "'jets'(.*\n)*.*backticks: `jets/pt`"),
        ("Muon_pt > 3", FormatError, "'Muon_pt' is float32 .*ragged.*\n.*count"),
        ("vertex > 0", FormatError, "'vertex' is float64 of shape"),
        ("MET > 30 & nMuon < 4", FormatError, "parentheses"),
        ("MET > 30 and nMuon < 4", FormatError, "with & | ~"),
        ("nMuon", FormatError, "values of int64 of shape"),
        ("MET.real > 1", FormatError, "MET.real"),
        ("sum(MET) > 1", FormatError, "several numbers for each sample"),
        ("max(MET, nMuon) > 1", FormatError, "where.a > b, a, b"),
        ("any(Jet_pt)", FormatError, "any.Jet_pt > 30"),
        ("MET +", FormatError, "max.MET. > 30"),  # examples have names of this user
        ("MET > 1e18 +", FormatError, "MET > 30. & .MET < 40"),  # 1e18 has no name
        ("(nMuon > 1) & vertex +", FormatError, "nMuon > 30. & .vertex < 40"),
        ("Muon_pt[nMuon] > 1", FormatError, "Muon_pt.Muon_pt > 30"),
        ("count(Jet_pt > Muon_pt) > 0", FormatError, "row 0.*(.*\n)*.*elements, as in 'Jet_pt'"),
        ("count(Jet_pt > vertex) > 0", FormatError, "'vertex' of shape"),
        ("`jets/pt > 1", FormatError, "invalid syntax"),
        ("2 > 1", FormatError, "without a field"),
        ("", FormatError, "invalid syntax"),
        ("(lambda: MET)() > 1", FormatError, "the syntax"),
        ("__import__('os').system('true')", FormatError, "the syntax"),
        ("MET > [x for x in (1,)][0]", FormatError, "the syntax"),
        ("sqr(MET) > 1", FormatError, "'sqrt'"),
        ("MET == '1'", FormatError, "one text for each sample"),
        ("MET + '1' > 3", FormatError, "field == 'text'"),
    ],
)
def test_no_condition(folder: Path, events: ak.Array, where: str, kind: type[DataError], text: str) -> None:
    with pytest.raises(kind, match=text):
        open_dataset(str(folder), where=where, comm=SELF)


def test_windows_need_consecutive_events(folder: Path, events: ak.Array) -> None:
    with pytest.raises(PartitionError, match="window= and where= exclude each other"):
        open_dataset(str(folder), where="MET > 1", window=3, comm=SELF)


def test_what_the_error_of_integers_beyond_int64_advises_selects_them() -> None:
    data = open_dataset({"id": np.array([1, 2**63 + 5, 2**64 - 1], np.uint64)}, comm=SELF)
    with pytest.raises(FormatError, match=r"by data\.map\(function\)"):
        data.where("id > 5")
    selected = data.map(lambda batch: {**batch, "large": batch["id"] > np.uint64(2**63 + 5)}).where("large")
    assert selected.load()["id"].tolist() == [2**64 - 1]


def _open(comm: MPI.Intracomm, path: Path, **options: Any) -> None:
    open_dataset(str(path), comm=comm, **options)


def test_numbers_that_do_not_fit_are_the_same_error_everywhere(tmp_path: Path, pool: Pool) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.array([*range(100), 2**63], "u8")  # in the block of the last rank alone
    outcomes = pool.outcomes(_open, tmp_path / "a.h5", where="x > 3", timeout=30)
    assert all(isinstance(error, FormatError) for error in outcomes)
    assert len({str(error) for error in outcomes}) == 1 and str(2**63) in str(outcomes[0])


def test_a_damaged_column_is_the_same_error_everywhere(tmp_path: Path, pool: Pool) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=np.arange(1000.0), chunks=(100,), compression="gzip")
        where = file["x"].id.get_chunk_info(9).byte_offset
    with (tmp_path / "a.h5").open("r+b") as raw:
        raw.seek(where)
        raw.write(b"damage")
    outcomes = pool.outcomes(_open, tmp_path / "a.h5", where="x > 3", timeout=30)
    assert all(isinstance(error, DataError) and error.field == "x" for error in outcomes)
    assert len({str(error) for error in outcomes}) == 1


def test_names_in_backticks_are_taken_as_they_are() -> None:
    expression = parse("(`Muon.pt` > 3) & (`a b` + quoted_0 + `quoted_0` < `class`) & (sin(sin_) > 0)")
    assert expression.fields == ["Muon.pt", "a b", "quoted_0", "class", "sin_"]
    fields = {name: Values(np.arange(3.0)) for name in expression.fields}
    assert evaluate(expression, fields).content.tolist() == [False, False, False]
    assert parse("\N{MICRO SIGN} > `\N{MICRO SIGN}/s`").fields == ["\N{MICRO SIGN}", "\N{MICRO SIGN}/s"]


@pytest.mark.parametrize("text", ["'a`b`c'", '"a`b`c"', r"'a\'`b`'"])
def test_backticks_in_texts_are_texts(text: str) -> None:
    content = np.array([ast.literal_eval(text), "z"])
    fields = {"it's": Values(content)}
    assert evaluate(parse(f"`it's` == {text}"), fields).content.tolist() == [True, False]


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
@pytest.mark.parametrize(
    "where",
    ["x == 0.1", "x != 0.1", "x <= 0.1", "0.1 >= x", "x > 0.3", "-x == -0.1", "(x > 0.1) & (n == 16777217)", "x == n"],
)
def test_numbers_are_compared_in_the_floats_of_numpy(tmp_path: Path, dtype: str, where: str) -> None:
    x = np.array([0.1, 0.2, 0.3, 0.4, 60000 if dtype == "f2" else 1 << 24], dtype)
    n = np.array([16777216, 16777217, 16777217, 0, 16777217])
    columns = {"x": pa.array(x.astype("f4") if dtype == "f2" else x), "n": pa.array(n)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=1)  # row groups are ruled out by bounds
    expected = np.flatnonzero(eval(where, {"x": x, "n": n}))
    files: Any = {"x": x, "n": n} if dtype == "f2" else tmp_path / "a.parquet"
    found = open_dataset(files, where=where, comm=SELF).load()
    np.testing.assert_array_equal(found["x"], x[expected])


def _selected(comm: MPI.Intracomm, path: str, bits: bool) -> list[Any]:
    """Return all that a data set of selected samples gives, with the selection as bits or as runs."""
    most, select.MOST_RUNS = select.MOST_RUNS, 0 if bits else 1 << 40
    try:
        data = open_dataset(path, comm=comm, where="(n % 3 > 0) & (n % 7 < 5)", missing="drop", block_bytes=100)
    finally:
        select.MOST_RUNS = most
    assert isinstance(data._samples, Chosen) == bits
    first, second = data.split(0.7, 0.3, seed=4)
    early, late = data.split(0.5, 0.5, gap=2)
    found: list[Any] = [len(data), data.load()["n"].tolist(), float(data.statistics("x").mean)]
    in_turn, windows, mixed = {}, {"shuffle": True, "seed": 3}, {"shuffle": "global", "seed": 3}
    for subset, options in ((data, windows), (first, mixed), (second, in_turn), (early, mixed), (late, windows)):
        batches = subset.batches(12, remainder="keep", **options)
        found += [[batch["n"].tolist() for batch in batches] for _ in range(2)]
        found.append({k: v for k, v in batches.state(3).items() if k not in ("digest", "blocks")})
        rest = subset.batches(12, remainder="keep", start=batches.state(3), **options)
        found.append([batch["n"].tolist() for batch in rest] == found[-3][3:])
    found.append(data.read_plan(12, ranks=2).bytes_read)
    return found


def test_selections_of_many_runs(pool: Pool, tmp_path: Path) -> None:
    """A selection in bits gives the same batches, splits, and states as one in runs, on any number of ranks."""
    for number, rows in enumerate((200, 150, 333)):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["n"] = np.arange(rows) + 1000 * number
            x = np.arange(rows, dtype="f4")
            x[::11] = np.nan
            file["x"] = x
    in_bits, in_runs = (pool.run(_selected, str(tmp_path / "*.h5"), bits) for bits in (True, False))
    assert in_bits == in_runs
    assert not any(False in of_rank for of_rank in in_bits)  # runs that go on from a state
    numbers = np.concatenate([np.arange(rows) + 1000 * number for number, rows in enumerate((200, 150, 333))])
    kept = (numbers % 3 > 0) & (numbers % 7 < 5) & (numbers % 1000 % 11 > 0)
    assert [n for of_rank in in_bits for n in of_rank[1]] == numbers[kept].tolist()


BEAM = {
    "files": {"ebeam/photonEnergy": np.arange(12.0), "pt": np.arange(12.0) * 6, "mass": np.full(12, 2.0)},
    "both": {"a": np.arange(12.0), "b": np.full(12, 2.0), "a/b": np.arange(12.0)},
}


def _by_path(comm: MPI.Intracomm, path: str, case: str, where: str, method: bool) -> tuple[list[float], str]:
    source: Any = BEAM["both"] if case == "both" else path
    name = "a" if case == "both" else "pt"
    try:
        if method:
            data = open_dataset(source, comm=comm).where(where)
        else:
            data = open_dataset(source, inputs=name, derive={"half": where.partition(">")[0]}, where=where, comm=comm)
    except FormatError as error:
        return [], str(error)
    return data.load()[name].tolist(), ""


@pytest.mark.parametrize("method", [False, True])
@pytest.mark.rank_counts(1, 2)
def test_names_with_slashes_are_fields_and_else_divisions(pool: Pool, tmp_path: Path, method: bool) -> None:
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        for name, values in BEAM["files"].items():
            file[name] = values
    for where, kept in {
        "ebeam/photonEnergy > 9": [60.0, 66.0],
        "ebeam/photonEnergy*pt/mass > 300": [66.0],
        "pt/mass > 27": [60.0, 66.0],
        "pt/ebeam/photonEnergy/2 > 2.5": [6.0 * i for i in range(1, 12)],
        "`ebeam/photonEnergy` > 9": [60.0, 66.0],
    }.items():
        by_rank = pool.run(_by_path, path, "files", where, method)
        assert [value for values, _ in by_rank for value in values] == kept, (where, by_rank)
    for where, kept in {"a / b > 4": [9.0, 10.0, 11.0], "`a/b` > 8": [9.0, 10.0, 11.0]}.items():
        assert [value for values, _ in pool.run(_by_path, "", "both", where, method) for value in values] == kept
    for _, error in pool.run(_by_path, "", "both", "a/b > 8", method):
        assert "two meanings" in error and "found: a/b or `a/b`" in error and "`a/b` for the field, and a / b" in error
