"""Files of every format in a store of objects give the samples of the same files on a disk."""

from __future__ import annotations

import gzip
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ase
import ase.io
import h5py
import netCDF4
import numpy as np
import pyhepmc
import pylhe
import pytest
import scipy.io
import tensorflow as tf
import tifffile
from astropy.io import fits
from mpi4py import MPI
from PIL import Image

import matex_data as md
from matex_data.io import files
from matex_data.readers.csv import reader as csv_reader
from tests.support.object_store import ObjectStore, object_store

ROWS = 48
RANDOM = np.random.default_rng(6)
X = RANDOM.integers(0, 90, (ROWS, 7)).astype("f4")
NUMBER = np.arange(ROWS)
LISTS = [np.arange(number % 5, dtype="f4") for number in range(ROWS)]
LINES = [f"{number},{x:.3f},name {number}" for number, x in zip(NUMBER, X[:, 0], strict=True)]
TABLE = "number,x,text\n" + "\n".join(LINES) + "\n"


def _csv(folder: Path) -> None:
    (folder / "table.csv").write_text(TABLE)
    (folder / "table.csv.gz").write_bytes(gzip.compress(TABLE.encode()))
    (folder / "runs").mkdir()
    for part in range(2):
        (folder / "runs" / f"run-{part}.csv").write_text("\n".join(["number,x,text", *LINES[part::2]]) + "\n")


def _jsonl(folder: Path) -> None:
    lines = "".join(f'{{"number": {number}, "x": {float(number) / 3}, "text": "t"}}\n' for number in range(ROWS))
    (folder / "lines.jsonl").write_text(lines)


def _tfrecord(folder: Path) -> None:
    with tf.io.TFRecordWriter(str(folder / "records.tfrecord")) as writer:
        for number in range(ROWS):
            feature = {
                "number": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                "x": tf.train.Feature(float_list=tf.train.FloatList(value=X[number])),
                "list": tf.train.Feature(float_list=tf.train.FloatList(value=LISTS[number])),
            }
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def _fits(folder: Path) -> None:
    lists = fits.Column("list", "PE()", array=np.array([*LISTS, None], object)[:-1])
    columns = [fits.Column("number", "K", array=NUMBER), fits.Column("x", "7E", array=X), lists]
    fits.BinTableHDU.from_columns(columns).writeto(folder / "table.fits")
    fits.PrimaryHDU(RANDOM.integers(0, 999, (ROWS, 5, 4)).astype("i2")).writeto(folder / "cube.fits")
    packed = fits.CompImageHDU(RANDOM.integers(0, 99, (ROWS, 16, 16)).astype("i2"), tile_shape=(4, 16, 16))
    packed.writeto(folder / "packed.fits")


def _matlab(folder: Path) -> None:
    scipy.io.savemat(folder / "seven.mat", {"x": X, "number": NUMBER}, do_compression=True)
    scipy.io.savemat(folder / "four.mat", {"x": X}, format="4")


def _events(folder: Path) -> None:
    info = pylhe.LHEEventInfo(nparticles=2, pid=1, weight=1.0, scale=2.0, aqed=0.1, aqcd=0.2)
    text = '<LesHouchesEvents version="3.0">\n<init>\n2212 2212 4 4 -1 -1 -1 -1 3 1\n1 1 1 1\n</init>\n'
    for number in range(ROWS):
        text += f"<event>\n1 1 {info.weight} {number} 0.1 0.2\n11 1 0 0 0 0 {number} 0 1 2 0.5 0 1\n</event>\n"
    (folder / "events.lhe").write_text(text + "</LesHouchesEvents>\n")
    (folder / "events.lhe.gz").write_bytes(gzip.compress((folder / "events.lhe").read_bytes()))
    with pyhepmc.open(folder / "events.hepmc", "w") as file:
        for number in range(ROWS):
            event = pyhepmc.GenEvent(pyhepmc.Units.GEV, pyhepmc.Units.MM)
            event.event_number = number
            vertex = pyhepmc.GenVertex((0, 0, 0, number))
            vertex.add_particle_in(pyhepmc.GenParticle((1, 2, 3, 9), 11, 4))
            vertex.add_particle_out(pyhepmc.GenParticle((1, 2, number, 99), 22, 1))
            event.add_vertex(vertex)
            file.write(event)


