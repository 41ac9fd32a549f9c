"""Data sets in a store of objects are those of the same files on a disk, on any number of ranks."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import tarfile
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import netCDF4
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import uproot
import zarr
from mpi4py import MPI
from PIL import Image

import matex_data as md
from benchmarks.harness.object_server import served
from matex_data import abc
from matex_data.errors import DataError, FormatError
from matex_data.opening.given import expand
from matex_data.readers import formats
from matex_data.storage import objects
from tests.support.object_store import BUCKET, ObjectStore, object_store
from tests.support.ranks import Pools

ROWS = 600
RANDOM = np.random.default_rng(5)
X = RANDOM.integers(0, 90, (ROWS, 7)).astype("f4")
NUMBER = np.arange(ROWS)


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture(autouse=True)
def _environment(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    store.delay, store.failing = 0.0, 0


def _hdf5(folder: Path) -> str:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=X, chunks=(50, 7), compression="gzip", shuffle=True)
        file["number"] = NUMBER
    return "a.h5"


def _netcdf4(folder: Path) -> str:
    return _netcdf(folder, "NETCDF4")


def _classic(folder: Path) -> str:
    return _netcdf(folder, "NETCDF3_64BIT_OFFSET")


def _netcdf(folder: Path, kind: Any) -> str:
    with netCDF4.Dataset(folder / "a.nc", "w", format=kind) as file:
        file.createDimension("t", None)
        file.createDimension("x", 7)
        file.createVariable("x", "f4", ("t", "x"))[:] = X
        file.createVariable("number", "i4", ("t",))[:] = NUMBER
    return "a.nc"


def _root(folder: Path) -> str:
    with uproot.recreate(folder / "a.root") as file:
        tree = file.mktree("events", {"x": ("f4", (7,)), "number": "i8"})
        for begin in range(0, ROWS, 100):
            tree.extend({"x": X[begin : begin + 100], "number": NUMBER[begin : begin + 100]})
    return "a.root"


def _parquet(folder: Path) -> str:
    (folder / "p").mkdir()
    x = pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 7)
    table = pa.table({"x": x, "number": NUMBER})
    for part in range(2):
        part_folder = folder / "p" / f"part={part}"
        part_folder.mkdir()
        pq.write_table(table[part * 300 : part * 300 + 300], part_folder / "a.parquet", row_group_size=60)
    return "p"


def _zarr(folder: Path) -> str:
    return _stored_by_zarr(folder / "a.zarr", 2, {})


def _shards(folder: Path) -> str:
    return _stored_by_zarr(folder / "a.zarr", 3, {"shards": (200, 7)})


def _zip(folder: Path) -> str:
    with zarr.storage.ZipStore(folder / "b.zarr.zip", mode="w") as archive:
        group = zarr.create_group(archive)
        group.create_array("x", shape=X.shape, dtype="f4", chunks=(50, 7), dimension_names=("t", "x"))[:] = X
        group.create_array("number", shape=(ROWS,), dtype="i8", chunks=(100,), dimension_names=("t",))[:] = NUMBER
    return "b.zarr.zip"


def _stored_by_zarr(path: Path, version: Any, options: dict[str, Any]) -> str:
    group = zarr.create_group(str(path), zarr_format=version)
    names = {} if version == 2 else {"dimension_names": ("t", "x")}
    x = group.create_array("x", shape=X.shape, dtype="f4", chunks=(50, 7), **options, **names)
    number = group.create_array("number", shape=(ROWS,), dtype="i8", chunks=(100,), **dict.fromkeys(names, ("t",)))
    x[:], number[:] = X, NUMBER
    if version == 2:
        x.attrs["_ARRAY_DIMENSIONS"], number.attrs["_ARRAY_DIMENSIONS"] = ["t", "x"], ["t"]
    return path.name


def _npy(folder: Path) -> str:
    np.save(folder / "a.npy", X)
    return "a.npy"


def _images(folder: Path) -> str:
    for name, first in (("cats", 0), ("dogs", 30)):
        (folder / "images" / name).mkdir(parents=True)
        for number in range(first, first + 30):
            image = Image.fromarray(RANDOM.integers(0, 255, (9, 8, 3), np.uint8))
            image.save(folder / "images" / name / f"{number}.png")
    return "images"


def _tar(folder: Path) -> str:
    _images(folder)
    with tarfile.open(folder / "a-0.tar", "w") as first, tarfile.open(folder / "a-1.tar", "w") as second:
        for number, path in enumerate(sorted((folder / "images").rglob("*.png"))):
            (first if number < 30 else second).add(path, f"{number:03}.png")
    return "a-{0..1}.tar"


def _tar_gz(folder: Path) -> str:
    _tar(folder)
    for path in folder.glob("*.tar"):
        path.with_suffix(".tar.gz").write_bytes(gzip.compress(path.read_bytes()))
    return "a-{0..1}.tar.gz"


WRITERS: list[Callable[[Path], str]] = [
    *(_hdf5, _netcdf4, _classic, _root, _parquet, _zarr, _shards, _zip, _npy, _images, _tar, _tar_gz)
]


def _epochs(
    comm: MPI.Intracomm, path: str, environment: dict[str, str] | None = None
) -> list[list[np.ndarray[Any, Any]]]:
    """Return the batches of a shuffled and of an ordered epoch, the parts of this rank."""
    os.environ.update(environment or {})
    data = md.open_dataset(path, comm=comm)
    found = [batch for shuffle in (True, False) for batch in data.batches(60, shuffle=shuffle, seed=3)]
    return [[batch[name] for name in data.schema] if isinstance(batch, dict) else [batch] for batch in found]


@pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__[1:])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_samples_are_those_of_files(
    tmp_path: Path, store: ObjectStore, ranks: Pools, write: Callable[[Path], str], size: int
) -> None:
    name = write(tmp_path)
    url = store.put(tmp_path, f"{write.__name__}-{size}")
    expected = ranks(size).run(_epochs, f"{tmp_path}/{name}")
    found = ranks(size).run(_epochs, f"{url}/{name}", store.environment)
    for of_rank, others in zip(found, expected, strict=True):
        assert len(of_rank) == len(others) > 0
        for batch, other in zip(of_rank, others, strict=True):
            for values, same in zip(batch, other, strict=True):
                assert values.dtype == same.dtype
                np.testing.assert_array_equal(values, same)


def test_only_the_bytes_of_the_samples_are_requested(tmp_path: Path, store: ObjectStore) -> None:
    x = RANDOM.integers(0, 1 << 60, (4096, 64))  # 2 MB that do not compress
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(64, 64), compression="gzip")
        file.create_dataset("other", data=x)
    data = md.open_dataset(store.put(tmp_path / "a.h5", "bytes/a.h5"), comm=MPI.COMM_SELF, inputs="x")
    store.forget()
    batches = list(data.batches(256, shuffle=True, seed=1))
    assert sum(map(len, batches)) == len(x)
    assert data.profile.bytes <= store.sent <= 1.05 * data.profile.bytes
    assert store.sent <= 1.05 * x.nbytes


def test_a_store_that_fails_for_a_while_is_asked_again(tmp_path: Path, store: ObjectStore) -> None:
    np.save(tmp_path / "a.npy", X)
    url = store.put(tmp_path / "a.npy", "failing/a.npy")
    store.failing = 3
    data = md.open_dataset(url, comm=MPI.COMM_SELF, block_bytes=1024)
    found = np.concatenate([batch["data"] for batch in data.batches(60)])
    np.testing.assert_array_equal(found, X)


def test_an_object_that_changes_is_noticed(tmp_path: Path, store: ObjectStore) -> None:
    np.save(tmp_path / "a.npy", X)
    url = store.put(tmp_path / "a.npy", "changing/a.npy")
    data = md.open_dataset(url, comm=MPI.COMM_SELF)
    np.save(tmp_path / "a.npy", X[:100])
    store.put(tmp_path / "a.npy", "changing/a.npy")
    with pytest.raises(DataError, match="shorter than when it was opened"):
        list(data.batches(60))


def test_a_web_server_is_read_but_not_listed(tmp_path: Path) -> None:
    _hdf5(tmp_path)
    (tmp_path / "a.h5").rename(tmp_path / "a b.h5")
    with served(tmp_path) as url:
        data = md.open_dataset(f"{url}/a%20b.h5", comm=MPI.COMM_SELF, inputs="x")
        np.testing.assert_array_equal(data.load()["x"], X)
        with pytest.raises(DataError, match="does not list its files"):
            md.open_dataset(f"{url}/*.h5", comm=MPI.COMM_SELF)


def test_patterns_and_folders_stand_for_objects(tmp_path: Path, store: ObjectStore) -> None:
    for name in ("run10.npy", "run9.npy", "deep/run1.npy", "notes.md", ".hidden.npy"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        np.save(path, X) if name.endswith("npy") else path.write_text("notes")
    url = store.put(tmp_path, "many")

    def names(path: str) -> list[str]:
        return [file.removeprefix(f"{url}/") for file in expand(path)]

    assert names(f"{url}/run*.npy") == ["run9.npy", "run10.npy"]
    assert names(f"{url}/**/run1*.npy") == ["deep/run1.npy", "run10.npy"]
    assert names(f"{url}/run{{9..10}}.npy") == ["run9.npy", "run10.npy"]
    assert names(url) == names(f"{url}/") == ["run9.npy", "run10.npy"]


def test_folders_with_a_slash_buckets_and_names_with_brackets_are_found(tmp_path: Path, store: ObjectStore) -> None:
    np.save(tmp_path / "a.npy", X)
    pq.write_table(pa.table({"x": NUMBER}), tmp_path / "a.parquet")
    store.put(tmp_path / "a.parquet", "ended/years/year=2020/a.parquet")
    for key in ("ended/run[1].npy", "ended/run1.npy"):
        store.put(tmp_path / "a.npy", key)
    url = f"s3://{BUCKET}/ended"
    assert set(md.open_dataset(f"{url}/years/", comm=MPI.COMM_SELF, inputs="year").load()["year"].tolist()) == {2020}
    assert expand(f"{url}/year*/") == [f"{url}/years/year=2020/a.parquet"]
    assert expand(f"{url}/run[1].npy") == [f"{url}/run[1].npy"]
    assert not objects.existing_objects([f"s3://{BUCKET}", f"s3://{BUCKET}/"])  # which are folders


def test_many_objects_of_a_folder_are_listed_once(tmp_path: Path, store: ObjectStore) -> None:
    for number in range(40):
        np.save(tmp_path / f"{number:02}.npy", X[:2])
    url = store.put(tmp_path, "numbered")
    store.forget()
    assert len(expand(f"{url}/{{00..39}}.npy")) == 40 and store.requests <= 2
    with pytest.raises(DataError, match="there are no such objects") as caught:
        expand(f"{url}/{{00..40}}.npy")
    assert caught.value.file == f"{url}/40.npy"


def test_references_lead_to_a_store(tmp_path: Path, store: ObjectStore) -> None:
    np.save(tmp_path / "a.npy", X)
    url = store.put(tmp_path / "a.npy", "referred/a.npy")
    array = '{"zarr_format":2,"shape":[600,7],"chunks":[600,7],"dtype":"<f4","compressor":null,"filters":null,'
    array += '"fill_value":0,"order":"C"}'
    begin = (tmp_path / "a.npy").stat().st_size - X.nbytes
    document = {".zgroup": '{"zarr_format":2}', "x/.zarray": array, "x/0.0": [url, begin, X.nbytes]}
    (tmp_path / "refs.json").write_text(json.dumps({"version": 1, "refs": document}))
    data = md.open_dataset(tmp_path / "refs.json", comm=MPI.COMM_SELF, inputs="x", trusted=f"s3://{BUCKET}")
    np.testing.assert_array_equal(data.load()["x"], X)


PROBLEMS = {
    f"s3://{BUCKET}/none.h5": (DataError, "there are no such objects"),
    f"s3://{BUCKET}/none/*.h5": (DataError, "there are no such objects"),
    "s3://other/a.h5": (
        DataError,
        "the store cannot be read .*\n  found: .*there is no such bucket: 's3://other/a.h5'\n",
    ),
    "s3://da*/a.h5": (DataError, "the name of the bucket is a pattern .file 's3://da./a.h5'"),
    "ftp://host/a.h5": (DataError, "there is no reader of such URLs"),
    "file:///data/a.h5": (DataError, "give the path '/data/a.h5'"),
    "ftp://user:secret@host/a.h5": (DataError, "a URL with credentials"),
    "https://user:secret@host/a.h5": (DataError, "a URL with credentials"),
    "https://host/a.h5?signature=secret": (DataError, "a URL with credentials"),
}


@pytest.mark.parametrize("url", PROBLEMS)
def test_errors_tell_what_to_do_and_no_secret(store: ObjectStore, url: str) -> None:
    kind, message = PROBLEMS[url]
    with pytest.raises(kind, match=message) as caught:
        md.open_dataset(url, comm=MPI.COMM_SELF)
    assert "remedy" in str(caught.value)
    assert "secret" not in str(caught.value) and "never shown" not in str(caught.value)


def _index_toy(path: str, names: Any = None) -> abc.Index:
    rows = abc.size_of(path) // 4
    layout = abc.Strided(rows, 0, 4, np.dtype("f4"), ())
    return abc.Index({"x": abc.Field("x", (), np.dtype("f4"))}, [abc.FileIndex(path, rows, {"x": layout})])


@pytest.mark.parametrize("remote", [False, True])
def test_readers_of_other_packages_read_files_alone_unless_they_say_otherwise(
    tmp_path: Path, store: ObjectStore, monkeypatch: pytest.MonkeyPatch, remote: bool
) -> None:
    X.tofile(tmp_path / "a.toy")
    url = store.put(tmp_path / "a.toy", "toys/a.toy")
    toy = abc.Format(_index_toy, (".toy",), remote=remote)
    entry = SimpleNamespace(name="toy", value="toy:TOY", load=lambda: toy)
    monkeypatch.setattr(formats, "entry_points", lambda **_: [entry])
    if remote:
        data = md.open_dataset(url, comm=MPI.COMM_SELF, format="toy")
        np.testing.assert_array_equal(data.load()["x"], X.ravel())
    else:
        with pytest.raises(FormatError, match="'toy' are not read from a store of objects"):
            md.open_dataset(url, comm=MPI.COMM_SELF, format="toy")


def test_databases_are_read_from_files_alone(tmp_path: Path, store: ObjectStore) -> None:
    (tmp_path / "a.db").write_bytes(b"SQLite format 3\0" + bytes(100) + b"CREATE TABLE systems (id INTEGER)")
    url = store.put(tmp_path / "a.db", "databases/a.db")
    with pytest.raises(FormatError, match=r"'asedb' are not read from a store(.|\n)*all ranks see$"):
        md.open_dataset(url, comm=MPI.COMM_SELF)


def test_datasets_of_several_files_are_refused(tmp_path: Path, store: ObjectStore) -> None:
    layout = h5py.VirtualLayout((ROWS, 7), "f4")
    layout[:] = h5py.VirtualSource("b.h5", "x", (ROWS, 7))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = X + 1
        file["link"] = h5py.ExternalLink("b.h5", "x")
        file["soft"] = h5py.SoftLink("/link")
        file.create_virtual_dataset("virtual", layout)
    url = store.put(tmp_path / "a.h5", "several/a.h5")
    for name in ("link", "soft"):
        with pytest.raises(FormatError, match="link to another file"):
            md.open_dataset(url, comm=MPI.COMM_SELF, inputs=name)
    with pytest.raises(FormatError, match="only files by themselves"):
        md.open_dataset(url, comm=MPI.COMM_SELF, inputs="virtual")


def test_objects_are_read_where_a_loop_runs(tmp_path: Path, store: ObjectStore) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(100)))
    url = store.put(tmp_path / "a.bin", "loops/a.bin")

    async def cell() -> list[memoryview]:
        return objects.read_ranges(url, [3, 90], [2, 5], tag=objects.state(url).tag)

    assert [*map(bytes, asyncio.run(cell()))] == [bytes([3, 4]), bytes(range(90, 95))]


def test_a_container_of_azure_is_no_password() -> None:
    objects.check_url("abfss://container@account.dfs.core.windows.net/a.h5")


def _changing_epoch(comm: MPI.Intracomm, url: str, changed: bytes, environment: dict[str, str]) -> str:
    """Read an epoch, in which rank 0 replaces the object; return the error."""
    os.environ.update(environment)
    data, seen = md.open_dataset(url, comm=comm, window_bytes=64 << 10), set[float]()
    try:
        for step, batch in enumerate(data.batches(64)):
            seen.update(np.unique(batch["data"]).tolist())
            if step == 0 and comm.rank == 0:
                import obstore
                from obstore.store import from_url

                obstore.put(from_url(f"s3://{BUCKET}", client_options={"allow_http": True}), url[10:], changed)
            if step == 0:
                comm.barrier()
    except DataError as error:
        assert seen == {1.0}, "samples of another object"
        return f"{type(error).__name__}: {error.problem}"
    return f"read {seen}"


@pytest.mark.parametrize("size", [1, 2])
def test_an_object_that_changes_in_mid_epoch_is_an_error_of_all_ranks(
    tmp_path: Path, store: ObjectStore, ranks: Pools, size: int
) -> None:
    np.save(tmp_path / "a.npy", np.full((16384, 64), 2, "f4"))
    changed = (tmp_path / "a.npy").read_bytes()
    np.save(tmp_path / "a.npy", np.full((16384, 64), 1, "f4"))
    url = store.put(tmp_path / "a.npy", f"mid/{size}.npy")
    found = ranks(size).run(_changing_epoch, url, changed, store.environment)
    assert found == ["ChangedFile: the file has changed since it was opened"] * size


def test_a_read_that_fails_is_made_again(tmp_path: Path, store: ObjectStore) -> None:
    np.save(tmp_path / "again.npy", np.arange(600.0))
    data = md.open_dataset(store.put(tmp_path / "again.npy", "closed/again.npy"), comm=MPI.COMM_SELF)
    store.forbidden = "closed"
    try:
        with pytest.raises(DataError, match="cannot be read"):
            data[100]
    finally:
        store.forbidden = ""
    assert float(data[100]["data"]) == 100


@pytest.mark.parametrize("pattern", ["x[a!]", "x[^a]", "x[!a]", "x[]a]", "x[!]a]", "x[a-c]", "x[\\w]", "x[a"])
@pytest.mark.parametrize("name", ["xa", "xb", "x!", "x^", "x]", "x\\", "x[a"])
def test_sets_of_characters_in_patterns_are_those_of_fnmatch(pattern: str, name: str) -> None:
    assert objects._fits([name], [pattern]) == fnmatchcase(name, pattern)
