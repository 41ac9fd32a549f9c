"""Padded fields and their masks, compared with awkward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from matex_data import DataError, FieldNotFound, FormatError, PartitionError, merge, open_dataset
from matex_data.transforms.pad import descending
from tests.support.ranks import Pool
from tests.transforms.events import global_batches, joined, load, read, write_events

SELF = MPI.COMM_SELF


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def events(folder: Path) -> ak.Array:
    return write_events(folder)


def _padded(values: ak.Array, length: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the dense samples and the mask as awkward makes them."""
    dense = ak.pad_none(values, length, clip=True)
    real = ak.to_numpy(ak.is_none(dense, axis=1))
    return ak.to_numpy(ak.fill_none(dense, 0)).astype(ak.to_numpy(ak.flatten(values)).dtype), ~real


def _sorted(events: ak.Array, name: str, key: str) -> ak.Array:
    return events[name][ak.argsort(events[key], ascending=False, stable=True)]


@pytest.mark.parametrize("length", [1, 3, 9])
@pytest.mark.parametrize("keep", ["first", "Muon_pt", {"Muon_*": "Muon_charge"}])
def test_samples_and_masks(folder: Path, events: ak.Array, pool: Pool, length: int, keep: Any) -> None:
    pad = {"Muon_*": length} if isinstance(keep, str) else {"Muon_*": length, "Jet_pt": 2}
    by_rank = pool.run(read, folder, pad=pad, keep=keep)
    loaded = pool.run(load, folder, pad=pad, keep=keep)
    key = {"first": None, "Muon_pt": "Muon_pt"}.get(keep, "Muon_charge") if isinstance(keep, str) else "Muon_charge"
    for found in (joined(global_batches(by_rank)), joined([block for _, block in loaded])):
        for name in ("Muon_pt", "Muon_charge"):
            dense, mask = _padded(events[name] if key is None else _sorted(events, name, key), length)
            np.testing.assert_array_equal(found[name], dense[found["number"]])
            np.testing.assert_array_equal(found[name + "_mask"], mask[found["number"]])
            assert found[name].dtype == dense.dtype and found[name + "_mask"].dtype == bool
    if "Jet_pt" in pad:
        np.testing.assert_array_equal(found["Jet_pt"], _padded(events["Jet_pt"], 2)[0][found["number"]])


def _positions(comm: MPI.Intracomm, path: str) -> list[Any]:
    data = open_dataset(path, inputs=["positions", "positions_mask"], pad={"positions": 4}, comm=comm)
    assert data.schema["positions"].shape == (4, 3) and not data.schema["positions"].ragged
    return list(data.batches(12, remainder="keep"))


def test_lists_of_arrays_such_as_positions_of_atoms(tmp_path: Path, pool: Pool) -> None:
    ase, write = pytest.importorskip("ase"), pytest.importorskip("ase.io").write
    rng = np.random.default_rng(3)
    frames = [ase.Atoms("H" * count, rng.normal(size=(count, 3))) for count in (2, 4, 1, 6, 3, 2) * 3]
    write(tmp_path / "frames.extxyz", frames)
    for batches in zip(*pool.run(_positions, str(tmp_path / "frames.extxyz")), strict=True):
        found = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
        for own, mask, atoms in zip(found["positions"], found["positions_mask"], frames, strict=False):
            kept = min(4, len(atoms))
            np.testing.assert_allclose(own[:kept], atoms.positions[:4], atol=1e-7)
            assert mask.sum() == kept and not own[kept:].any()
        frames = frames[len(found["positions"]) :]
    assert not frames


def test_batches_do_not_depend_on_the_ranks_and_resume(folder: Path, events: ak.Array, ranks: Any) -> None:
    options = {"pad": {"Muon_*": 3}, "inputs": ["number", "Muon_pt"]}
    alone = global_batches(ranks(1).run(read, folder, **options))
    steps = len(alone) // 2
    rest = global_batches(ranks(3).run(read, folder, step=steps + 2, **options))
    for one, other in zip(alone[steps + 2 :], rest, strict=False):
        for name in one:
            np.testing.assert_array_equal(np.sort(one["number"]), np.sort(other["number"]))
            order = np.argsort(other["number"])[np.argsort(np.argsort(one["number"]))]
            np.testing.assert_array_equal(one[name], other[name][order])


def test_fields_and_masks_by_name(folder: Path, events: ak.Array) -> None:
    data = open_dataset(str(folder), pad={"Muon_*": 4}, inputs="Muon_pt", targets=["MET", "Muon_pt_mask"], comm=SELF)
    assert set(data.schema) == {"Muon_pt", "Muon_pt_mask", "MET"}
    assert data.schema["Muon_pt"].shape == (4,) and not data.schema["Muon_pt"].ragged


