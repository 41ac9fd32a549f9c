"""Damaged files of plain arrays: an error that names the file, or the values that an independent library reads.

``python -m tests.readers.test_arrays_fuzz 3000 1`` goes through so many damaged files of each kind, drawn from
the seed behind it.
"""

from __future__ import annotations

import gzip
import io
import pickle
import resource
import shutil
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from matex_data import DataError, open_dataset
from matex_data.readers import cifar, reader
from tests.support.machine_speed import scaled
from tests.support.serial import every_row, same

Arrays = dict[str, Any]
CASES = 120  # of each kind
MEMORY = 512 << 20  # bytes that a damaged file of a few kilobytes may take
SECONDS = 10
EXTREMES = (0, 1, 0x7F, 0xFF, 1 << 15, 1 << 31, (1 << 31) - 1, (1 << 32) - 1, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)


def _npz(save: Callable[..., Any]) -> bytes:
    file = io.BytesIO()
    random = np.random.default_rng(2)
    save(file, x=random.normal(size=(40, 6)), y=np.asfortranarray(random.integers(0, 9, (40, 3)).astype(">i4")))
    return file.getvalue()


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _idx() -> bytes:
    images = np.random.default_rng(3).integers(0, 256, (30, 8, 8)).astype(np.uint8)
    return struct.pack(">BBBB3I", 0, 0, 8, 3, 30, 8, 8) + images.tobytes()


def _cifar(labels: int) -> bytes:
    records = np.random.default_rng(4).integers(0, 256, (3, labels + 3072)).astype(np.uint8)
    records[:, :labels] %= 10
    return records.tobytes()


def _pickled() -> bytes:
    images = np.random.default_rng(5).integers(0, 256, (3, 3072)).astype(np.uint8)
    return pickle.dumps({b"data": images, b"labels": [1, 7, 3], b"filenames": [b"a.png"] * 3}, protocol=2)


_TABLE = np.zeros(20, [("id", "<i8"), ("x", ">f4", (3,)), ("name", "S4")])
ORIGINALS: dict[str, tuple[str, bytes]] = {
    "npy": ("a.npy", _npy(np.arange(600.0).reshape(20, 5, 6))),
    "npy in Fortran order": ("a.npy", _npy(np.asfortranarray(np.arange(600, dtype=">i2").reshape(20, 5, 6)))),
    "npy of records": ("a.npy", _npy(_TABLE)),
    "npz": ("a.npz", _npz(np.savez)),
    "npz compressed": ("a.npz", _npz(np.savez_compressed)),
    "idx": ("a.idx", _idx()),
    "idx gzipped": ("a.idx.gz", gzip.compress(_idx())),
    "cifar-10": ("data_batch_1.bin", _cifar(1)),
    "cifar-100": ("cifar-100-binary/train.bin", _cifar(2)),
    "cifar pickled": ("data_batch_1", _pickled()),
}


def damaged(content: bytes, random: np.random.Generator) -> bytes:
    """Return the content with one to three changes, most of them near its start and its end, where the headers are."""
    data = bytearray(content)
    for _ in range(int(random.integers(1, 4))):
        where = int(random.integers(3))
        at = int(random.integers(len(data))) if not where else int(random.integers(min(len(data), 160)))
        at = len(data) - 1 - at if where == 2 else at
        change = int(random.integers(9))
        if change == 0:
            data[at] ^= 1 << int(random.integers(8))
        elif change == 1:
            data[at] = int(random.integers(256))
        elif change == 2:
            del data[at + int(random.integers(2)) :]
        elif change == 3:
            del data[at : at + int(random.integers(1, 20))]
        elif change == 4:
            data[at:at] = random.bytes(int(random.integers(1, 20)))
        elif change == 5:
            data[at : at + 8] = bytes(8)
        elif change == 6:
            width, order = int(random.choice([2, 4, 8])), str(random.choice(["little", "big"]))
            number = EXTREMES[random.integers(len(EXTREMES))] & ((1 << 8 * width) - 1)
            data[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
        elif change == 7:
            digits = [i for i, byte in enumerate(data[:200]) if chr(byte).isdigit()]
            if digits:
                i = digits[int(random.integers(len(digits)))]
                data[i : i + 1] = str(random.choice(["0", "9", "99999999", "-1", "1,1,1", "65"])).encode()
        else:
            data += random.bytes(int(random.integers(1, 9)))
        if not data:
            return b""
    return bytes(data)


def _by_numpy(path: Path) -> Arrays:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if path.suffix == ".npy":
            return {"data": np.load(path, allow_pickle=False)}
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}