def _atoms(folder: Path) -> None:
    frames = [ase.Atoms("OH2", positions=RANDOM.random((3, 3)), cell=[9, 9, 9], pbc=True) for _ in range(ROWS)]
    ase.io.write(folder / "frames.extxyz", frames)
    ase.io.write(folder / "frames.traj", frames)


def _numbered_pictures(folder: Path) -> None:
    images, labels = RANDOM.integers(0, 255, (ROWS, 6, 5), np.uint8), (NUMBER % 10).astype("u1")
    for name, array in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        head = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
        for end, pack in (("", bytes), (".gz", gzip.compress)):
            place = folder / ("packed" if end else "plain")
            place.mkdir(exist_ok=True)
            (place / (name + end)).write_bytes(pack(head + array.tobytes()))
    records = np.concatenate([labels[:, None], RANDOM.integers(0, 255, (ROWS, 3072), np.uint8)], axis=1)
    (folder / "data_batch_1.bin").write_bytes(records.tobytes())
    content = {b"data": records[:, 1:], b"labels": labels.tolist()}
    (folder / "data_batch_2").write_bytes(pickle.dumps(content, protocol=2))


def _openpmd(folder: Path) -> None:
    with h5py.File(folder / "series.h5", "w") as file:
        file.attrs.update({"openPMD": "1.1.0", "basePath": "/data/%T/", "particlesPath": "particles/"})
        file.attrs["iterationEncoding"] = "groupBased"
        for axis in "xyz":
            component = file.create_dataset(f"data/0/particles/electrons/position/{axis}", data=X[:, 0])
            component.attrs["unitSI"] = 2.0


def _whole(folder: Path) -> None:
    np.savez_compressed(folder / "packed.npz", x=X, number=NUMBER)
    X.tofile(folder / "numbers.raw")
    with netCDF4.Dataset(folder / "plain.nc", "w", format="NETCDF3_CLASSIC") as file:
        file.createDimension("t", ROWS)
        file.createVariable("number", "i4", ("t",))[:] = NUMBER
    (folder / "packed.nc.gz").write_bytes(gzip.compress((folder / "plain.nc").read_bytes()))


def _images(folder: Path) -> None:
    pixels = RANDOM.integers(0, 255, (ROWS, 6, 5), np.uint8)
    tifffile.imwrite(folder / "stack.tif", pixels, photometric="minisblack")
    (folder / "pictures").mkdir()
    for number in range(8):
        Image.fromarray(pixels[number]).save(folder / "pictures" / f"{number}.png")
    rows = "".join(f"pictures/{number}.png,{number}\n" for number in range(8))
    (folder / "manifest.csv").write_text("file,label\n" + rows)


WRITERS: list[Callable[[Path], None]] = [
    *(_csv, _jsonl, _tfrecord, _fits, _matlab, _events, _atoms, _numbered_pictures, _openpmd, _whole, _images)
]
OPTIONS: dict[str, dict[str, Any]] = {
    "numbers.raw": {"format": "raw", "dtype": "f4", "shape": (7,)},
    "packed.fits": {"format": "fits"},
}
NAMES = [
    *("table.csv", "table.csv.gz", "runs/run-*.csv", "runs", "lines.jsonl", "records.tfrecord"),
    *("table.fits", "cube.fits", "packed.fits", "seven.mat", "four.mat"),
    *("events.lhe", "events.lhe.gz", "events.hepmc", "frames.extxyz", "frames.traj"),
    *("plain/train-images-idx3-ubyte", "packed/train-images-idx3-ubyte.gz", "data_batch_1.bin", "data_batch_2"),
    *("series.h5", "packed.npz", "numbers.raw", "packed.nc.gz", "stack.tif", "pictures/3.png", "manifest.csv"),
]


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as running:
        yield running


