"""Objects as samples, compared with awkward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import awkward as ak
import h5py
import numpy as np
import pytest
from mpi4py import MPI

from matex_data import FieldNotFound, FormatError, PartitionError, open_dataset
from matex_data.readers.hdf5.reader import PROBE_ROWS
from matex_data.readers.hdf5.rows import Hdf5Rows
from tests.support.ranks import Pool
from tests.transforms.events import LENGTHS, Batch, global_batches, joined, load, read, write_events

SELF = MPI.COMM_SELF


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("events")


@pytest.fixture(scope="module")
def events(folder: Path) -> ak.Array:
    return write_events(folder)


def _flat(events: ak.Array) -> dict[str, Any]:
    """Return the objects as awkward flattens them, with the fields of their events."""
    numbers = ak.flatten(ak.broadcast_arrays(events["number"], events["Muon_pt"])[0])
    event = ak.to_numpy(numbers) - int(events["number"][0] if len(events) else 0)
    flat = {name: ak.to_numpy(ak.flatten(events[name])) for name in ("Muon_pt", "Muon_charge")}
    return {**flat, **{name: ak.to_numpy(events[name])[event] for name in ("MET", "number", "vertex")}, "event": event}


@pytest.mark.parametrize("flatten", ["Muon_*", ["Muon_pt", "Muon_charge"]])
def test_objects_in_order(folder: Path, events: ak.Array, pool: Pool, flatten: Any) -> None:
    expected = _flat(events)
    blocks = pool.run(load, folder, flatten=flatten)
    assert {samples for samples, _ in blocks} == {len(expected["Muon_pt"])}
    found = joined([block for _, block in blocks])
    for name in ("Muon_pt", "Muon_charge", "MET", "number", "vertex"):
        np.testing.assert_array_equal(found[name], expected[name])
        assert found[name].dtype == expected[name].dtype
    for jets, event in zip(found["Jet_pt"], expected["event"], strict=True):
        assert np.array_equal(jets, ak.to_numpy(events["Jet_pt"][event]))


def test_every_object_once_in_an_epoch(folder: Path, events: ak.Array, ranks: Any) -> None:
    expected = _flat(events)
    order = np.lexsort([expected[name] for name in ("Muon_charge", "Muon_pt", "number")])
    runs = [global_batches(ranks(size).run(read, folder, flatten="Muon_*", pad={"Jet_*": 2})) for size in (1, 3)]
    for batches in runs:
        epoch = joined(batches[: len(batches) // 2])
        found = np.lexsort([epoch[name] for name in ("Muon_charge", "Muon_pt", "number")])
        for name in ("Muon_pt", "Muon_charge", "MET", "number", "vertex"):
            np.testing.assert_array_equal(epoch[name][found], expected[name][order])
    for one, other in zip(*runs, strict=True):
        np.testing.assert_array_equal(np.sort(one["number"]), np.sort(other["number"]))


def _global_order(comm: MPI.Intracomm, folder: Path, opened: Any, shuffle: Any) -> list[Batch]:
    data = open_dataset(str(folder), comm=comm, **opened)
    return [{n: a.copy() for n, a in batch.items()} for batch in data.batches(24, shuffle=shuffle, seed=1)]


@pytest.mark.parametrize(("cache", "shuffle"), [("memory", True), (None, "global")])
@pytest.mark.parametrize("options", [{"flatten": "Muon_*"}, {"pad": {"Muon_*": 2}}])
def test_every_kind_of_shuffle(
    folder: Path, events: ak.Array, ranks: Any, cache: Any, shuffle: Any, options: Any
) -> None:
    opened = {"inputs": ["Muon_pt", "Muon_charge", "number"], "cache": cache, **options}
    runs = [global_batches(ranks(size).run(_global_order, folder, opened, shuffle)) for size in (1, 3)]
    for one, other in zip(*runs, strict=True):
        for name in ("Muon_pt", "Muon_charge", "number"):
            np.testing.assert_array_equal(np.sort(one[name], axis=None), np.sort(other[name], axis=None))


def test_resume_on_another_number_of_ranks(folder: Path, events: ak.Array, ranks: Any) -> None:
    options = {"flatten": "Muon_*", "where": "nMuon > 1", "inputs": ["Muon_pt", "number"]}
    alone = global_batches(ranks(1).run(read, folder, **options))
    steps = len(alone) // 2
    rest = global_batches(ranks(3).run(read, folder, step=steps + 3, **options))
    for one, other in zip(alone[steps + 3 :], rest, strict=False):
        np.testing.assert_array_equal(np.sort(one["Muon_pt"]), np.sort(other["Muon_pt"]))
        np.testing.assert_array_equal(np.sort(one["number"]), np.sort(other["number"]))


def test_objects_of_selected_events(folder: Path, events: ak.Array, pool: Pool) -> None:
    chosen = events[(events["MET"] > 20) & (events["nMuon"] != 3)]
    blocks = pool.run(load, folder, flatten="Muon_*", where="(MET > 20) & (nMuon != 3)")
    found = joined([block for _, block in blocks])
    np.testing.assert_array_equal(found["Muon_pt"], ak.to_numpy(ak.flatten(chosen["Muon_pt"])))
    np.testing.assert_array_equal(found["number"], np.repeat(ak.to_numpy(chosen["number"]), chosen["nMuon"]))


def test_objects_without_missing_numbers(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        pt = file.create_dataset("pt", (3,), h5py.vlen_dtype("f4"))
        pt[0], pt[1] = [1, np.nan], [3, 4]
        file["MET"] = [1.0, 2.0, np.nan]
    data = open_dataset(tmp_path / "a.h5", flatten="pt", missing="drop", comm=SELF)
    assert data.load()["pt"].tolist() == [1, 3, 4]


def test_an_event_is_read_once_for_all_of_its_objects(
    folder: Path, events: ak.Array, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    read_rows = Hdf5Rows.read
    monkeypatch.setattr(Hdf5Rows, "read", lambda own, a, b: rows.append(b - a) or read_rows(own, a, b))
    data = open_dataset(str(folder), flatten="Muon_*", inputs="Muon_charge", comm=SELF)
    assert (
        0 <= sum(rows) - len(events) <= len(data.paths) * PROBE_ROWS
    )  # to count the objects; the reader measures some
    rows.clear()
    data.load()
    assert int(ak.sum(events["nMuon"] > 0)) <= sum(rows) <= len(events)  # with small gaps
    rows.clear()
    for _ in data.batches(24, shuffle=True, seed=1, remainder="keep"):
        pass
    assert sum(rows) <= 1.2 * len(events)


def test_blocks_follow_those_of_the_events(folder: Path, events: ak.Array) -> None:
    data = open_dataset(str(folder), flatten="Muon_*", inputs="Muon_pt", comm=SELF)
    first, _, last = data._source.index.files
    objects = np.concatenate([[0], np.cumsum(ak.to_numpy(events["nMuon"]))])
    assert first.layouts["Muon_pt"].borders().tolist() == objects[:70:16].tolist()
    assert last.layouts["Muon_pt"].borders().tolist() == (objects[70:183:16] - objects[70]).tolist()


def test_a_state_belongs_to_the_same_objects(folder: Path, events: ak.Array) -> None:
    def opened(**options: Any) -> Any:
        return open_dataset(str(folder), inputs="Muon_pt", flatten="Muon_*", comm=SELF, **options)

    state = opened(where="number < 90").state(0)
    opened(where="number <= 89").batches(24, start=state)  # the same events
    with pytest.raises(PartitionError, match="where= and flatten="):
        opened(where="number < 95").batches(24, start=state)


def _error(comm: MPI.Intracomm, folder: Path, **options: Any) -> None:
    for _ in open_dataset(str(folder), comm=comm, **options).batches(24):
        pass


def test_fields_that_differ_in_length(folder: Path, events: ak.Array, pool: Pool) -> None:
    outcomes = pool.outcomes(_error, folder, flatten=["Muon_pt", "Jet_pt"])
    assert all(isinstance(error, FormatError) for error in outcomes)
    assert len({str(error) for error in outcomes}) == 1
    file, row = outcomes[0].file, outcomes[0].row
    event = sum(LENGTHS[: int(Path(file).stem)]) + row
    muons, jets = len(events["Muon_pt"][event]), len(events["Jet_pt"][event])
    assert muons != jets
    assert f"{muons} elements, as in 'Muon_pt'" in str(outcomes[0]) and f"{jets} elements in 'Jet_pt'" in str(
        outcomes[0]
    )


@pytest.mark.parametrize(("options", "text"), [({"flatten": "Muno_*"}, "'Muon_pt'"), ({"flatten": "MET"}, "float32")])
def test_no_ragged_field(folder: Path, events: ak.Array, options: Any, text: str) -> None:
    with pytest.raises(FieldNotFound, match=text):
        open_dataset(str(folder), comm=SELF, **options)


def test_no_windows_of_objects(folder: Path, events: ak.Array) -> None:
    with pytest.raises(PartitionError, match="window= and flatten= exclude each other"):
        open_dataset(str(folder), flatten="Muon_*", window=4, comm=SELF)


def test_element_specs(folder: Path, events: ak.Array) -> None:
    names = ["Muon_pt", "Muon_charge", "vertex"]
    spec = open_dataset(str(folder), inputs=names, flatten="Muon_*", comm=SELF).tf_dataset(8).element_spec
    assert {name: (part.shape.as_list(), part.dtype.name) for name, part in spec.items()} == {
        "Muon_pt": ([8], "float32"),
        "Muon_charge": ([8], "int8"),
        "vertex": ([8, 3], "float64"),
    }
