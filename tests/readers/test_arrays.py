"""Plain arrays against NumPy itself, files of MNIST and CIFAR against what was written into them."""

from __future__ import annotations

import gzip
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mpi4py import MPI

from matex_data import open_dataset
from matex_data.errors import DataError, FieldNotFound, FormatError
from matex_data.readers import arrays as reader
from matex_data.readers import cifar, detect, idx, recognised
from tests.format_suite import Case, FormatSuite
from tests.readers.serial import every_row, same, some_rows

RANDOM = np.random.default_rng(0)


class TestNpy(FormatSuite):
    def write(self, folder: Path) -> Case:
        whole = np.random.default_rng(1).normal(size=(301, 5)).astype(">f4")
        table = np.zeros(301, [("id", "<i8"), ("x", "<f4", (5,))])
        table["id"], table["x"] = np.arange(301), whole
        np.savez(folder / "part1.npz", id=table["id"][:150], x=np.asfortranarray(table["x"][:150]))
        np.savez_compressed(folder / "part10.npz", id=table["id"][187:], x=table["x"][187:])
        np.savez(folder / "part2.npz", id=table["id"][150:187], x=table["x"][150:187])
        return Case(str(folder / "*.npz"), {"id": table["id"], "x": table["x"]}, "id")

    def damage(self, folder: Path) -> Case:
        np.savez_compressed(folder / "a.npz", id=np.arange(1000))
        content = bytearray((folder / "a.npz").read_bytes())
        content[len(content) // 2] ^= 0xFF
        (folder / "a.npz").write_bytes(content)
        return Case(str(folder / "a.npz"), {}, "id")


DTYPES = ["<i2", ">i2", ">i4", "<f4", ">f4", ">f8", "u1", "?", "<c8", "S5", "<U3", "<f2", ">u8"]


@pytest.mark.parametrize("fortran", [False, True])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_npy_is_what_numpy_wrote(tmp_path: Path, dtype: str, version: tuple[int, int], fortran: bool) -> None:
    array = RANDOM.integers(0, 99, (23, 3, 4)).astype(dtype)
    path = tmp_path / "a.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.asfortranarray(array) if fortran else array, version)
    index = reader.index(str(path))
    assert index.fields["data"].dtype == array.dtype.newbyteorder("=")
    assert same(every_row(index, "data"), array.astype(array.dtype.newbyteorder("=")))
    found, drawn = some_rows(index, "data", RANDOM)
    assert same(found, array[drawn])


SHAPES = arrays.array_shapes(min_dims=1, max_dims=4, max_side=6)


@given(array=arrays.arrays(st.sampled_from(["<i4", ">f8", "u1"]), SHAPES))
def test_any_shape_in_fortran_order(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray[Any, Any]) -> None:
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    np.save(path, np.asfortranarray(array))
    assert same(every_row(reader.index(str(path)), "data"), array)


def test_structured_arrays_come_as_they_are(tmp_path: Path) -> None:
    table = np.zeros(7, [("a", "<i4"), ("b", "<f8", (2,))])
    table["a"] = np.arange(7)
    np.save(tmp_path / "a.npy", table)
    assert same(every_row(reader.index(str(tmp_path / "a.npy"), field="row"), "row"), table)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_holds_several_fields(tmp_path: Path, save: Any) -> None:
    path = str(tmp_path / "a.npz")
    x, y = RANDOM.normal(size=(50, 4)), np.asfortranarray(RANDOM.integers(0, 9, (50, 2)).astype(">i4"))
    save(path, x=x, y=y, scalar=np.float32(3))
    index = reader.index(path)
    assert list(index.fields) == ["x", "y"]
    assert same(every_row(index, "x"), x) and same(every_row(index, "y"), y)
    with pytest.raises(FieldNotFound, match="one of 'x'"):
        reader.index(path, ["xx"])


def test_pickles_are_never_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"a": 1}, None], object))
    np.savez(tmp_path / "a.npz", a=np.array([print], object))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(FormatError, match="the array holds Python objects"):
            reader.index(str(tmp_path / name))


@pytest.mark.parametrize("end", [0, 5, 9, 40, 130])
def test_npy_that_ends_early(tmp_path: Path, end: int) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(10))
    path.write_bytes(path.read_bytes()[:end])
    try:
        index = reader.index(str(path))
    except FormatError as error:
        assert error.file == str(path)
    else:
        assert index.files[0].parts["data"].end() > end  # which opening compares with the size of the file


def test_npz_that_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.arange(1000))
    content = path.read_bytes()
    for broken in (content[: len(content) // 2], content[:100] + b"\xff" * 40 + content[140:]):
        path.write_bytes(broken)
        with pytest.raises(DataError):
            every_row(reader.index(str(path)), "x")


def test_raw_needs_dtype_and_shape(tmp_path: Path) -> None:
    path = tmp_path / "a.raw"
    array = RANDOM.normal(size=(6, 2, 3)).astype(">f4")
    path.write_bytes(b"head" + array.tobytes())
    assert same(every_row(reader.index(str(path), dtype=">f4", shape=(2, 3), offset=4), "data"), array.astype("f4"))
    with pytest.raises(FormatError, match="not made of whole samples"):
        reader.index(str(path), dtype=">f4", shape=(2, 3))
    with pytest.raises(FormatError, match="dtype= and shape="):
        reader.index(str(path))


def _write_idx(path: Path, array: np.ndarray[Any, Any], packed: bool) -> None:
    code = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}[array.dtype.str[1:]]
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    content = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(content) if packed else content)


