"""Zarr stores: conformance suite, codecs, shards, texts, missing chunks, and stores of xarray."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import xarray as xr
import zarr
from mpi4py import MPI
from zarr import codecs
from zarr.codecs import numcodecs as zarr_numcodecs
from zarr.storage import LocalStore, ZipStore

from matex_data import DataError, DecodeError, FormatError, open_dataset
from matex_data.errors import ChangedFile
from matex_data.readers.zarr import reader, stores
from tests.support.format_suite import Case, FormatSuite, same

ROWS = (150, 37, 1, 110)
CHUNK = 16  # rows


def arrays(rows: int, first: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return rows of all kinds of fields."""
    rng = np.random.default_rng(first)
    texts = np.array([f"Tag {i} " + "é" * (i % 3) for i in range(rows)], object)
    return {
        "event": np.arange(first, first + rows),
        "image": rng.normal(size=(rows, 5, 6)).astype("f4"),
        "count": rng.integers(0, 300, (rows, 3)).astype(">u2"),
        "trigger": rng.integers(0, 2, rows).astype(bool),
        "code": np.array([f"c{i % 7}" for i in range(rows)], "S3"),
        "amplitude": (rng.normal(size=rows) + 1j * rng.normal(size=rows)).astype("c8"),
        "text": texts,
    }