def _by_hand(path: Path) -> Arrays:
    """Read an IDX file with gzip and struct."""
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    zeros, kind, axes = struct.unpack_from(">HBB", content)
    shape = struct.unpack_from(f">{axes}I", content, 4)
    dtype = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}[kind]
    assert zeros == 0
    return {"data": np.frombuffer(content, dtype, offset=4 + 4 * axes).reshape(shape)}


def _by_record(path: Path) -> Arrays:
    size = path.stat().st_size
    labels = 1 if size % 3073 == 0 else 2
    records = np.fromfile(path, np.uint8).reshape(-1, labels + 3072)
    images = records[:, labels:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return {"image": images, **{name: records[:, at] for at, name in enumerate(cifar.LABELS[labels])}}


class _Unpickler(pickle.Unpickler):
    """Unpickler of the standard library in C, restricted to arrays."""

    def find_class(self, module: str, name: str) -> Any:
        assert module == "_codecs" or (module.split(".")[0] == "numpy" and name in ("_reconstruct", "ndarray", "dtype"))
        return super().find_class(module, name)


def _by_pickle(path: Path) -> Arrays:
    found = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    names = {"label": b"labels", "coarse_label": b"coarse_labels", "fine_label": b"fine_labels"}
    images = found[b"data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return {"image": images, **{name: np.array(found[key], np.uint8) for name, key in names.items() if key in found}}


REFERENCES: dict[str, Callable[[Path], Arrays]] = {
    "npy": _by_numpy,
    "npz": _by_numpy,
    "idx": _by_hand,
    "cifar": _by_record,
    "cifar pickled": _by_pickle,
}


def _reference(kind: str) -> Callable[[Path], Arrays]:
    return REFERENCES.get(kind) or REFERENCES[kind.split()[0].split("-")[0]]


def _by_index(kind: str, path: Path) -> Arrays:
    name = kind.split()[0].split("-")[0]
    index = reader(name)(str(path))
    return {name: every_row(index, name) for name in index.fields}


def _by_opening(kind: str, path: Path) -> Arrays:
    return dict(open_dataset(path, format=kind.split()[0].split("-")[0], comm=MPI.COMM_SELF).load())


@contextmanager
def _limited() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    began = time.monotonic()
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert time.monotonic() - began < scaled(SECONDS)


def outcome(kind: str, path: Path, read: Callable[[str, Path], Arrays]) -> str:
    """Read a damaged file. Return "refused", "equal", or "read by us alone" if the other library refuses it."""
    try:
        with _limited():
            found = read(kind, path)
    except DataError as error:
        assert error.file == str(path), error
        return "refused"
    try:
        with _limited():
            expected = _reference(kind)(path)
    except Exception:
        return "read by us alone"
    for name, values in found.items():
        native = expected[name].astype(expected[name].dtype.newbyteorder("="))
        assert same(values, native), name
    return "equal"


def run(kind: str, cases: int, seed: int, folder: Path, read: Callable[[str, Path], Arrays]) -> Counter[str]:
    """Read so many damaged files and count the outcomes. A file that fails a check stays in the folder."""
    random, counts = np.random.default_rng(seed), Counter[str]()
    name, content = ORIGINALS[kind]
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    for _ in range(cases):
        path.write_bytes(damaged(content, random))
        counts[outcome(kind, path, read)] += 1
    return counts


@pytest.mark.parametrize("kind", ORIGINALS)
def test_damage_is_found_or_harmless(tmp_path: Path, kind: str) -> None:
    path = tmp_path / ORIGINALS[kind][0]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(ORIGINALS[kind][1])
    assert outcome(kind, path, _by_index) == "equal"
    counts = run(kind, CASES, 7, tmp_path, _by_index)
    assert counts["refused"] > CASES // 10


@pytest.mark.parametrize("kind", ORIGINALS)
def test_damage_is_found_by_open_dataset(tmp_path: Path, kind: str) -> None:
    run(kind, CASES // 4, 8, tmp_path, _by_opening)


if __name__ == "__main__":
    for kind in ORIGINALS:
        folder = Path(tempfile.mkdtemp(prefix="fuzz"))  # stays where something fails
        print(kind, dict(run(kind, int(sys.argv[1]), int(sys.argv[2]), folder, _by_index)), flush=True)
        shutil.rmtree(folder)
