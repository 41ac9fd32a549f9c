"""Plain arrays against NumPy, files of MNIST and CIFAR against the arrays written to them."""

from __future__ import annotations

import gzip
import pickle
import resource
import struct
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mpi4py import MPI

from matex_data import machine, open_dataset
from matex_data.errors import ChangedFile, DataError, DecodeError, FieldNotFound, FormatError, PartitionError
from matex_data.readers import arrays as npy_files
from matex_data.readers import cifar, detect, has_known_name, reader
from tests.support.format_suite import Case, FormatSuite
from tests.support.serial import every_row, random_rows, same

npy, read_idx, read_cifar = reader("npy"), reader("idx"), reader("cifar")

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
def test_npy_against_numpy(tmp_path: Path, dtype: str, version: tuple[int, int], fortran: bool) -> None:
    array = RANDOM.integers(0, 99, (23, 3, 4)).astype(dtype)
    path = tmp_path / "a.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.asfortranarray(array) if fortran else array, version)
    index = npy(str(path))
    assert index.fields["data"].dtype == array.dtype.newbyteorder("=")
    assert same(every_row(index, "data"), array.astype(array.dtype.newbyteorder("=")))
    found, drawn = random_rows(index, "data", RANDOM)
    assert same(found, array[drawn])


SHAPES = arrays.array_shapes(min_dims=1, max_dims=4, max_side=6)


@given(array=arrays.arrays(st.sampled_from(["<i4", ">f8", "u1"]), SHAPES))
def test_any_shape_in_fortran_order(tmp_path_factory: pytest.TempPathFactory, array: np.ndarray[Any, Any]) -> None:
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    np.save(path, np.asfortranarray(array))
    assert same(every_row(npy(str(path)), "data"), array)


def test_structured_arrays(tmp_path: Path) -> None:
    table = np.zeros(7, [("a", "<i4"), ("b", "<f8", (2,))])
    table["a"] = np.arange(7)
    np.save(tmp_path / "a.npy", table)
    assert same(every_row(npy(str(tmp_path / "a.npy"), field="row"), "row"), table)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_of_two_fields(tmp_path: Path, save: Any) -> None:
    path = str(tmp_path / "a.npz")
    x, y = RANDOM.normal(size=(50, 4)), np.asfortranarray(RANDOM.integers(0, 9, (50, 2)).astype(">i4"))
    save(path, x=x, y=y, scalar=np.float32(3))
    index = npy(path)
    assert list(index.fields) == ["x", "y"]
    assert same(every_row(index, "x"), x) and same(every_row(index, "y"), y)
    with pytest.raises(FieldNotFound, match="one of 'x'"):
        npy(path, ["xx"])


def test_pickles_are_never_read(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{"a": 1}, None], object))
    np.savez(tmp_path / "a.npz", a=np.array([print], object))
    for name in ("a.npy", "a.npz"):
        with pytest.raises(FormatError, match="the array holds Python objects"):
            npy(str(tmp_path / name))
    np.savez(tmp_path / "a.npz", x=np.arange(3), settings=np.array([{"a": 1}, None], object))
    with pytest.warns(UserWarning, match="'settings': the array holds Python objects"):
        data = open_dataset(tmp_path / "a.npz", comm=MPI.COMM_SELF)
    assert same(data.load()["x"], np.arange(3))
    with pytest.raises(FormatError, match="pickles"):
        npy(str(tmp_path / "a.npz"), ["settings"])


def test_a_member_that_is_no_array_is_left_out(tmp_path: Path) -> None:
    path, x = str(tmp_path / "a.npz"), np.arange(12).reshape(4, 3)
    np.savez(path, x=x)
    with zipfile.ZipFile(path, "a") as file:
        file.writestr("about.txt", "run 7")
    with pytest.warns(UserWarning, match=r"'about\.txt': it is no array"):
        data = open_dataset(path, comm=MPI.COMM_SELF)
    assert same(data.load()["x"], x)
    with pytest.raises(FormatError, match="it is no array"):
        npy(path, ["about.txt"])