def write(path: Path, content: dict[str, np.ndarray[Any, Any]], version: int, sharded: bool = False) -> str:
    """Write a group of arrays along their first axis, to a folder or a zip file."""
    with ZipStore(path, mode="w") if path.suffix == ".zip" else LocalStore(path) as store:
        group = zarr.open_group(store, mode="w", zarr_format=version)
        for name, values in content.items():
            inner = tuple(-(-n // 2) for n in values.shape[1:])
            dtype = str if values.dtype.kind == "O" else values.dtype
            options: dict[str, Any] = {"shards": (2 * CHUNK, *(2 * n for n in inner))} if sharded else {}
            array = group.create_array(name, shape=values.shape, dtype=dtype, chunks=(CHUNK, *inner), **options)
            array[...] = values
    return str(path)


def expected(path: str) -> dict[str, Any]:
    """Return the arrays as the zarr package reads them."""
    with ZipStore(path, mode="r") if path.endswith(".zip") else LocalStore(path) as store:
        return {name: native(np.asarray(array[...])) for name, array in zarr.open_group(store, mode="r").arrays()}


def native(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the values in native byte order, and texts as byte strings."""
    if values.dtype.kind in "OUT":
        texts = [text.encode() for text in values.ravel().tolist()]
        return np.array([*texts, None], object)[:-1].reshape(values.shape)
    return values.astype(values.dtype.newbyteorder("="))


def load(path: Any, **options: Any) -> dict[str, Any]:
    """Return all rows by matex_data."""
    return open_dataset(path, comm=MPI.COMM_SELF, **options).load()


class TestZarr(FormatSuite):
    def write(self, folder: Path) -> Case:
        first = np.cumsum((0, *ROWS[:-1])).tolist()
        kinds = (("a.zarr", 2, False), ("b.zarr", 3, True), ("c.zarr", 3, False), ("d.zarr.zip", 3, True))
        paths = [
            write(folder / name, arrays(rows, start), *kind)
            for (name, *kind), rows, start in zip(kinds, ROWS, first, strict=True)
        ]
        by_file = [expected(path) for path in paths]
        return Case(paths, {name: np.concatenate([file[name] for file in by_file]) for name in by_file[0]}, "event")

    def damage(self, folder: Path) -> Case:
        case = self.write(folder)
        chunk = Path(case.paths[0], "event", "3")
        chunk.write_bytes(chunk.read_bytes()[:9])
        return case


NUMBERS = np.random.default_rng(0).normal(size=(40, 6)).round(3)
V2_CODECS: dict[str, tuple[list[Any], Any]] = {
    "blosc": ([], numcodecs.Blosc("lz4hc", 5, numcodecs.Blosc.BITSHUFFLE)),
    "zstd": ([], numcodecs.Zstd()),
    "gzip": ([], numcodecs.GZip()),
    "zlib": ([], numcodecs.Zlib()),
    "bz2": ([], numcodecs.BZ2()),
    "lzma": ([], numcodecs.LZMA()),
    "lz4": ([numcodecs.Shuffle(8)], numcodecs.LZ4()),
    "delta": ([numcodecs.Delta("f8")], numcodecs.Zstd()),
    "scaled": ([numcodecs.FixedScaleOffset(0, 1000, "f8", "i4")], numcodecs.Blosc()),
    "rounded": ([numcodecs.BitRound(20)], numcodecs.Zstd()),
    "quantized": ([numcodecs.Quantize(2, "f8")], numcodecs.Zlib()),
    "checked": ([numcodecs.CRC32(), numcodecs.Fletcher32()], None),
    "none": ([], None),
}
V3_CODECS: dict[str, dict[str, Any]] = {
    "blosc": {"compressors": codecs.BloscCodec(cname="zlib", shuffle="shuffle")},
    "gzip": {"compressors": codecs.GzipCodec()},
    "checked": {"compressors": [codecs.ZstdCodec(), codecs.Crc32cCodec()]},
    "big": {"serializer": codecs.BytesCodec(endian="big"), "compressors": None},
    "transposed": {"filters": codecs.TransposeCodec(order=(1, 0))},
    "delta": {"filters": zarr_numcodecs.Delta(dtype="f8"), "compressors": zarr_numcodecs.LZ4()},
    "scaled": {"filters": zarr_numcodecs.FixedScaleOffset(offset=0, scale=1000, dtype="f8", astype="i4")},
    "shuffled": {"compressors": [zarr_numcodecs.Shuffle(elementsize=8), zarr_numcodecs.Zlib()]},
    "dotted": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_codecs(tmp_path: Path) -> None:
    two = zarr.open_group(tmp_path / "two.zarr", mode="w", zarr_format=2)
    for name, (filters, compressor) in V2_CODECS.items():
        for order in "CF":
            options: Any = {"filters": filters, "compressors": compressor, "order": order}
            two.create_array(f"{name}_{order}", shape=NUMBERS.shape, dtype="f8", chunks=(16, 4), **options)[...] = (
                NUMBERS
            )
    three = zarr.open_group(tmp_path / "three.zarr", mode="w")
    for name, options in V3_CODECS.items():
        three.create_array(name, shape=NUMBERS.shape, dtype="f8", chunks=(16, 4), **options)[...] = NUMBERS
        if "chunk_key_encoding" not in options:
            shards = {"shards": (32, 8), **options}
            three.create_array(f"{name}_sharded", shape=NUMBERS.shape, dtype="f8", chunks=(16, 4), **shards)[...] = (
                NUMBERS
            )
    for path in (f"{tmp_path}/two.zarr", f"{tmp_path}/three.zarr"):
        found, of_library = load(path), expected(path)
        assert set(found) == set(of_library) and len(found) >= 17
        for name, values in of_library.items():
            same(found[name], values)


@pytest.fixture(scope="module")
def climate() -> xr.Dataset:
    """Return fields along a time that is neither the first nor the only axis."""
    rng = np.random.default_rng(0)
    data = xr.Dataset(
        {
            "t2m": (("time", "lat", "lon"), rng.normal(size=(50, 6, 8)).astype("f4"), {"units": "K"}),
            "level": (("lat", "time"), rng.integers(0, 100, (6, 50)).astype("i2")),
            "packed": (("time",), np.where(np.arange(50) % 7 == 0, np.nan, np.arange(50) * 0.5)),
            "station": (("time",), np.array([f"día {i}" for i in range(50)], object)),
            "mask": (("lat", "lon"), rng.normal(size=(6, 8))),
        },
        coords={"time": np.datetime64("2000-01-01", "ns") + np.arange(50) * np.timedelta64(6, "h")},
    )
    return data.assign_coords(lat=np.arange(6.0), lon=np.arange(8.0))


ENCODING: dict[str, dict[str, Any]] = {
    "t2m": {"chunks": (7, 4, 8)},
    "level": {"chunks": (6, 11)},
    "packed": {"dtype": "i2", "scale_factor": 0.5, "_FillValue": -1, "chunks": (20,)},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("version", "consolidated"), [(2, True), (2, False), (3, True), (3, False)])
def test_stores_of_xarray(climate: xr.Dataset, tmp_path: Path, version: int, consolidated: bool) -> None:
    path = f"{tmp_path}/a.zarr"
    climate.to_zarr(path, zarr_format=version, encoding=ENCODING, consolidated=consolidated)
    chunk = "t2m/2.1.0" if version == 2 else "t2m/c/2/1/0"
    Path(path, chunk).unlink()  # as if it had never been written
    library = xr.open_zarr(path).load()
    assert np.isnan(library["t2m"].values).sum() == 7 * 2 * 8
    data = open_dataset(path, comm=MPI.COMM_SELF)
    found = data.load()
    assert set(found) == {"t2m", "level", "packed", "station", "time"}
    for name in ("t2m", "packed"):
        same(found[name], library[name].values)
    same(found["level"], library["level"].values.T)
    same(found["station"], native(library["station"].values.astype(object)))
    same(found["time"], library["time"].values.astype("datetime64[ns]").astype("i8") / 1e9)
    same(data.static["mask"], library["mask"].values)
    chosen = load(path, inputs="t2m", sel={"lat": slice(2, 4), "time": slice("2000-01-03", "2000-01-05")})
    same(chosen["t2m"], library["t2m"].sel(lat=slice(2, 4), time=slice("2000-01-03", "2000-01-05")).values)
    with ZipStore(f"{tmp_path}/a.zip", mode="w") as store:
        climate.to_zarr(store, zarr_format=version, encoding=ENCODING, consolidated=consolidated)
    for name, values in load(f"{tmp_path}/a.zip").items():
        same(values, found[name] if name != "t2m" else climate["t2m"].values)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("version", [2, 3])
def test_texts_of_fixed_length(tmp_path: Path, version: int) -> None:
    path, names = f"{tmp_path}/a.zarr", np.array(["Zürich", "Genf"])
    data = xr.Dataset({"x": (("time", "station"), np.arange(6.0).reshape(3, 2))}, {"station": names})
    data.to_zarr(path, zarr_format=version)
    same(load(path, inputs="x", sample_dim="time", sel={"station": "Zürich"})["x"], np.array([0.0, 2.0, 4.0]))
    found = load(path, inputs=["x", "station"], sample_dim="station", sel={"station": ["Genf"]})
    assert found["station"].tolist() == [b"Genf"] and found["x"].tolist() == [[1, 3, 5]]
    data.assign_coords(station=names[::-1]).to_zarr(f"{tmp_path}/b.zarr", zarr_format=version)
    with pytest.raises(FormatError, match="do not agree on the coordinates 'station'"):
        load([path, f"{tmp_path}/b.zarr"], inputs="x", sample_dim="time")


@pytest.mark.filterwarnings("ignore")
def test_a_coordinate_of_damaged_texts_is_named(tmp_path: Path) -> None:
    data = xr.Dataset({"x": (("time", "station"), np.zeros((3, 2)))}, {"station": np.array(["a", "b"])})
    data.to_zarr(tmp_path / "a.zarr", zarr_format=2, encoding={"station": {"compressors": None}})
    for damage, problem in ((b"\xff" * 8, "a text is no Unicode"), (b"", "a chunk does not decode")):
        (tmp_path / "a.zarr" / "station" / "0").write_bytes(damage)
        for dimension in ("time", "station"):
            with pytest.raises(DecodeError, match=rf"{problem} \(file .*a\.zarr', field 'station'"):
                load(tmp_path / "a.zarr", sample_dim=dimension)


@pytest.mark.parametrize("fill", ["NaN", "-Infinity", "AAAAAAAA+H8="])
def test_fill_values_as_texts(tmp_path: Path, fill: str) -> None:
    array = zarr.create_array(tmp_path / "a.zarr", data=np.array([1.0, -np.inf]), attributes={"_FillValue": fill})
    expected = np.array([1.0, np.nan if fill == "-Infinity" else -np.inf])
    assert array.metadata.zarr_format == 3
    same(load(tmp_path / "a.zarr")["data"], expected)


@pytest.mark.filterwarnings("ignore")
def test_letters_that_were_never_written(tmp_path: Path) -> None:
    options = {"chunks": (2, 3), "fill_value": b"x", "dimension_names": ("sample", "length")}
    letters = zarr.create_array(tmp_path / "a.zarr", shape=(4, 3), dtype="S1", **options)
    letters[:2] = np.array([[b"a", b"b", b"c"], [b"d", b"e", b"f"]])
    same(load(tmp_path / "a.zarr")["data"], np.array([b"abc", b"def", b"xxx", b"xxx"]))


def test_groups_patterns_and_folders_of_stores(tmp_path: Path) -> None:
    for day in range(2):
        group = zarr.open_group(tmp_path / f"day{day}.zarr", mode="w")
        group.create_array("run/x", data=np.arange(10) + 10 * day, chunks=(4,), dimension_names=("sample",))
        group.create_array(
            "run/y", data=np.arange(20.0).reshape(10, 2), chunks=(4, 1), dimension_names=("sample", None)
        )
        group.create_array("pyramid", data=np.arange(5), chunks=(4,), dimension_names=("sample",))
    for paths in (f"{tmp_path}/*.zarr", tmp_path, [f"{tmp_path}/day0.zarr", f"{tmp_path}/day1.zarr"]):
        found = load(paths, inputs=["run/x", "run/y"])
        same(found["run/x"], np.arange(20))
    same(load(f"{tmp_path}/day1.zarr/run")["x"], np.arange(10, 20))
    same(load(f"{tmp_path}/day1.zarr/run/x")["data"], np.arange(10, 20))


def _files_read(comm: MPI.Intracomm, path: str) -> tuple[list[str], int]:
    """Return the names of the chunk files that this rank opens, and the number of its rows."""
    opened: list[str] = []
    read_file = stores.read_file
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            stores, "read_file", lambda file, memory: (opened.append(Path(file).name), read_file(file, memory))[1]
        )
        rows = len(open_dataset(path, comm=comm).load()["x"])
    return opened, rows


@pytest.mark.rank_counts(2, slow=(3,))
def test_a_rank_opens_the_files_of_its_own_chunks(pool: Any, tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    group.create_array("x", data=np.arange(960), chunks=(16,))
    by_rank = pool.run(_files_read, str(tmp_path / "a.zarr"))
    assert sum(rows for _, rows in by_rank) == 960
    assert sorted(int(name) for names, _ in by_rank for name in names) == list(range(60))


def test_the_chunks_of_a_folder_are_the_blocks_that_are_shuffled(tmp_path: Path) -> None:
    group = zarr.open_group(tmp_path / "a.zarr", mode="w")
    for name, depth in (("chunks", 16), ("rows", 1)):
        group.create_array(name, data=np.arange(960), chunks=(depth,), dimension_names=("n",))
    blocks = {
        name: open_dataset(tmp_path / "a.zarr", inputs=name, comm=MPI.COMM_SELF).shuffle_quality(4).blocks
        for name in ("chunks", "rows")
    }
    assert blocks == {"chunks": 60, "rows": 960}


def test_arrays_that_cannot_be_read(tmp_path: Path) -> None:
    path = str(tmp_path / "a.zarr")
    group = zarr.open_group(path, mode="w", zarr_format=2)
    group.create_array("x", data=np.arange(10))
    group.create_array("pair", data=np.zeros(10, [("a", "i4"), ("b", "f8")]))
    with pytest.warns(UserWarning, match="1 array cannot be read.*\n.*'pair'"):
        assert set(load(path)) == {"x"}
    with pytest.raises(FormatError, match="the array cannot be read"):
        load(path, inputs="pair")


def test_an_array_that_cannot_be_read_as_the_root_of_its_store(tmp_path: Path) -> None:
    path = str(tmp_path / "pair.zarr")
    zarr.create_array(path, shape=(3,), dtype=[("a", "i4")], zarr_format=2)
    for options, problem in ({"inputs": "data"}, "the array cannot be read"), ({}, "no array of the store can be read"):
        with pytest.raises(FormatError, match=rf"{problem}(.|\n)*no equivalent"):
            open_dataset(path, **options)


def _damaged(path: Path) -> dict[str, Path]:
    """Return stores with one damage each."""
    good = write(path / "good.zarr", arrays(60), 3, sharded=True)
    found = {}
    for name in ("metadata", "length", "codec", "option", "bare", "index", "beyond", "text"):
        found[name] = Path(shutil.copytree(good, path / f"{name}.zarr"))
    (found["metadata"] / "image" / "zarr.json").write_text("{")
    for name, old, new in (
        ("length", "60", '"many"'),
        ("codec", "zstd", "zst"),
        ("option", '"checksum"', '"checksun"'),
    ):
        file = found[name] / "event" / "zarr.json"
        file.write_text(file.read_text().replace(old, new))
    file = found["bare"] / "event" / "zarr.json"
    before, name, after = file.read_text().partition('"zstd"')
    file.write_text(before + name + after.replace("configuration", "configurati0n", 1))
    shard = found["index"] / "event" / "c" / "0"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    shard = found["beyond"] / "event" / "c" / "1"
    shard.write_bytes(shard.read_bytes()[-36:])
    text = found["text"] / "text" / "c" / "0"
    text.write_bytes(b"\0" * 40 + text.read_bytes()[40:])
    zipped(found["index"], path / "shards.zarr.zip")
    with zipfile.ZipFile(path / "lzma.zarr.zip", "w", zipfile.ZIP_LZMA) as file:
        file.writestr("zarr.json", '{"zarr_format": 3, "node_type": "group"}')
    (path / "cut.zarr.zip").write_bytes((path / "lzma.zarr.zip").read_bytes()[:-30])
    return {**found, **{name: path / f"{name}.zarr.zip" for name in ("shards", "lzma", "cut")}}


MESSAGES = {
    "metadata": "the metadata are damaged",
    "length": "the metadata of an array are damaged",
    "codec": "the codec 'zst'",
    "option": "unknown options ['checksun'] of the codec 'zstd'",
    "bare": "the codec 'zstd' without configuration",
    "index": "the index of a shard is damaged",
    "beyond": "a chunk lies beyond its shard",
    "text": "a chunk does not decode",
    "shards": "a shard is compressed by zip",
    "lzma": "compressed in another way than by deflate",
    "cut": "the zip file is damaged",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "message"),
    [({"compressors": None}, "CRC-32"), ({"compressors": [codecs.Crc32cCodec()], "shards": (20,)}, "crc32c")],
)
def test_checksums_of_zip_files_are_compared(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    values = np.arange(40)
    path = tmp_path / "a.zarr.zip"
    with ZipStore(path, mode="w") as store:
        zarr.open_group(store, mode="w").create_array("x", data=values, chunks=(10,), **options)
    same(load(path)["x"], values)
    data = path.read_bytes()
    begin = data.index(values[20:30].tobytes())
    path.write_bytes(data[:begin] + b"\xff" + data[begin + 1 :])
    with pytest.raises(DataError, match=message) as error:
        load(path)
    assert error.value.row == 20


def zipped(folder: Path, path: Path) -> None:
    """Zip a folder with its own name, as ``zip -r`` does: the members are compressed."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for found in [folder, *sorted(folder.rglob("*"))]:
            file.write(found, str(found.relative_to(folder.parent)))


@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_was_zipped_with_compression(tmp_path: Path) -> None:
    values = np.arange(40) // 3
    group = zarr.open_group(tmp_path / "a.zarr", mode="w", zarr_format=2)
    group.create_array("x", data=values, chunks=(10,), compressors=None)
    group.create_array("name", data=np.array([f"run {i}" for i in range(40)]), chunks=(10,))
    path = tmp_path / "a.zip"
    zipped(tmp_path / "a.zarr", path)
    found = load(path)
    same(found["x"], values)
    assert found["name"][7] == b"run 7"
    with zipfile.ZipFile(path) as file:
        (begin,) = (member.header_offset for member in file.infolist() if member.filename == "a.zarr/x/2")
    data = bytearray(path.read_bytes())
    data[begin + 30 + len("a.zarr/x/2") + 8] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"checksum|decompress"):
        load(path)


def test_damages_are_told(tmp_path: Path) -> None:
    for name, path in _damaged(tmp_path).items():
        with pytest.raises(DataError) as caught:
            load(path, inputs="text" if name == "text" else "event")
        assert MESSAGES[name] in str(caught.value) and path.name in str(caught.value), caught.value


def test_shards_without_rows_are_told(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", {"event": np.arange(40)}, 3, sharded=True)
    document = tmp_path / "a.zarr" / "event" / "zarr.json"
    facts = json.loads(document.read_text())
    facts["chunk_grid"]["configuration"]["chunk_shape"] = [0]
    document.write_text(json.dumps(facts))
    with pytest.raises(DataError, match=r"in shards of shape \(0,\)"):
        load(tmp_path / "a.zarr", inputs="event")


def _changing(path: Path, version: int) -> zarr.Group:
    """Write two arrays in a group within a group, and return this."""
    group = zarr.open_group(path, mode="w", zarr_format=version).create_group("run")  # type: ignore[arg-type]
    for name in ("x", "y"):
        group.create_array(name, shape=(8,), dtype="i4", chunks=(4,))[:] = np.arange(8)
    return group


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("change", ["grows", "shrinks", "has another scale", "is another array"])
def test_changed_metadata_are_noticed(tmp_path: Path, version: int, change: str) -> None:
    paths = [tmp_path / "a.zarr", tmp_path / "b.zarr"]
    group, _ = [_changing(path, version) for path in paths]
    options: dict[str, Any] = {"inputs": ["run/x"], "comm": MPI.COMM_SELF}
    stored = {**options, "index": tmp_path / "runs.matex"}
    data = open_dataset(paths, **options)
    same(open_dataset(paths, **stored).load()["run/x"], np.tile(np.arange(8, dtype="i4"), 2))
    array: Any = group["x"]
    if change == "grows":
        array.append(np.arange(3, dtype="i4"))
    elif change == "shrinks":
        array.resize((5,))
    elif change == "has another scale":
        array.attrs["scale_factor"] = 0.5
    else:
        group.create_array("x", shape=(8,), dtype="f4", chunks=(2,), overwrite=True)[:] = np.arange(8) / 3
    with pytest.raises(ChangedFile, match=r"run/x/(zarr\.json|\.zarray)"):
        data.load()
    with pytest.warns(UserWarning, match=r"indexed anew: '.*a\.zarr'$"):
        found = open_dataset(paths, **stored).load()
    same(found["run/x"], open_dataset(paths, **options).load()["run/x"])


def test_changed_metadata_of_other_arrays(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    group = _changing(tmp_path / "a.zarr", 3)
    options: dict[str, Any] = {"inputs": ["run/x"], "index": tmp_path / "runs.matex"}
    data = open_dataset(tmp_path / "a.zarr", comm=MPI.COMM_SELF, **options)
    other: Any = group["y"]
    other.resize((4,))
    for found in (data.load(), load(tmp_path / "a.zarr", **options)):
        same(found["run/x"], np.arange(8, dtype="i4"))
    assert not [warning for warning in recwarn if "indexed anew" in str(warning.message)]


def test_metadata_that_change_as_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, original = _changing(tmp_path / "a.zarr", 3), reader.index_content

    def index_content(*arguments: Any) -> Any:
        array: Any = group["x"]
        array.resize((5,))
        return original(*arguments)

    monkeypatch.setattr(reader, "index_content", index_content)
    data = open_dataset(tmp_path / "a.zarr", comm=MPI.COMM_SELF, inputs=["run/x"])
    with pytest.raises(ChangedFile):
        data.load()


def test_files_of_two_calendars_say_how_to_get_one(tmp_path: Path) -> None:
    """NumPy's times and CF's differ before 15 October 1582 alone."""
    for name, attributes in (("a", {}), ("b", {"units": "seconds since 1970-01-01", "calendar": "standard"})):
        times = np.arange(3).astype("datetime64[s]")
        root = zarr.open_group(tmp_path / f"{name}.zarr", mode="w", zarr_format=2)
        array = root.create_array("time", data=times.astype("i8") if attributes else times)
        array.attrs.update({"_ARRAY_DIMENSIONS": ["time"], **attributes})
    with pytest.raises(FormatError, match=r"(?s)'calendar' of 'time'.*encoding\['calendar'\] = 'proleptic_gregorian'"):
        open_dataset(tmp_path / "*.zarr", comm=MPI.COMM_SELF)