@pytest.fixture
def environment(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables by which this process finds the store."""
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    for write in WRITERS:
        write(folder)
    return folder


@pytest.fixture(scope="module")
def url(store: ObjectStore, folder: Path) -> str:
    return store.put(folder, "formats")


def _samples(comm: MPI.Intracomm, root: str, environment: dict[str, str]) -> dict[str, Any]:
    """Return the fields of this rank's samples in a shuffled epoch, by file."""
    os.environ.update(environment)
    found = {}
    for name in NAMES:
        try:
            data = md.open_dataset(f"{root}/{name}", comm=comm, **OPTIONS.get(name, {}))
            batches = [
                b if isinstance(b, dict) else {"": b} for b in data.batches(8, shuffle=True, seed=1, remainder="keep")
            ]
            found[name] = {field: [batch[field].tolist() for batch in batches] for field in batches[0]}
        except md.DataError as error:
            found[name] = str(error)
    return found


def _check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in NAMES:
        assert isinstance(expected[name], dict), expected[name]
        assert repr(found[name]) == repr(expected[name]), name


@pytest.mark.slow  # on two ranks: the next test
@pytest.mark.filterwarnings("ignore:.*is stored as gzip")
@pytest.mark.usefixtures("environment")
def test_samples_are_those_of_files(folder: Path, url: str) -> None:
    _check_equal(_samples(MPI.COMM_SELF, url, {}), _samples(MPI.COMM_SELF, str(folder), {}))


@pytest.mark.rank_counts(2)
def test_samples_of_two_ranks_are_those_of_files(pool: Any, store: ObjectStore, folder: Path, url: str) -> None:
    expected = pool.run(_samples, str(folder), {})
    for of_rank, others in zip(pool.run(_samples, url, store.environment), expected, strict=True):
        _check_equal(of_rank, others)


def _large(folder: Path) -> None:
    """Write some megabytes of each format whose rows have byte ranges."""
    rows = 6000
    x = RANDOM.random((rows, 50))
    np.savetxt(folder / "a.csv", x, "%.9f", ",", header=",".join(f"c{i}" for i in range(50)), comments="")
    with (folder / "a.jsonl").open("w") as file:
        file.writelines(f'{{"x": {number}.5, "text": "{"t" * 400}"}}\n' for number in range(rows))
    lists = fits.Column("list", "PE()", array=np.array([*([0.5] * (i % 9) for i in range(rows)), None], object)[:-1])
    fits.BinTableHDU.from_columns([fits.Column("x", "50D", array=x), lists]).writeto(folder / "a.fits")
    feature = {"x": tf.train.Feature(float_list=tf.train.FloatList(value=x[0]))}
    record = tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()
    with tf.io.TFRecordWriter(str(folder / "a.tfrecord")) as writer:
        for _ in range(2 * rows):
            writer.write(record)


@pytest.mark.usefixtures("environment")
def test_files_are_read_once_to_open_them_and_once_in_an_epoch(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_reader, "SMALL_BYTES", 0)
    _large(tmp_path)
    url = store.put(tmp_path, "large")
    for name in ("a.csv", "a.jsonl", "a.fits", "a.tfrecord"):
        size = (tmp_path / name).stat().st_size
        store.forget()
        data = md.open_dataset(f"{url}/{name}", comm=MPI.COMM_SELF)
        begin = 256 << 10  # first blocks: format, headers, data, lists; of a text table 1 MiB more, for its dialect
        assert store.sent <= size + begin + (1 << 20 if name == "a.csv" else 0)
        assert store.requests <= 14
        store.forget()
        assert sum(map(len, (next(iter(batch.values())) for batch in data.batches(64, shuffle=True)))) > 0
        assert store.sent <= 1.05 * size
        assert store.requests <= 40


@pytest.mark.usefixtures("environment")
def test_a_column_of_a_table_is_no_request_for_each_row(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns = [fits.Column("x", "100D", array=np.zeros((2000, 100))), fits.Column("y", "K", array=np.arange(2000))]
    fits.BinTableHDU.from_columns(columns).writeto(tmp_path / "a.fits")
    data = md.open_dataset(store.put(tmp_path / "a.fits", "narrow/a.fits"), comm=MPI.COMM_SELF, inputs="y")
    store.forget()
    np.testing.assert_array_equal(data.load()["y"], np.arange(2000))
    assert store.requests <= 10
    monkeypatch.setattr(files, "OBJECT_BYTES", 1 << 20)  # so that memory bounds a request
    np.testing.assert_array_equal(data.load()["y"], np.arange(2000))
    assert 11 < store.requests <= 20


KINDS = {
    "csv": ("table.csv", "table.csv.gz"),
    "jsonl": ("lines.jsonl",),
    "tfrecord": ("records.tfrecord",),
    "fits": ("table.fits", "packed.fits"),
    "matlab": ("seven.mat",),
    "lhe": ("events.lhe",),
    "hepmc": ("events.hepmc",),
    "xyz": ("frames.extxyz",),
    "traj": ("frames.traj",),
    "idx": ("plain/train-images-idx3-ubyte",),
    "cifar": ("data_batch_1.bin", "data_batch_2"),
    "openpmd": ("series.h5",),
    "npz": ("packed.npz",),
}
FILES = [(name, format) for format, names in KINDS.items() for name in names]


def _outcomes(comm: MPI.Intracomm, root: str, environment: dict[str, str]) -> list[tuple[str, str | None, str]]:
    """Return kind, file and text of the errors of reading files; empty ones where there is none."""
    os.environ.update(environment)
    found = []
    for name, format in FILES:
        try:
            md.open_dataset(f"{root}/{name}", comm=comm, format=format).load()
            found.append(("", None, ""))
        except Exception as error:
            found.append((type(error).__name__, getattr(error, "file", None), str(error).replace(root, "")))
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.rank_counts(2)
def test_a_forbidden_object_is_the_same_error_on_all_ranks(pool: Any, store: ObjectStore, url: str) -> None:
    store.forbidden = "formats"
    try:
        by_rank = pool.run(_outcomes, url, store.environment)
    finally:
        store.forbidden = ""
    assert by_rank[0] == by_rank[1]
    for (name, _), (_, file, text) in zip(FILES, by_rank[0], strict=True):
        assert file == f"{url}/{name}"
        assert "the store does not permit it" in text and "never shown" not in text


@pytest.mark.filterwarnings("ignore")
@pytest.mark.rank_counts(2)
def test_a_truncated_object_is_the_error_of_a_truncated_file(
    pool: Any, store: ObjectStore, folder: Path, tmp_path: Path
) -> None:
    for name, _ in FILES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        content = (folder / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) * 2 // 3 - 1])
    url = store.put(tmp_path, "truncated")
    expected, found = pool.run(_outcomes, str(tmp_path), {}), pool.run(_outcomes, url, store.environment)
    for (name, format), (kind, file, text), (other, _, same) in zip(FILES, found[0], expected[0], strict=True):
        assert kind == other and (text == same or format == "cifar"), text
        assert file == (f"{url}/{name}" if kind else None)
    assert found[0] == found[1]
    read = [name for (name, _), (kind, _, _) in zip(FILES, found[0], strict=True) if not kind]
    assert read == ["table.csv", "frames.extxyz"]  # texts that are cut off in a number


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("environment")
def test_an_object_that_is_forbidden_while_it_is_read(
    store: ObjectStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = store.put(folder, "refused")  # objects of which this process keeps nothing decoded
    opened = {name: md.open_dataset(f"{url}/{name}", comm=MPI.COMM_SELF, format=format) for name, format in FILES}
    monkeypatch.setattr(store, "forbidden", "refused")
    for name, data in opened.items():
        with pytest.raises(md.DataError, match=r"cannot be read(.|\n)*the store does not permit it") as caught:
            list(data.batches(8))
        assert caught.value.file == f"{url}/{name}" and "damaged" not in str(caught.value)