def _write_mnist(folder: Path, packed: bool) -> dict[str, tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    made = {}
    for name, rows in (("train", 60), ("t10k", 13)):
        images = RANDOM.integers(0, 256, (rows, 28, 28)).astype(np.uint8)
        labels = RANDOM.integers(0, 10, rows).astype(np.uint8)
        end = ".gz" if packed else ""
        _write_idx(folder / f"{name}-images-idx3-ubyte{end}", images, packed)
        _write_idx(folder / f"{name}-labels-idx1-ubyte{end}", labels, packed)
        made[name] = images, labels
    return made


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_images_come_with_their_labels(tmp_path: Path, packed: bool) -> None:
    made = _write_mnist(tmp_path, packed)
    for path in sorted(tmp_path.iterdir()):
        assert detect(str(path), path.read_bytes()[:4096]) == "idx"
        assert recognised(str(path)) == ("images" in path.name)
    for name, (images, labels) in made.items():
        path = next(tmp_path.glob(f"{name}-images*"))
        index = idx.index(str(path))
        assert same(every_row(index, "image"), images) and same(every_row(index, "label"), labels)
        assert same(every_row(idx.index(str(next(tmp_path.glob(f"{name}-labels*")))), "label"), labels)
        assert len(idx.index(str(path), subset="train")) == (60 if name == "train" else 0)
        assert list(idx.index(str(path), ["label"]).fields) == ["label"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_directory_stands_for_its_images(tmp_path: Path, packed: bool) -> None:
    made = _write_mnist(tmp_path, packed)
    for subset, name in (("train", "train"), ("test", "t10k")):
        data = open_dataset(tmp_path, subset=subset, inputs="image", targets="label", comm=MPI.COMM_SELF)
        images, labels = made[name]
        assert len(data) == len(images)
        assert same(data.load()["image"], images) and same(data.load()["label"], labels)
        seen = np.concatenate([label for _, label in data.batches(5, shuffle=True, seed=1, remainder="keep")])
        assert same(np.sort(seen), np.sort(labels))
    assert len(open_dataset(tmp_path, comm=MPI.COMM_SELF)) == 73


@pytest.mark.parametrize("dtype", ["u1", "i1", "i2", "i4", "f4", "f8"])
def test_idx_of_every_type(tmp_path: Path, dtype: str) -> None:
    array = RANDOM.integers(0, 99, (9, 2, 3)).astype(dtype)
    _write_idx(tmp_path / "a.idx", array, packed=False)
    assert same(every_row(idx.index(str(tmp_path / "a.idx")), "data"), array)


def test_idx_that_lies(tmp_path: Path) -> None:
    _write_mnist(tmp_path, packed=False)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    content = images.read_bytes()
    for broken, text in ((content[:-1], "as long as"), (content[:7], "ends within"), (b"\1" + content, "no IDX file")):
        images.write_bytes(broken)
        with pytest.raises(FormatError, match=text):
            idx.index(str(images))
    images.write_bytes(content)
    _write_idx(labels, np.zeros(59, np.uint8), packed=False)
    with pytest.raises(FormatError, match="labels do not fit"):
        idx.index(str(images))
    with pytest.raises(FormatError, match="no such subset"):
        idx.index(str(images), ["image"], subset="valid")


@pytest.mark.parametrize("labels", [1, 2])
def test_cifar_binary(tmp_path: Path, labels: int) -> None:
    records = RANDOM.integers(0, 256, (20, labels + 3072)).astype(np.uint8)
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(records.tobytes())
    assert detect(str(path), records.tobytes()[:4096]) == "cifar"
    index = cifar.index(str(path))
    expected = records[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    assert same(every_row(index, "image"), expected)
    found, drawn = some_rows(index, "image", RANDOM)
    assert same(found, expected[drawn])
    for at, name in enumerate(cifar.LABELS[labels]):
        assert same(every_row(index, name), records[:, at])


@pytest.mark.parametrize("keys", [(b"labels",), (b"coarse_labels", b"fine_labels")])
def test_cifar_python(tmp_path: Path, keys: tuple[bytes, ...]) -> None:
    images = RANDOM.integers(0, 256, (20, 3072)).astype(np.uint8)
    content = {b"data": images, **{key: RANDOM.integers(0, 10, 20).tolist() for key in keys}}
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content, protocol=2))
    index = cifar.index(str(path))
    assert same(every_row(index, "image"), images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    for key in keys:
        assert same(every_row(index, key.decode()[:-1]), np.array(content[key], np.uint8))


def test_cifar_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00false\x85R.")
    with pytest.raises(FormatError, match=r"it wants os\.system"):
        cifar.index(str(path))
    path.with_suffix(".bin").write_bytes(b"x" * 5000)
    with pytest.raises(FormatError, match="multiple of 3073"):
        cifar.index(str(path.with_suffix(".bin")))
