"""Indexes of many files: gathered from the ranks, shared by those of a machine, and stored for later jobs."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mpi4py import MPI
from PIL import Image

from matex_data import DataError, FieldNotFound, FormatError, open_dataset
from matex_data.fields import Field
from matex_data.index.columns import MAGIC
from matex_data.index.descriptors import Origin
from matex_data.index.library import MemoryRows
from matex_data.index.model import FileIndex, Index
from matex_data.index.stored import from_bytes, mapped, save, to_bytes
from matex_data.io.sessions import read_sessions
from matex_data.mpi import shared
from matex_data.mpi.shared import LEAST_BYTES, share
from matex_data.opening.indexing import SHARED_FACTS
from matex_data.readers.hdf5 import files
from matex_data.sampling.sizing import block_borders
from tests.support.ranks import Pool

FILES = 7


def _write(path: Path, number: int, rows: int = 4) -> None:
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(rows * 3).reshape(rows, 3) + 1000 * number
        file["text"] = [f"{number}:{row}" for row in range(rows)]
        file.create_dataset("z", data=np.arange(rows) + 1000 * number, chunks=(2,), compression="gzip")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(FILES):
        _write(folder / f"{number}.h5", number, 4 + number % 3)
    return folder


def _expected(folder: Path, name: str) -> list[Any]:
    values = []
    for path in sorted(folder.glob("*.h5")):
        with h5py.File(path) as file:
            values += file[name][...].tolist()
    return values


def _opened(comm: MPI.Intracomm, folder: Path, index: Path | None, **options: Any) -> dict[str, Any]:
    """Open a data set; return what its rank loads, the warnings, and the files that h5py has opened meanwhile."""
    opened: list[str] = []
    original = files.TrustedFile

    class Counting(original):  # type: ignore[misc, valid-type]
        def __init__(self, name: Any, *arguments: Any, **more: Any) -> None:
            opened.append(Path(str(name)).name)
            super().__init__(name, *arguments, **more)

    files.TrustedFile = Counting  # type: ignore[misc]
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            data = open_dataset(folder, comm=comm, index=index, **options)
    finally:
        files.TrustedFile = original  # type: ignore[misc]
    loaded = {name: array.tolist() for name, array in data.load().items()}
    return {
        "loaded": loaded,
        "warnings": [str(warning.message) for warning in caught],
        "opened": opened,
        "digest": data.state(0)["digest"],
        "static": dict(data.static),
    }


def _together(by_rank: list[dict[str, Any]], name: str) -> list[Any]:
    return [value for of_rank in by_rank for value in of_rank["loaded"][name]]


def _named(by_rank: list[dict[str, Any]], what: str) -> list[str]:
    return sorted(name for of_rank in by_rank for name in of_rank[what])


def _check(by_rank: list[dict[str, Any]], folder: Path) -> None:
    for name in ("x", "text", "z"):
        found = [value.encode() if isinstance(value, str) else value for value in _together(by_rank, name)]
        assert found == _expected(folder, name)


@pytest.mark.rank_counts(1, 3)
def test_a_later_job_opens_no_file(pool: Pool, folder: Path, tmp_path: Path) -> None:
    index = tmp_path / "run.matex"
    first = pool.run(_opened, folder, index)
    assert set(_named(first, "opened")) == {f"{number}.h5" for number in range(FILES)}
    assert index.read_bytes().startswith(MAGIC)
    assert list(tmp_path.iterdir()) == [folder, index] or list(tmp_path.iterdir()) == [index, folder]
    second = pool.run(_opened, folder, index)
    assert _named(second, "opened") == _named(second, "warnings") == []
    plain = pool.run(_opened, folder, None)
    for by_rank in (first, second, plain):
        _check(by_rank, folder)
        assert {of_rank["digest"] for of_rank in by_rank} == {first[0]["digest"]}


@pytest.mark.rank_counts(1, 3)
def test_files_that_have_changed_are_indexed_anew(pool: Pool, folder: Path, tmp_path: Path) -> None:
    index = tmp_path / "run.matex"
    pool.run(_opened, folder, index)
    _write(folder / "5.h5", 77, rows=9)
    second = pool.run(_opened, folder, index)
    _check(second, folder)
    assert set(_named(second, "opened")) <= {"0.h5", "5.h5"}  # the first one tells the format
    (warning,) = _named(second, "warnings")
    assert "have changed since the index" in warning and "5.h5" in warning and "6.h5" not in warning
    third = pool.run(_opened, folder, index)
    _check(third, folder)
    assert _named(third, "warnings") == _named(third, "opened") == []
    _write(folder / "0.h5", 78, rows=2)  # of which the fields of all are those
    _check(pool.run(_opened, folder, index), folder)


@pytest.mark.parametrize("before", [{"x": [0.5]}, {}])
@pytest.mark.filterwarnings("ignore")
def test_the_fields_of_all_files_do_not_depend_on_what_a_file_was(tmp_path: Path, before: dict[str, Any]) -> None:
    index, paths = tmp_path / "run.matex", [tmp_path / "0.h5", tmp_path / "1.h5"]
    for path, columns in zip((*paths, paths[1]), ({"x": [2**60 + 1]}, before, {"x": [7]}), strict=True):
        with h5py.File(path, "w") as file:
            file["run"] = np.arange(1)
            for name, values in columns.items():
                file[name] = values
        if path == paths[1]:
            data = open_dataset(paths, index=index, comm=MPI.COMM_SELF)
    assert {name: array.tolist() for name, array in data.load().items()} == {"run": [0, 0], "x": [2**60 + 1, 7]}


@pytest.mark.filterwarnings("ignore")
def test_copies_that_keep_their_times_are_the_files_of_a_stored_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    for number in range(3):
        np.save(first / f"{number}.npy", np.full(2, number))
    monkeypatch.chdir(first)
    open_dataset("*.npy", index="run.matex", comm=MPI.COMM_SELF)
    shutil.copytree(first, second)
    monkeypatch.chdir(second)
    for changed in (1, 7):  # before the second time a file is another one, which is indexed anew
        data = open_dataset("*.npy", index="run.matex", comm=MPI.COMM_SELF)
        assert data.load()["data"].tolist() == [0, 0, changed, changed, 2, 2]
        np.save("1.npy", np.full(2, 7))
        with pytest.raises(DataError, match="has changed since it was opened"):
            data.load()


def test_files_in_partitions_are_stored_and_their_changes_noticed(tmp_path: Path) -> None:
    folder, index = tmp_path / "table", tmp_path / "run.matex"
    for year in (2020, 2021):
        (folder / f"year={year}").mkdir(parents=True)
        pq.write_table(pa.table({"x": [year]}), folder / f"year={year}" / "x.parquet")
    for stored in (None, index, index):
        data = open_dataset(folder, index=stored, comm=MPI.COMM_SELF)
        assert {name: array.tolist() for name, array in data.load().items()} == {
            "x": [2020, 2021],
            "year": [2020, 2021],
        }
    pq.write_table(pa.table({"x": [7]}), folder / "year=2020" / "x.parquet")
    with pytest.raises(DataError, match="has changed since it was opened"):
        data.load()


@pytest.mark.rank_counts(1)
def test_other_files_and_options_have_another_index(pool: Pool, folder: Path, tmp_path: Path) -> None:
    index = tmp_path / "run.matex"
    pool.run(_opened, folder, index)
    _write(folder / "8.h5", 8)
    more = pool.run(_opened, folder, index)
    _check(more, folder)
    fewer = pool.run(_opened, folder, index, inputs="x")
    assert _together(fewer, "x") == _expected(folder, "x")
    for by_rank in (more, fewer):
        assert "made anew" in _named(by_rank, "warnings")[0]


@pytest.mark.rank_counts(1, 3)
def test_a_damaged_index_is_made_anew(pool: Pool, folder: Path, tmp_path: Path) -> None:
    index = tmp_path / "run.matex"
    pool.run(_opened, folder, index)
    content = bytearray(index.read_bytes())
    for damaged in (content[:20], content[:-100], content[:300] + b"?" + content[301:]):
        index.write_bytes(damaged)
        by_rank = pool.run(_opened, folder, index)
        _check(by_rank, folder)
        assert "made anew" in _named(by_rank, "warnings")[0]
        assert index.read_bytes() == content or len(index.read_bytes()) > 1000


@pytest.mark.rank_counts(1, 3)
def test_another_file_is_not_replaced(pool: Pool, folder: Path, tmp_path: Path) -> None:
    index = tmp_path / "notes.txt"
    index.write_text("important")
    errors = pool.outcomes(_opened, folder, index)
    assert all(isinstance(error, FormatError) and "is no stored index" in str(error) for error in errors)
    assert index.read_text() == "important"


def test_an_index_that_cannot_be_written(folder: Path, tmp_path: Path) -> None:
    found = _opened(MPI.COMM_SELF, folder, tmp_path / "no folder" / "run.matex")
    _check([found], folder)
    assert "cannot be written" in found["warnings"][0]


@pytest.mark.rank_counts(1, 3)
def test_texts_that_all_ranks_index(pool: Pool, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(3):
        rows = "".join(f"{row},{number}.5,x{row}\n" for row in range(5))
        (folder / f"{number}.csv").write_text(f"row,number,text\n{rows}")
    for _ in range(2):
        by_rank = pool.run(_opened, folder, tmp_path / "run.matex")
        assert _together(by_rank, "row") == list(range(5)) * 3
        assert _together(by_rank, "number") == [0.5] * 5 + [1.5] * 5 + [2.5] * 5
        assert _named(by_rank, "warnings") == []


def test_formats_whose_changes_do_not_show(tmp_path: Path) -> None:
    Image.new("L", (4, 4)).save(tmp_path / "a.png")
    with pytest.raises(FormatError, match="cannot be stored"):
        open_dataset(tmp_path, comm=MPI.COMM_SELF, format="images", index=tmp_path / "run.matex")
    assert not (tmp_path / "run.matex").exists()


def test_arrays_are_views_of_the_file(tmp_path: Path) -> None:
    path, array = str(tmp_path / "run.matex"), np.arange(1000) / 3
    field = Field("x", (), array.dtype, attributes={"units": "K", "range": np.float32([1, 2])})
    index = Index({"x": field}, [FileIndex("a.bin", 1000, {"x": MemoryRows(array)})], {"axis": array[:7]}, {"of": "x"})
    save(path, to_bytes(index, "key"))
    data = mapped(path)
    assert data is not None
    key, found = from_bytes(data, Origin(False))
    (file,) = found.files
    values = file.layouts["x"].values  # type: ignore[attr-defined]
    assert key == "key" and found.fields == index.fields and found.facts == index.facts
    assert found.fields["x"].attributes["range"].tolist() == [1, 2]
    assert np.array_equal(values, array) and np.array_equal(found.static["axis"], array[:7])
    for view in (values, found.static["axis"]):
        assert view.ctypes.data % 64 == 0 and not view.flags.owndata and not view.flags.writeable


def _shared(comm: MPI.Intracomm, nbytes: int, room: bool) -> tuple[bool, list[str], bool]:
    """Return whether the bytes arrive, the files that are left, and whether they are those of a file in memory."""
    data = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    communicator = read_sessions(comm).comm
    folder, shared.FOLDER = shared.FOLDER, shared.FOLDER if room else "/no such folder"
    try:
        found = share(communicator, data.data if comm.rank == 0 else None)
    finally:
        shared.FOLDER = folder
    comm.barrier()
    address = np.frombuffer(found, np.uint8).ctypes.data
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    names = [
        line[5]
        for line in maps
        if len(line) > 5 and int(line[0].split("-")[0], 16) <= address < int(line[0].split("-")[1], 16)
    ]
    left = [path.name for path in Path(folder).glob("matex-*")]
    return np.array_equal(np.frombuffer(found, np.uint8), data), left, any("/matex-" in name for name in names)


@pytest.mark.openmpi
@pytest.mark.product
@pytest.mark.rank_counts(1, 3)
@pytest.mark.parametrize("room", [True, False])
def test_ranks_of_a_machine_share_bytes(pool: Pool, room: bool) -> None:
    for nbytes in (10, LEAST_BYTES + 5):
        for arrived, left, in_file in pool.run(_shared, nbytes, room):
            assert arrived and not left
            assert in_file == (room and nbytes > LEAST_BYTES and pool.size > 1)


def _many(comm: MPI.Intracomm, folder: Path) -> tuple[list[float], list[int], int]:
    """Return the sums of windows of the rows of many files, the borders, and the entries that this rank has made."""
    data = open_dataset(folder, comm=comm, inputs="data", window=2, missing="mask")
    files = data._source.index.files
    made = len(files._recent._values)  # type: ignore[attr-defined]
    borders = block_borders(data._source.index, 1).tolist()
    return data.load()["data"].sum(axis=(1, 2)).tolist(), borders, made


@pytest.mark.rank_counts(1, 3)
def test_derived_files_are_looked_at_by_one_rank(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [2 + number % 3 for number in range(SHARED_FACTS)]
    expected = []
    for number, count in enumerate(rows):
        array = np.full((count, 2), number, "f4")
        np.save(tmp_path / f"{number:03d}.npy", array)
        expected += [float(array[i : i + 2].sum()) for i in range(count - 1)]
    by_rank = pool.run(_many, tmp_path)
    assert [value for values, *_ in by_rank for value in values] == expected
    for _, borders, made in by_rank:
        assert borders == by_rank[0][1]
        assert made <= SHARED_FACTS // 2 or pool.size == 1


def test_patterns_stand_for_fields_of_folders(tmp_path: Path) -> None:
    for site in "AB":
        (tmp_path / f"site={site}" / "year=2020").mkdir(parents=True)
        pq.write_table(pa.table({"size": [1.0], "x": [2.0]}), tmp_path / f"site={site}" / "year=2020" / "0.parquet")
    for inputs, wanted in (
        ("*", ["size", "x", "site", "year"]),
        ("s*", ["size", "site"]),
        (["x", "si*"], ["x", "size", "site"]),
        ("y*", ["year"]),
        (["y*", "sit?"], ["year", "site"]),
    ):
        data = open_dataset(tmp_path, inputs=inputs, comm=MPI.COMM_SELF)
        assert list(data.load()) == wanted, inputs
    with pytest.raises(FieldNotFound, match=r"no field matches the pattern.*'z\*'"):
        open_dataset(tmp_path, inputs=["y*", "z*"], comm=MPI.COMM_SELF)


def test_patterns_beside_fields_of_folders_and_of_further_fields(tmp_path: Path) -> None:
    (tmp_path / "year=2020").mkdir()
    pq.write_table(pa.table({"x": [7], "y": [8]}), tmp_path / "year=2020" / "0.parquet")
    data = open_dataset(str(tmp_path), inputs=["year", "x*"], comm=MPI.COMM_SELF)
    assert {name: values.tolist() for name, values in data.load().items()} == {"year": [2020], "x": [7]}
    with pytest.raises(FieldNotFound, match=r"no such field \(field 'y\*'\)"):
        data.load(fields=["y*"])