def test_element_specs(folder: Path, events: ak.Array) -> None:
    data = open_dataset(str(folder), inputs=["Muon_pt", "Muon_pt_mask", "Jet_pt"], pad={"Muon_pt": 4}, comm=SELF)
    spec = data.tf_dataset(8).element_spec
    assert spec["Muon_pt"].shape == (8, 4) and spec["Muon_pt_mask"].dtype.name == "bool"
    assert type(spec["Jet_pt"]).__name__ == "RaggedTensorSpec"
    batch, expected = next(iter(data.tf_dataset(8))), _padded(events["Muon_pt"], 4)
    np.testing.assert_array_equal(batch["Muon_pt"].numpy(), expected[0][:8])
    np.testing.assert_array_equal(batch["Muon_pt_mask"].numpy(), expected[1][:8])


def test_a_stack_of_fields_and_a_mask(folder: Path, events: ak.Array) -> None:
    names = ["Muon_pt", "Muon_charge", "Muon_pt_mask"]
    data = open_dataset(str(folder), inputs=names, targets="MET", pad={"Muon_*": 4}, stack=True, comm=SELF)
    x, _ = next(iter(data.batches(50)))
    pt, mask = _padded(events["Muon_pt"], 4)
    np.testing.assert_array_equal(x, np.stack([pt, _padded(events["Muon_charge"], 4)[0], mask], -1)[:50])


def test_numbers_for_missing_ones_leave_the_mask(tmp_path: Path) -> None:
    events = write_events(tmp_path)
    data = open_dataset(str(tmp_path), pad={"Muon_*": 4}, missing=0.5, comm=SELF)
    np.testing.assert_array_equal(data.load()["Muon_pt_mask"], _padded(events["Muon_pt"], 4)[1])


def test_the_masks_of_two_options_are_an_error(folder: Path, events: ak.Array) -> None:
    with pytest.raises(FormatError, match=r"name of a mask .*'Muon_pt_mask'(.*\n)*.*with pad="):
        open_dataset(str(folder), pad={"Muon_*": 4}, missing="mask", comm=SELF)


def _error(comm: MPI.Intracomm, folder: Path, **options: Any) -> None:
    for _ in open_dataset(str(folder), comm=comm, **options).batches(24):
        pass


def test_other_lengths_than_those_to_sort_by(folder: Path, events: ak.Array, pool: Pool) -> None:
    outcomes = pool.outcomes(_error, folder, pad={"Muon_*": 2, "Jet_pt": 2}, keep="Muon_pt")
    assert len({str(error) for error in outcomes}) == 1
    assert isinstance(outcomes[0], FormatError) and outcomes[0].field == "Jet_pt"
    row = outcomes[0].row
    assert row is not None and str(outcomes[0].file).endswith("0.h5")
    muons, jets = len(events["Muon_pt"][row]), len(events["Jet_pt"][row])
    assert muons != jets
    assert f"{muons} elements, as in 'Muon_pt'" in str(outcomes[0]) and f"{jets} elements in 'Jet_pt'" in str(
        outcomes[0]
    )


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"pad": {"Muon_*": 0}}, PartitionError, "lengths of 1 or more"),
        ({"pad": ["Muon_pt"]}, PartitionError, "a dict of: an integer"),
        ({"pad": {"Muno_pt": 3}}, FieldNotFound, "'Muno_pt'(.*\n)*.*'Muon_pt'"),
        ({"pad": {"MET": 3}}, FieldNotFound, r"float32 of shape \(\)"),
        ({"pad": {"Muon_pt": 3}, "inputs": "MET"}, FieldNotFound, "among the fields that are read"),
        ({"pad": {"Muon_pt": 3}, "keep": "MET"}, FieldNotFound, "keep= names no field"),
        ({"keep": "Muon_pt"}, PartitionError, "keep= is a rule for pad="),
    ],
)
def test_wrong_options(folder: Path, events: ak.Array, options: Any, kind: type[DataError], text: str) -> None:
    with pytest.raises(kind, match=text):
        open_dataset(str(folder), comm=SELF, **options)


def _open_with_lengths(comm: MPI.Intracomm, folder: Path) -> None:
    open_dataset(str(folder), pad={"Muon_pt": 3 + comm.rank}, comm=comm)