@pytest.mark.parametrize("end", [0, 5, 9, 40, 130])
def test_truncated_npy(tmp_path: Path, end: int) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.arange(10))
    path.write_bytes(path.read_bytes()[:end])
    try:
        index = npy(str(path))
    except FormatError as error:
        assert error.file == str(path)
    else:
        raise AssertionError(f"{len(index)} samples in {end} bytes")


def test_damaged_npz(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.arange(1000))
    content = path.read_bytes()
    for broken in (content[: len(content) // 2], content[:100] + b"\xff" * 40 + content[140:]):
        path.write_bytes(broken)
        with pytest.raises(DataError):
            every_row(npy(str(path)), "x")


def _with_header(dtype: Any, shape: Any, version: tuple[int, int] = (1, 0), data: bytes = b"") -> bytes:
    """Return an .npy file with that dtype and shape in its header, unchecked."""
    text = repr({"descr": dtype, "fortran_order": False, "shape": shape}).encode() + b"\n"
    length = len(text).to_bytes(2 if version[0] == 1 else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + text + data


WRONG_HEADERS: dict[str, tuple[Any, Any, bytes]] = {
    "V0": ("|V0", (7,), b""),
    "U0": ("<U0", (7,), b""),
    "S0": ("|S0", (7,), b""),
    "a subarray": (("<f4", (2, 3)), (7,), bytes(168)),
    "a subarray by its name": ("(2,3)f4", (7,), bytes(168)),
    "a record of nothing": ([], (7,), b""),
    "65 axes": ("<f4", (1,) * 65, bytes(4)),
    "more numbers than there can be": ("<f4", (0, 1 << 40, 1 << 40), b""),
    "more bytes than the file has": ("<f4", (1 << 60,), bytes(64)),
    "more than 64 bits": ("<f4", (1 << 90,), bytes(64)),
    "samples without bytes": ("<f4", (1 << 60, 0), b""),
    "a negative length": ("<f4", (-1,), bytes(64)),
    "no tuple": ("<f4", "12", bytes(8)),
    "a truth that is none": ("<f4", (True, 2.5), bytes(8)),
    "objects": ("|O", (7,), bytes(56)),
    "objects within": ([("a", "|O"), ("b", "<f4")], (7,), bytes(84)),
    "a dtype that is none": ("<f3", (7,), bytes(84)),
    "one number": ("<f4", (), bytes(4)),
}


@pytest.mark.parametrize("packing", [None, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("case", WRONG_HEADERS)
def test_wrong_headers(tmp_path: Path, case: str, packing: int | None) -> None:
    *header, data = WRONG_HEADERS[case]
    content = _with_header(*header, data=data)
    path = tmp_path / ("a.npy" if packing is None else "a.npz")
    if packing is None:
        path.write_bytes(content)
    else:
        with zipfile.ZipFile(path, "w", packing) as file:
            file.writestr("x.npy", content)
    with _address_space(1 << 30), pytest.raises(FormatError) as caught:
        npy(str(path))
    assert caught.value.file == str(path)


@contextmanager
def _address_space(more: int) -> Iterator[None]:
    """Context manager: limit this process to ``more`` bytes of further memory."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("dtype", ["<M8[ns]", "|V5", "<c16", "<f2", ">U3", [("a", "<f4", (2,)), ("b", "|S3")]])
def test_headers_of_rare_dtypes(tmp_path: Path, dtype: Any) -> None:
    stored = np.lib.format.descr_to_dtype(dtype)
    data = bytes(range(1, 121)) if ">U3" not in str(dtype) else np.array(["abc"] * 10, dtype).tobytes()
    path = tmp_path / "a.npy"
    count = len(data) // stored.itemsize
    path.write_bytes(_with_header(dtype, (count,), data=data[: count * stored.itemsize]))
    assert same(every_row(npy(str(path)), "data"), np.load(path).astype(stored.newbyteorder("=")))


def test_checksum_of_a_stored_member(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    x, y = np.arange(3000), np.ones(5)
    np.savez(path, x=x, y=y)
    content = bytearray(path.read_bytes())
    content[content.index(b"x.npy") + 2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(DecodeError, match="the checksum 0x") as caught:
        npy(str(path))
    assert (caught.value.file, caught.value.field) == (str(path), "x")
    assert same(every_row(npy(str(path), ["y"]), "y"), y)
    unchecked = every_row(npy(str(path), ["x"], verify=False), "x")
    assert (unchecked != x).sum() == 1


@pytest.mark.parametrize("at", [-30, -1])
def test_checksum_of_a_compressed_member(tmp_path: Path, at: int) -> None:
    """Only the checksum shows the damage: stored blocks of deflate have no redundancy."""
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=0) as file:
        file.writestr("x.npy", _with_header("<i8", (3000,), data=np.arange(3000).tobytes()))
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x01\x02") + at] ^= 1
    path.write_bytes(content)
    with pytest.raises(DecodeError, match="CRC") as caught:
        every_row(npy(str(path)), "x")
    assert (caught.value.file, caught.value.field) == (str(path), "x")


def test_a_decompressed_array_that_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.zeros(1 << 20))
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 20)
    with pytest.raises(PartitionError, match="does not fit into the memory") as caught:
        every_row(npy(str(path)), "x")
    assert "8388736 bytes" in str(caught.value) and caught.value.field == "x"


def test_raw_needs_dtype_and_shape(tmp_path: Path) -> None:
    path = tmp_path / "a.raw"
    array = RANDOM.normal(size=(6, 2, 3)).astype(">f4")
    path.write_bytes(b"head" + array.tobytes())
    assert same(every_row(npy(str(path), dtype=">f4", shape=(2, 3), offset=4), "data"), array.astype("f4"))
    with pytest.raises(FormatError, match="does not consist of whole samples"):
        npy(str(path), dtype=">f4", shape=(2, 3))
    with pytest.raises(FormatError, match="dtype= and shape="):
        npy(str(path))
    for dtype, offset in ((">f4", -4), (">f4", 1 << 62), ("S0", 0), ("nonsense", 0)):
        with pytest.raises(FormatError):
            npy(str(path), dtype=dtype, offset=offset)


def _write_idx(path: Path, array: np.ndarray[Any, Any], packed: bool) -> None:
    code = {"u1": 8, "i1": 9, "i2": 11, "i4": 12, "f4": 13, "f8": 14}[array.dtype.str[1:]]
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape)
    content = head + array.astype(array.dtype.newbyteorder(">")).tobytes()
    path.write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [False, True])
def test_changed_labels_are_noticed(tmp_path: Path, packed: bool) -> None:
    path, beside = str(tmp_path / "t-images-idx3-ubyte"), tmp_path / "t-labels-idx1-ubyte"
    _write_idx(Path(path), np.zeros((9, 2, 2), "u1"), packed)
    _write_idx(beside, np.arange(9, dtype="u1"), packed)
    options: dict[str, Any] = {"comm": MPI.COMM_SELF, "inputs": ["image"]}
    stored = {**options, "targets": ["label"], "index": tmp_path / "run.matex"}
    images, data = open_dataset(path, **options), open_dataset(path, **stored)
    same(open_dataset(path, **stored).load()["label"], np.arange(9, dtype="u1"))
    _write_idx(beside, np.arange(9, dtype="u1")[::-1], packed)
    with pytest.raises(ChangedFile, match="labels-idx1"):
        data.load()
    with pytest.warns(UserWarning, match="indexed anew"):
        same(open_dataset(path, **stored).load()["label"], np.arange(9, dtype="u1")[::-1])
    assert len(images.load()["image"]) == 9  # which does not read the labels


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
        assert has_known_name(str(path)) == ("images" in path.name)
    for name, (images, labels) in made.items():
        path = next(tmp_path.glob(f"{name}-images*"))
        index = read_idx(str(path))
        assert same(every_row(index, "image"), images) and same(every_row(index, "label"), labels)
        assert same(every_row(read_idx(str(next(tmp_path.glob(f"{name}-labels*")))), "label"), labels)
        assert len(read_idx(str(path), subset="train")) == (60 if name == "train" else 0)
        assert list(read_idx(str(path), ["label"]).fields) == ["label"]


@pytest.mark.parametrize("packed", [False, True])
def test_a_directory_of_mnist_files(tmp_path: Path, packed: bool) -> None:
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
    assert same(every_row(read_idx(str(tmp_path / "a.idx")), "data"), array)


def test_idx_with_wrong_lengths(tmp_path: Path) -> None:
    _write_mnist(tmp_path, packed=False)
    images, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    content = images.read_bytes()
    for broken, text in ((content[:-1], "as long as"), (content[:7], "ends within"), (b"\1" + content, "no IDX file")):
        images.write_bytes(broken)
        with pytest.raises(FormatError, match=text):
            read_idx(str(images))
    images.write_bytes(content)
    _write_idx(labels, np.zeros(59, np.uint8), packed=False)
    with pytest.raises(FormatError, match="labels do not fit"):
        read_idx(str(images))
    with pytest.raises(FormatError, match="no such subset"):
        read_idx(str(images), ["image"], subset="valid")


@pytest.mark.parametrize(
    "change",
    ["the data", "the checksum", "the length", "the end", "garbage behind", "a number more", "nothing", "zeros"],
)
@pytest.mark.parametrize("kind", ["images", "labels"])
def test_checksum_of_gzipped_idx(tmp_path: Path, kind: str, change: str) -> None:
    images, labels = _write_mnist(tmp_path, packed=False)["train"]
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        whole = (tmp_path / name).read_bytes() + (b"\0" if change == "a number more" and kind in name else b"")
        content = bytearray(gzip.compress(whole, 0))  # stored blocks, of which deflate itself can say nothing
        if kind in name:
            at = {"the data": -20, "the checksum": -8, "the length": -4}.get(change)
            if at is not None:
                content[at] ^= 1
            content = content[: -3 if change == "the end" else None]
            content += {"garbage behind": b"garbage", "zeros": bytes(7)}.get(change, b"")
        (tmp_path / f"{name}.gz").write_bytes(content)
        (tmp_path / name).unlink()
    path = str(tmp_path / "train-images-idx3-ubyte.gz")
    if change in ("nothing", "zeros"):  # gzip allows zeros behind the end
        assert same(every_row(read_idx(path), "image"), images) and same(every_row(read_idx(path), "label"), labels)
        return
    with pytest.raises(DecodeError) as caught:
        every_row(read_idx(path), "image")
    assert kind in str(caught.value.file)


def test_gzipped_idx_with_a_header_of_no_images(tmp_path: Path) -> None:
    content = struct.pack(">BBBB3I", 0, 0, 8, 3, 0, 8, 8)
    (tmp_path / "a.idx.gz").write_bytes(gzip.compress(content))
    assert len(read_idx(str(tmp_path / "a.idx.gz"))) == 0
    (tmp_path / "a.idx.gz").write_bytes(gzip.compress(content + bytes(64)))
    with pytest.raises(DecodeError, match="not as long as its header says"):
        read_idx(str(tmp_path / "a.idx.gz"))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "shape", [(1 << 31, 1 << 31, 1 << 31, 1), (0, *[1 << 31] * 3), ((1 << 32) - 1, 0), ((1 << 32) - 1, 1 << 10)]
)
def test_wrong_headers_of_idx(tmp_path: Path, shape: tuple[int, ...], packed: bool) -> None:
    content = struct.pack(f">BBBB{len(shape)}I", 0, 0, 14, len(shape), *shape)
    (tmp_path / "a.idx").write_bytes(gzip.compress(content) if packed else content)
    with _address_space(1 << 30), pytest.raises(FormatError):
        read_idx(str(tmp_path / "a.idx"))


@pytest.mark.parametrize("labels", [1, 2])
def test_cifar_binary(tmp_path: Path, labels: int) -> None:
    records = RANDOM.integers(0, 256, (20, labels + 3072)).astype(np.uint8)
    records[:, :labels] %= 10
    path = tmp_path / "data_batch_1.bin"
    path.write_bytes(records.tobytes())
    assert detect(str(path), records.tobytes()[:4096]) == "cifar"
    index = read_cifar(str(path))
    expected = records[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    assert same(every_row(index, "image"), expected)
    found, drawn = random_rows(index, "image", RANDOM)
    assert same(found, expected[drawn])
    for at, name in enumerate(cifar.LABELS[labels]):
        assert same(every_row(index, name), records[:, at])


@pytest.mark.parametrize("keys", [(b"labels",), (b"coarse_labels", b"fine_labels")])
def test_cifar_python(tmp_path: Path, keys: tuple[bytes, ...]) -> None:
    images = RANDOM.integers(0, 256, (20, 3072)).astype(np.uint8)
    content = {b"data": images, **{key: RANDOM.integers(0, 10, 20).tolist() for key in keys}}
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content, protocol=2))
    index = read_cifar(str(path))
    assert same(every_row(index, "image"), images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    for key in keys:
        assert same(every_row(index, key.decode()[:-1]), np.array(content[key], np.uint8))


@pytest.mark.parametrize("name, limit", [("label", 10), ("coarse_label", 20), ("fine_label", 100)])
def test_cifar_labels_are_classes(tmp_path: Path, name: str, limit: int) -> None:
    path = tmp_path / "data_batch_1"
    images = np.zeros((20, 3072), np.uint8)
    keys = [b"labels"] if name == "label" else [b"coarse_labels", b"fine_labels"]
    for wrong in (1.7, np.float64(2), limit, -1, 256, 1 << 70, "3", None, True, [1], np.array([1, 2])):
        content: dict[bytes, Any] = {b"data": images, **{key: [1] * 20 for key in keys}}
        content[f"{name}s".encode()] = [1] * 13 + [wrong] + [1] * 6
        path.write_bytes(pickle.dumps(content, protocol=2))
        with pytest.raises(FormatError) as caught:
            read_cifar(str(path))
        if not isinstance(wrong, np.ndarray | np.generic):  # which the pickle may not make
            assert (caught.value.file, caught.value.field, caught.value.row) == (str(path), name, 13)
    for wrong in (7, np.full(20, 1.7), np.ones((20, 2), int)):
        path.write_bytes(pickle.dumps({**content, f"{name}s".encode(): wrong}, protocol=2))
        with pytest.raises(FormatError):
            read_cifar(str(path))
    path.write_bytes(pickle.dumps({**content, f"{name}s".encode(): np.full(20, limit - 1)}, protocol=2))
    assert (every_row(read_cifar(str(path)), name) == limit - 1).all()


def test_cifar_binary_labels_are_classes(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for labels, limits in ((1, [10]), (2, [20, 100])):
        for at, limit in enumerate(limits):
            records = np.zeros((5000, labels + 3072), np.uint8)
            records[4321, at] = limit
            path.write_bytes(records.tobytes())
            with pytest.raises(FormatError) as caught:
                read_cifar(str(path))
            assert (caught.value.file, caught.value.field, caught.value.row) == (
                str(path),
                cifar.LABELS[labels][at],
                4321,
            )


def test_a_pickle_with_a_huge_object_number(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"\x80\x02}r" + struct.pack("<I", 0x7FFFFFFF) + b".")
    with _address_space(1 << 30), pytest.raises(FormatError, match="not a CIFAR file"):
        read_cifar(str(path))


def test_headers_are_parsed_by_many_threads_at_once() -> None:
    def parse(number: int) -> tuple[int, ...]:
        text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({number}, 3, 4, 5, 6), }}"
        return npy_files._parse_header(text)[1]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(parse, range(4000))) == [(number, 3, 4, 5, 6) for number in range(4000)]


def test_cifar_runs_no_code(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(b"\x80\x02cos\nsystem\nX\x05\x00\x00\x00false\x85R.")
    with pytest.raises(FormatError, match=r"of the type os\.system"):
        read_cifar(str(path))
    path.with_suffix(".bin").write_bytes(b"x" * 5000)
    with pytest.raises(FormatError, match="multiple of 3073"):
        read_cifar(str(path.with_suffix(".bin")))


@pytest.mark.parametrize("shape", ["(10L,)", "(5L, 2L)"])
def test_headers_of_python_2(tmp_path: Path, shape: str) -> None:
    text = f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}"
    header = text.ljust(117).encode() + b"\n"
    path = tmp_path / "old.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + np.arange(10.0).tobytes())
    expected = np.load(path)
    assert np.array_equal(open_dataset(path).load()["data"], expected)
