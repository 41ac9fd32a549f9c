"""Derived fields, compared with awkward, NumPy and pandas."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import awkward as ak
import h5py
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from mpi4py import MPI
from numpy.typing import NDArray

from matex_data import DataError, FieldNotFound, FormatError, open_dataset
from matex_data.errors import ArgumentError
from matex_data.transforms.expressions import parse
from tests.support.ranks import Pool
from tests.transforms.events import global_batches, joined, load, write_events

SELF = MPI.COMM_SELF


def _mean(events: ak.Array) -> ak.Array:
    return ak.mean(events["Jet_pt"], axis=1)


DERIVED: dict[str, Any] = {
    "log_met": ("log(MET)", lambda e: np.log(e["MET"])),
    "ht": ("sum(Jet_pt)", lambda e: ak.sum(e["Jet_pt"], axis=1)),
    "hard": ("count(Jet_pt > 30)", lambda e: ak.sum(e["Jet_pt"] > 30, axis=1)),
    "jets": ("count(Jet_pt)", lambda e: ak.num(e["Jet_pt"])),
    "leading": ("max(Jet_pt)", lambda e: ak.fill_none(ak.max(e["Jet_pt"], axis=1), np.nan)),
    "slowest": ("min(Muon_pt)", lambda e: ak.fill_none(ak.min(e["Muon_pt"], axis=1), np.nan)),
    "charge": ("mean(Muon_charge)", lambda e: ak.fill_none(ak.mean(e["Muon_charge"], axis=1), np.nan)),
    "any_hard": ("any(Jet_pt > 30)", lambda e: ak.any(e["Jet_pt"] > 30, axis=1)),
    "all_hard": ("all(Jet_pt > MET)", lambda e: ak.all(e["Jet_pt"] > ak.values_astype(e["MET"], "f8"), axis=1)),
    "norm": ("sqrt(sum(vertex ** 2))", lambda e: np.linalg.norm(ak.to_numpy(e["vertex"]), axis=1)),
    "shifted": ("vertex - MET", lambda e: ak.to_numpy(e["vertex"]) - ak.to_numpy(e["MET"])[:, None]),
    "spread": ("sum((Jet_pt - mean(Jet_pt)) ** 2)", lambda e: ak.sum((e["Jet_pt"] - _mean(e)) ** 2, axis=1)),
    "ratio": ("ht / (1 + jets)", lambda e: ak.sum(e["Jet_pt"], axis=1) / (1 + ak.num(e["Jet_pt"]))),
    "double_pt": ("Muon_pt * 2", lambda e: e["Muon_pt"] * 2),
    "good": ("(Muon_pt > 3) & (Muon_charge > 0)", lambda e: (e["Muon_pt"] > 3) & (e["Muon_charge"] > 0)),
}  # fmt: skip
EXPRESSIONS = {name: text for name, (text, _) in DERIVED.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def events(folder: Path) -> ak.Array:
    return write_events(folder)


def _schema(comm: MPI.Intracomm, folder: Path) -> dict[str, Any]:
    schema = open_dataset(str(folder), derive=EXPRESSIONS, comm=comm).schema
    return {name: (field.dtype, field.ragged, field.shape) for name, field in schema.items()}


def _check(found: dict[str, Any], events: ak.Array) -> None:
    """Compare derived fields with those that awkward makes of the events."""
    for name in found.keys() & DERIVED.keys():
        expected = DERIVED[name][1](events)
        if found[name].dtype == object:
            assert [row.tolist() for row in found[name]] == ak.to_list(expected)
        else:
            np.testing.assert_allclose(found[name], ak.to_numpy(expected), rtol=2e-7, err_msg=name)


def test_derived_fields_are_those_of_awkward(folder: Path, events: ak.Array, pool: Pool) -> None:
    blocks = pool.run(load, folder, derive=EXPRESSIONS)
    found = joined([block for _, block in blocks])
    assert found.keys() >= DERIVED.keys() and found.keys() >= set(events.fields)
    _check(found, events)
    assert [row.tolist() for row in found["Muon_pt"]] == events["Muon_pt"].to_list()  # a source that is read as well
    for name, (dtype, ragged, shape) in _schema(SELF, folder).items():
        assert found[name].dtype == (object if ragged else dtype) and found[name].shape[1:] == shape
        assert not ragged or {row.dtype for row in found[name]} == {dtype}


def test_types_of_derived_fields(folder: Path, events: ak.Array) -> None:
    types = {name: field[0].name for name, field in _schema(SELF, folder).items()}
    assert types["log_met"] == "float32" and types["norm"] == types["spread"] == "float64"
    assert types["hard"] == "int64" and types["any_hard"] == types["good"] == "bool"
    assert types["charge"] == "float64" and types["double_pt"] == "float32"


@pytest.mark.parametrize("shuffle", [True, "global"])
def test_batches_resume_on_other_ranks(folder: Path, events: ak.Array, ranks: Any, shuffle: Any) -> None:
    options = {
        "derive": EXPRESSIONS,
        "where": "count(Jet_pt > 30) >= 1",
        "inputs": ["ht", "ratio", "double_pt", "number"],
        "targets": "any_hard",
        "weights": "genWeight * ht / 2",
    }
    epochs = {size: ranks(size).run(_batches, folder, shuffle, 0, options) for size in (1, 2, 3)}
    chosen = events[ak.sum(events["Jet_pt"] > 30, axis=1) >= 1]
    order = {size: _joined(by_rank) for size, by_rank in epochs.items()}
    for size in (1, 2, 3):
        assert sorted(order[size]["number"]) == chosen["number"].to_list()
        in_order = events[order[size]["number"]]
        _check(order[size], in_order)
        weights = ak.to_numpy(in_order["genWeight"] * ak.sum(in_order["Jet_pt"], axis=1) / 2)
        np.testing.assert_allclose(order[size]["w"], weights.astype("f4"), rtol=1e-6)
        assert [set(b) for b in _numbers(epochs[size])] == [set(b) for b in _numbers(epochs[1])]
    rest = ranks(2).run(_batches, folder, shuffle, 3, options)
    assert [set(b) for b in _numbers(rest)] == [set(b) for b in _numbers(epochs[3])[3:]]


def _batches(comm: MPI.Intracomm, folder: Path, shuffle: Any, step: int, options: dict[str, Any]) -> list[Any]:
    data = open_dataset(str(folder), comm=comm, **options)
    start = data.state(step) if step else None
    batches = data.batches(12, shuffle=shuffle, seed=3, remainder="keep", start=start)
    return [{**{n: a.copy() for n, a in x.items()}, "any_hard": y.copy(), "w": w.copy()} for x, y, w in batches]


def _numbers(by_rank: Any) -> list[list[int]]:
    return [batch["number"].tolist() for batch in global_batches(by_rank)]


def _joined(by_rank: Any) -> dict[str, NDArray[Any]]:
    return joined(global_batches(by_rank))


def test_derived_fields_take_part_in_all_else(folder: Path, events: ak.Array, pool: Pool) -> None:
    for found in pool.run(_all_else, folder):
        hard = np.asarray(ak.sum(events["Jet_pt"] > 30, axis=1))
        values, counts = np.unique(hard, return_counts=True)
        assert found["counts"] == dict(zip(values.tolist(), counts.tolist(), strict=True))
        assert found["mean"] == pytest.approx(float(ak.mean(ak.sum(events["Jet_pt"], axis=1))))
        for part in found["parts"]:  # half of each class
            assert all(abs(part.get(value, 0) - count / 2) < 1 for value, count in found["counts"].items())


def _all_else(comm: MPI.Intracomm, folder: Path) -> dict[str, Any]:
    data = open_dataset(str(folder), derive=EXPRESSIONS, inputs=["hard", "ht"], comm=comm)
    bare = open_dataset(str(folder), derive=EXPRESSIONS, inputs="number", comm=comm)
    halves = bare.split(0.5, 0.5, stratify="hard", seed=1)  # no field of the batches
    chosen = [set(np.concatenate(comm.allgather(half.load()["number"])).tolist()) for half in halves]
    hard = np.concatenate(comm.allgather(open_dataset(str(folder), derive=EXPRESSIONS, comm=comm).load()["hard"]))
    return {
        "counts": dict(sorted(data.value_counts("hard").items())),
        "mean": float(data.statistics("ht").mean),
        "parts": [dict(zip(*np.unique(hard[sorted(part)], return_counts=True), strict=True)) for part in chosen],
    }


def test_lists_that_are_derived_are_padded_and_flattened(folder: Path, events: ak.Array) -> None:
    made = {"pt2": "Muon_pt ** 2", "good": "Muon_pt > 3"}
    padded = open_dataset(str(folder), derive=made, inputs=["pt2", "good_mask"], pad={"pt2": 4, "good": 4}, comm=SELF)
    expected = ak.fill_none(ak.pad_none(events["Muon_pt"] ** 2, 4, clip=True), 0)
    np.testing.assert_array_equal(padded.load()["pt2"], ak.to_numpy(expected))
    flat = open_dataset(
        str(folder), derive=made, inputs="pt2", targets="good", flatten=["Muon_pt", "pt2", "good"], comm=SELF
    )
    np.testing.assert_array_equal(flat.load()["pt2"], ak.to_numpy(ak.flatten(events["Muon_pt"] ** 2)))
    np.testing.assert_array_equal(flat.load()["good"], ak.to_numpy(ak.flatten(events["Muon_pt"] > 3)))
    windows = open_dataset(str(folder), derive={"m": "MET * 2"}, inputs="m", window=3, comm=SELF)
    met = ak.to_numpy(events["MET"])
    np.testing.assert_array_equal(windows[5], 2 * met[5:8])


def test_sources_are_read_once(folder: Path, events: ak.Array, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["image"] = np.arange(200 * 5000, dtype="f4").reshape(200, 5000)
        file["other"] = np.zeros((200, 5000), "f4")
    data = open_dataset(str(tmp_path / "a.h5"), inputs=["image", "total", "half"], comm=SELF,
                        derive={"total": "sum(image)", "half": "image / 2"})  # fmt: skip
    for batch in data.batches(50, shuffle=True, seed=1):
        np.testing.assert_allclose(batch["total"], batch["image"].sum(axis=1, dtype="f8"), rtol=1e-6)
        np.testing.assert_array_equal(batch["half"], batch["image"] / 2)
    assert data.profile.bytes <= 1.05 * 200 * 5000 * 4
    alone = open_dataset(str(tmp_path / "a.h5"), inputs="total", derive={"total": "sum(image)"}, comm=SELF)
    assert alone._source.row_bytes >= 20_000  # a window is as small as if it had the images


def test_texts_and_categories(tmp_path: Path, pool: Pool) -> None:
    rng = np.random.default_rng(3)
    species = np.array(["Adelie", "Chinstrap", "Gentoo", "Kaiserpinguin ä", ""])
    table = pd.DataFrame({"species": rng.choice(species, 300), "mass": rng.normal(4000, 500, 300).round(1)})
    for number in range(2):
        table[number * 150 : number * 150 + 150].to_csv(tmp_path / f"{number}.csv", index=False)
    where = "(species == 'Adelie') | (species in ['Gentoo', 'Kaiserpinguin ä']) & (mass > 4000)"
    expected = table[(table.species == "Adelie") | table.species.isin(species[2:4]) & (table.mass > 4000)]
    for dtype in ({}, {"dtype": {"species": "category"}}):
        found = pool.run(_masses, tmp_path, where=where, **dtype)
        np.testing.assert_array_equal(np.concatenate(found), expected.mass)
        found = pool.run(_masses, tmp_path, where="species not in ('Adelie', '', 'none')", **dtype)
        np.testing.assert_array_equal(np.concatenate(found), table[~table.species.isin(["Adelie", ""])].mass)
    made = {"is_adelie": "species == 'Adelie'"}
    data = open_dataset(str(tmp_path / "*.csv"), inputs="mass", targets="is_adelie", derive=made, comm=SELF)
    np.testing.assert_array_equal(data[:][1], table.species == "Adelie")


def _masses(comm: MPI.Intracomm, folder: Path, **options: Any) -> NDArray[Any]:
    data = open_dataset(str(folder / "*.csv"), inputs="mass", comm=comm, **options)
    found: NDArray[Any] = data.load()["mass"]
    return found


def test_images_of_netcdf(tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    wind = {name: (("time", "lat", "lon"), rng.normal(size=(30, 4, 5)).astype("f4")) for name in ("u", "v")}
    xr.Dataset(wind).to_netcdf(tmp_path / "a.nc")
    made = {"speed": "sqrt(u ** 2 + v ** 2)", "strongest": "max(speed)", "calm": "all(speed < 3)"}
    data = open_dataset(str(tmp_path / "a.nc"), inputs=["speed", "strongest", "calm"], derive=made, comm=SELF)
    with xr.open_dataset(tmp_path / "a.nc") as file:
        speed = np.hypot(file.u, file.v)
        np.testing.assert_allclose(data[:]["speed"], speed, rtol=1e-6)
        np.testing.assert_allclose(data[:]["strongest"], speed.max(("lat", "lon")), rtol=1e-6)
        np.testing.assert_array_equal(data[:]["calm"], (speed < 3).all(("lat", "lon")))


@pytest.mark.parametrize(
    ("derive", "kind", "text"),
    [
        ({"a": "b", "b": "a * 2"}, FormatError, "a <- b <- a"),
        ({"pt": "pt * 2"}, FormatError, "pt <- pt"),
        ({"number": "MET"}, FormatError, "of this name already"),
        ({"a": "log(METT)"}, FieldNotFound, "'METT'(.*\n)*.*'MET'"),
        ({"a": "Jet_pt + Muon_pt"}, FormatError, "different lengths(.*\n)*.*in 'Jet_pt'"),
        ({"a": 3}, ArgumentError, "a dict of: a text"),
        ({"a": "class * 2"}, FormatError, "in backticks: `class`"),
        ("log(MET)", ArgumentError, "a dict of: a text"),
        ({"a": "vertex + Jet_pt"}, FormatError, "fields of one shape"),
        ({"a": "arctan(MET, nMuon)"}, FormatError, "one argument in arctan"),
        ({"a": "arctan2(MET, nMuon, MET)"}, FormatError, "2 arguments in arctan2"),
        ({"a": "where(MET > 2)"}, FormatError, "3 arguments in where"),
        ({"a": "nMuon ^ 2"}, FormatError, "the operator BitXor"),
    ],
)
def test_no_derived_field(folder: Path, events: ak.Array, derive: Any, kind: type[DataError], text: str) -> None:
    for inputs in (None, ["a", "MET"] if "a" in derive else "MET"):
        with pytest.raises(kind, match=text):
            open_dataset(str(folder), derive=derive, inputs=inputs, comm=SELF).load()


def test_row_of_lists_that_differ(folder: Path, events: ak.Array, pool: Pool) -> None:
    outcomes = pool.outcomes(load, folder, derive={"a": "Jet_pt + Muon_pt"}, inputs="a", timeout=30)
    differ = np.flatnonzero(np.asarray(ak.num(events["Jet_pt"]) != ak.num(events["Muon_pt"])))
    for error in outcomes:
        assert isinstance(error, FormatError) and error.row == differ[0] and error.field == "Muon_pt"
    assert len({str(error) for error in outcomes}) == 1


def test_weights_by_expression_or_name(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for name in ("sig_a", "bkg_a"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"], file["event/weight"], file["event"].attrs["n"] = rng.normal(size=20), rng.normal(size=20), 1
            file["weight"] = np.full(20, 2.0)
    fields = {"label": {"sig*": 1, "bkg*": 0}, "xsec": {"sig*": 0.5, "bkg*": 20.0}}
    options: dict[str, Any] = {"inputs": "x", "targets": "label", "file_fields": fields, "comm": SELF}
    data = open_dataset(str(tmp_path / "*.h5"), weights="`event/weight` * xsec", **options)
    named = open_dataset(str(tmp_path / "*.h5"), weights="event/weight", **options)
    _, y, w = data[:]
    np.testing.assert_allclose(w, named[:][2] * np.where(y == 1, 0.5, 20), rtol=1e-6)
    assert open_dataset(str(tmp_path / "*.h5"), weights="xsec", **options)[0][2] == 20
    everything = open_dataset(str(tmp_path / "*.h5"), weights="2 * weight", comm=SELF)
    assert everything[0]["sample_weight"] == 4
    for weights, text in (("wieght * xsec", "'weight'"), ("lgo(weight)", "'log'"), ("wei ght", "'weight'")):
        with pytest.raises(DataError, match=text):
            open_dataset(str(tmp_path / "*.h5"), weights=weights, **options)


def test_fields_of_an_expression_are_named_once() -> None:
    expression = parse("sum(a > 1) / count(a) + sum(a > 1) + b")
    assert expression.fields == ["a", "b"] and expression.outside == ["b"]


def test_derived_fields_have_the_order_in_which_they_are_given() -> None:
    derive = {"a": "x + 1", "b": "2 * a", "c": "x + 3"}
    assert list(open_dataset({"x": np.arange(3.0)}, derive=derive, comm=MPI.COMM_SELF).schema) == ["x", "a", "b", "c"]


def test_a_field_of_the_name_of_the_missing_number_stands_in_backticks() -> None:
    arrays = {"x": np.array([1.0, 2.0]), "nan": np.array([3.0, 4.0])}
    for derive in ("x + nan", "where(x > 1, x, nan)"):
        with pytest.raises(FormatError, match=r"(?s)missing number, which is a field, too.*write `nan`"):
            open_dataset(arrays, comm=SELF, inputs="x", derive={"y": derive})
    with pytest.raises(FormatError, match=r"(?s)without a field.*in backticks: `nan`"):
        open_dataset(arrays, comm=SELF, where="nan > 3")
    with pytest.raises(FormatError, match="which is a field, too"):
        open_dataset(arrays, comm=SELF).where("x > nan")
    found = open_dataset(arrays, comm=SELF, derive={"y": "x + `nan`"}, where="`nan` > 3").load()
    assert found["y"].tolist() == [6.0]
    assert np.isnan(open_dataset({"x": np.ones(1)}, comm=SELF, derive={"y": "x + nan"}).load()["y"]).all()


def test_numbers_of_samples_that_no_function_asks_for_take_no_memory(tmp_path: Path) -> None:
    rows = 1 << 20
    np.save(tmp_path / "flags.npy", np.ones(rows, np.int8))
    data = open_dataset(tmp_path / "flags.npy", comm=SELF, derive={"next": "data + 1"})
    tracemalloc.start()
    try:
        assert next(iter(data.batches(1024)))["next"].tolist() == [2] * 1024
        assert tracemalloc.get_traced_memory()[1] < 40 * rows  # with the number of each sample it was 56 bytes
    finally:
        tracemalloc.stop()
