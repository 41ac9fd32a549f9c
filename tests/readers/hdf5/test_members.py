"""Members of compound tables and columns of matrices, against h5py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from matex_data import FieldNotFound, FormatError, open_dataset
from matex_data.index.chunked import ChunkedMembers
from matex_data.index.interleaved import InterleavedRecords
from matex_data.index.library import MemoryRows
from matex_data.index.table import Column
from matex_data.io.counters import process_profile
from matex_data.readers.hdf5.reader import index
from matex_data.readers.hdf5.rows import Hdf5Rows
from tests.readers.hdf5.test_layouts import values
from tests.support.format_suite import Case, FormatSuite
from tests.support.ranks import Pool
from tests.support.serial import every_row, random_rows, same

P4 = np.dtype([("x", "<f4"), ("y", ">f8")])
HIT = np.dtype([("layer", "i2"), ("energy", "f4")])
RECORD = np.dtype(
    [("id", ">i4"), ("p4", P4), ("v", "<f4", (3, 2)), ("hits", HIT, (4,)), ("name", "S5"), ("good", "?"), ("c", "<c8")],
    align=True,
)
MEMBERS = ["id", "p4/x", "p4/y", "p4", "v", "hits/layer", "hits/energy", "hits", "name", "good", "c"]
ROWS = 23


def member(rows: Any, name: str) -> Any:
    for word in name.split("/"):
        rows = rows[word]
    return rows


@pytest.mark.parametrize("stored", ["contiguous", "chunked", "gzip", "compact", "unwritten"])
@pytest.mark.parametrize("shape", [(ROWS,), (ROWS, 5)])
def test_members(tmp_path: Path, stored: str, shape: tuple[int, ...]) -> None:
    path, data, random = tmp_path / "a.h5", values(shape, RECORD), np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        if stored == "compact":
            plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            plist.set_layout(h5py.h5d.COMPACT)
            kind = h5py.h5t.py_create(RECORD, logical=True)
            h5py.Dataset(h5py.h5d.create(file.id, b"jets", kind, h5py.h5s.create_simple(shape), plist))[...] = data
        elif stored == "unwritten":
            file.create_dataset("jets", shape, RECORD, fillvalue=data.reshape(-1)[0])
        else:
            chunks = None if stored == "contiguous" else (4, 2)[: len(shape)]
            options = {"compression": 1, "shuffle": True} if stored == "gzip" else {}
            file.create_dataset("jets", data=data, chunks=chunks, **options)
    names = [f"jets/{name}" for name in MEMBERS]
    found = index(str(path), names)
    with h5py.File(path) as file:
        rows = file["jets"][...]
    for name in names:
        expected = member(rows, name.removeprefix("jets/"))
        assert found.fields[name].shape == expected.shape[1:]
        assert same(every_row(found, name), expected)
        for _ in range(3):
            drawn, numbers = random_rows(found, name, random)
            assert same(drawn, expected[numbers])
    kinds = {"contiguous": InterleavedRecords, "compact": MemoryRows}
    layout = found.files[0].layouts["jets/id"]
    assert isinstance(layout.table if isinstance(layout, Column) else layout, kinds.get(stored, ChunkedMembers))


def test_members_that_only_the_library_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    record = np.dtype([("id", ">i4"), ("text", h5py.string_dtype()), ("hits", h5py.vlen_dtype("f4")), ("p4", P4)])
    with h5py.File(path, "w") as file:
        made = file.create_dataset("jets", (ROWS,), record)
        for i in range(ROWS):
            made[i] = (i, f"jet {i}", np.arange(i % 4), (i, -i))
        odd = h5py.h5t.create(h5py.h5t.COMPOUND, 12)
        short = h5py.h5t.STD_I16LE.copy()
        short.set_precision(12)
        odd.insert(b"bits", 0, short)
        odd.insert(b"energy", 4, h5py.h5t.IEEE_F64BE)
        made = h5py.Dataset(h5py.h5d.create(file.id, b"odd", odd, h5py.h5s.create_simple((ROWS,))))
        made[...] = np.array([(i - 7, i / 3) for i in range(ROWS)], made.dtype)
    names = ["jets/id", "jets/text", "jets/hits", "jets/p4/y", "odd/bits", "odd/energy"]
    found = index(str(path), names)
    with h5py.File(path) as file:
        for name in names:
            table, _, rest = name.partition("/")
            assert same(every_row(found, name), member(file[table][...], rest)), name
    assert found.fields["jets/hits"].ragged and found.fields["jets/hits"].dtype == np.dtype("f4")
    layouts = found.files[0].layouts
    assert isinstance(layouts["odd/energy"], Column)
    assert all(isinstance(layouts[name], Hdf5Rows) for name in names[:-1])


@pytest.mark.parametrize("chunks", [None, (7, 6), (7, 4), (7, 1)])
def test_columns_of_a_matrix(tmp_path: Path, chunks: tuple[int, int] | None) -> None:
    path, data = tmp_path / "a.h5", values((ROWS, 6), ">f4")
    with h5py.File(path, "w") as file:
        file.create_dataset("plain", data=data, chunks=chunks)
        file.create_dataset("named", (ROWS, 6), ">f4", chunks=chunks)[3:9] = data[3:9]
        file["named"].attrs["properties"] = ["id", "px", "py", "pz", "e", "m"]
        file.create_dataset("packed", data=data, chunks=(5, 2), scaleoffset=4)
    names = ["plain/0", "plain/5", "named/px", "named/py", "named/m", "packed/3"]
    found = index(str(path), names)
    with h5py.File(path) as file:
        for name, (matrix, column) in zip(
            names, [("plain", 0), ("plain", 5), ("named", 1), ("named", 2), ("named", 5), ("packed", 3)], strict=True
        ):
            assert same(every_row(found, name), file[matrix][:, column]), name
    with pytest.raises(FieldNotFound, match="'named/px'"):
        index(str(path), ["named/pt"])


def _jets(path: Path, rows: int = 5000) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(3)
    data = np.zeros(rows, [("pt", "<f4"), ("eta", ">f4"), ("flavour", "u1"), ("p4", P4), ("pad", "V9")])
    for name in ("pt", "eta"):
        data[name] = random.normal(size=rows)
    data["flavour"], data["p4"]["x"] = random.integers(0, 5, rows), np.arange(rows)
    with h5py.File(path, "w") as file:
        file["jets"] = data
        file.create_dataset("packed", data=data, chunks=(min(64, rows),), compression=1, shuffle=True)
    return data


def test_each_table_is_read_once(tmp_path: Path) -> None:
    data = _jets(tmp_path / "a.h5")
    for table, most in (("jets", data.nbytes * 1.05), ("packed", data.nbytes)):
        fields = open_dataset(tmp_path / "a.h5", inputs=[f"{table}/pt", f"{table}/p4/x"], comm=MPI.COMM_SELF)
        before = process_profile().bytes
        batches = list(fields.batches(100, shuffle=True, seed=1))
        assert 0 < process_profile().bytes - before <= most
        drawn = np.concatenate([batch[f"{table}/p4/x"] for batch in batches]).astype(int)
        assert sorted(drawn) == list(range(5000))
        assert np.array_equal(np.concatenate([batch[f"{table}/pt"] for batch in batches]), data["pt"][drawn])


def test_far_members_are_read_alone(tmp_path: Path) -> None:
    record = np.dtype([("id", "<i8"), ("image", "u1", (100, 100)), ("label", "<i4")])
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["events"] = values((50,), record)
        expected = file["events"][...]
    data = open_dataset(tmp_path / "a.h5", inputs=["events/id", "events/label"], comm=MPI.COMM_SELF)
    before = process_profile().bytes
    loaded = data.load()
    assert process_profile().bytes - before < 50 * 4096
    assert all(np.array_equal(loaded[f"events/{name}"], expected[name]) for name in ("id", "label"))


def _pipelines(comm: MPI.Intracomm, path: str) -> dict[str, Any]:
    names = ["jets/pt", "jets/eta"]
    stacked = open_dataset(path, inputs=names, targets="jets/flavour", stack=True, comm=comm)
    elements = list(stacked.tf_dataset(60, shuffle=True, seed=2))
    stats = open_dataset(path, inputs=names, comm=comm).statistics()
    layer = open_dataset(path, inputs="jets/pt", comm=comm).normalization("jets/pt")
    return {
        "x": np.concatenate([x.numpy() for x, _ in elements]),
        "y": np.concatenate([y.numpy() for _, y in elements]),
        "mean": {name: float(stats[name].mean) for name in names},
        "normal": np.asarray(layer(np.float32([1.0]))),
    }


def test_stack_statistics_and_normalization(tmp_path: Path, pool: Pool) -> None:
    data = _jets(tmp_path / "a.h5", 3000)
    by_rank = pool.run(_pipelines, str(tmp_path / "a.h5"), timeout=120)
    x, y = (np.concatenate([found[key] for found in by_rank]) for key in ("x", "y"))
    expected = np.column_stack([data["pt"], data["eta"], data["flavour"]]).astype("f4")
    found = np.column_stack([x, y]).astype("f4")
    assert np.array_equal(found[np.lexsort(found.T)], expected[np.lexsort(expected.T)])
    for result in by_rank:
        assert result["mean"]["jets/eta"] == pytest.approx(data["eta"].astype("f8").mean())
        assert result["normal"] == pytest.approx((1 - data["pt"].mean()) / data["pt"].std(), rel=1e-4)


def test_names_that_are_both_and_names_with_a_slash(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["jets/pt"] = np.arange(4)
        file["t"] = np.array([(1, 2)] * 4, [("a/b", "i4"), ("c", "i4")])
    assert every_row(index(str(tmp_path / "a.h5"), ["jets/pt"]), "jets/pt").tolist() == [0, 1, 2, 3]
    assert every_row(index(str(tmp_path / "a.h5"), ["/t/a/b"]), "/t/a/b").tolist() == [1] * 4


def test_the_whole_table_stays_structured_and_tensorflow_names_the_members(tmp_path: Path) -> None:
    data = _jets(tmp_path / "a.h5", 64)
    for names in (None, "jets"):
        opened = open_dataset(tmp_path / "a.h5", inputs=names, comm=MPI.COMM_SELF)
        assert same(opened.load()["jets"], data)
    with pytest.raises(FormatError, match="no such dtype") as caught:
        opened.tf_dataset(8)
    assert 'inputs=["jets/pt", "jets/eta"]' in str(caught.value)


@pytest.mark.parametrize(
    ("name", "hint"), [("jets/p", "'jets/pt'"), ("jets/p4/z", "'jets/p4/x'"), ("jets/pt/x", "'jets/pt'")]
)
def test_a_misspelt_member(tmp_path: Path, name: str, hint: str) -> None:
    _jets(tmp_path / "a.h5", 8)
    with pytest.raises(FieldNotFound, match="the table has no such member") as caught:
        index(str(tmp_path / "a.h5"), [name])
    assert hint in str(caught.value) and repr(name) in str(caught.value)


def _tables(folder: Path) -> list[Path]:
    paths, first = [], 0
    for number, rows in enumerate((150, 37, 1, 110)):
        paths.append(folder / f"part{number}.h5")
        data = values((rows,), RECORD)
        data["id"] = np.arange(first, first + rows)
        with h5py.File(paths[-1], "w") as file:
            file["jets"] = data
            file.create_dataset("packed", data=data, chunks=(min(8, rows),), compression=1, fletcher32=True)
        first += rows
    return paths


class TestMembers(FormatSuite):
    def write(self, folder: Path) -> Case:
        names = [f"jets/{name}" for name in ("id", "p4/y", "name", "good")]
        names += [f"packed/{name}" for name in ("id", "p4/x", "v")]
        read: dict[str, list[Any]] = {name: [] for name in names}
        for path in _tables(folder):
            with h5py.File(path) as file:
                for name in names:
                    table, _, rest = name.partition("/")
                    read[name].append(member(file[table][...], rest))
        expected = {name: np.concatenate(arrays) for name, arrays in read.items()}
        return Case(str(folder / "*.h5"), expected, "jets/id", {"inputs": names})

    def damage(self, folder: Path) -> Case:
        path = _tables(folder)[0]
        with h5py.File(path) as file:
            chunk = file["packed"].id.get_chunk_info(3)
        content = bytearray(path.read_bytes())
        content[chunk.byte_offset + chunk.size // 2] ^= 0x10
        path.write_bytes(content)
        return Case(str(folder / "*.h5"), {}, "packed/id", {"inputs": ["packed/id", "packed/v"]})


def test_patterns_select_datasets_or_members(tmp_path: Path) -> None:
    """Datasets of another length do not matter, and members count where no dataset matches."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["jets"] = np.zeros(6, [("pt", "f4"), ("p", [("x", "f8"), ("y", "f8")])])
        file["event/run"], file["event/number"], file["axis"] = np.arange(6), np.arange(6), np.arange(4)
    path = str(tmp_path / "a.h5")
    assert list(open_dataset(path, inputs="event/*", comm=MPI.COMM_SELF).schema) == ["event/number", "event/run"]
    data = open_dataset(path, inputs="jets/p*", targets="event/run", comm=MPI.COMM_SELF)
    assert set(data.schema) == {"jets/pt", "jets/p/x", "jets/p/y", "event/run"}
    x, y = next(iter(data.batches(3)))
    assert set(x) == {"jets/pt", "jets/p/x", "jets/p/y"} and y.tolist() == [0, 1, 2]
    with pytest.raises(FieldNotFound, match="no field matches the pattern"):
        open_dataset(path, inputs="muons/*", comm=MPI.COMM_SELF)