@pytest.mark.rank_counts(3)
def test_ranks_with_other_lengths(folder: Path, events: ak.Array, pool: Pool) -> None:
    outcomes = pool.outcomes(_open_with_lengths, folder)
    assert all(isinstance(error, PartitionError) and "pad={'Muon_pt': 4}" in str(error) for error in outcomes)


@pytest.mark.parametrize("dtype", ["i1", "u8", "i8", "f4", "?"])
def test_descending_order_is_that_of_awkward(dtype: str) -> None:
    rng = np.random.default_rng(1)
    counts = rng.integers(0, 7, 200)
    values = rng.integers(0, 256, (counts.sum(), 8)).astype("u1").view("i8").ravel()
    values = (values & 1).astype(bool) if dtype == "?" else (values >> (0 if dtype[1] == "8" else 60)).astype(dtype)
    expected = ak.argsort(ak.unflatten(values, counts), ascending=False, stable=True)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    np.testing.assert_array_equal(descending(values, counts), ak.to_numpy(ak.flatten(expected)) + first)


def test_missing_numbers_are_last() -> None:
    assert descending(np.array([np.nan, -np.inf, 2.0]), np.array([3])).tolist() == [2, 1, 0]


@pytest.mark.parametrize("length", [2, 3])
def test_padding_does_not_count(length: int) -> None:
    lists = [[10, 20], [20, 30, 40], []]
    kept = [value for row in lists for value in row[:length]]
    data = open_dataset({"pt": lists}, inputs="pt", pad={"pt": length}, comm=SELF)
    found = data.statistics("pt")
    assert (found.mean, found.std, found.count, found.missing) == (np.mean(kept), np.std(kept), len(kept), 0)
    by_position = [np.mean([row[at] for row in lists if at < len(row)]) for at in range(length)]
    assert data.statistics("pt", axis=-1).mean.tolist() == by_position
    assert data.value_counts("pt") == {value: kept.count(value) for value in sorted(kept, key=lambda v: -kept.count(v))}
    assert 0 not in data.class_weights("pt")
    windows = [value for at in (0, 1, 1, 2) for value in lists[at][:length]]
    assert data.window(2).statistics("pt").mean == np.mean(windows)


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_padding_does_not_count_for_what_replaces_missing_values(rule: str) -> None:
    lists = [[10.0, 20.0], [20.0, 30.0, np.nan], []]
    data = open_dataset({"pt": lists}, inputs="pt", pad={"pt": 3}, missing={"pt": rule}, comm=SELF)
    assert data.load()["pt"].tolist() == [[10, 20, 0], [20, 30, 20], [0, 0, 0]]
    assert data.statistics("pt").missing == 1
    assert len(open_dataset({"pt": lists}, pad={"pt": 3}, missing="drop", comm=SELF)) == 2


def test_a_field_that_files_have_is_no_mask(tmp_path: Path) -> None:
    arrays = {"x": np.array([[1.0, np.nan], [2.0, 3.0]]), "x_mask": np.array([[5, 6], [7, 8]]), "pt": [[1], [2, 3]]}
    arrays["pt_mask"] = np.array([3, 4])
    padded = open_dataset(arrays, inputs="pt", targets="pt_mask", pad={"pt": 2}, comm=SELF)
    assert padded.load()["pt_mask"].tolist() == [3, 4]
    for rule in (0.0, "mean"):
        filled = open_dataset(arrays, inputs="x", targets="x_mask", missing={"x": rule}, comm=SELF)
        assert filled.load()["x_mask"].tolist() == [[5, 6], [7, 8]]
    with pytest.raises(FormatError, match="name of a mask"):
        open_dataset(arrays, inputs="x", targets="x_mask", missing="mask", comm=SELF)


def test_padding_is_normalized_by_values_alone() -> None:
    data = open_dataset({"pt": [[10, 20], [20, 30, 40], []]}, inputs="pt", pad={"pt": 4}, comm=SELF)
    normalized = np.asarray(data.normalization("pt")(data.load()["pt"]))
    expected = [[-1, -1, -40, 0], [1, 1, 0, 0], [-3, -5, -40, 0]]  # one value and none: the variance is 1
    np.testing.assert_allclose(normalized, expected, atol=1e-5)


def test_padding_does_not_count_beside_missing_counterparts() -> None:
    first = open_dataset({"k": np.arange(4), "x": np.arange(4)}, inputs="x", comm=SELF)
    second = open_dataset({"k": np.arange(2), "pt": [[1, 2], [3]]}, inputs="pt", pad={"pt": 3}, comm=SELF)
    found = merge(first, second, on="k", how="left").statistics("pt")
    assert (found.mean, found.count, found.missing) == (2, 3, 0)
