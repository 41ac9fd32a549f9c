"""Files that claim more than they have, or inflate to more than they declare: an error, and no memory."""

from __future__ import annotations

import bz2
import json
import lzma
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numcodecs
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support.machine_speed import scaled

ZEROS = 384 << 20  # bytes that a small chunk inflates to
DECLARED = 4  # numbers of float64


def stream(compressor: Any) -> bytes:
    """Return compressed zeros."""
    block = bytes(16 << 20)
    return b"".join([*(compressor.compress(block) for _ in range(ZEROS // len(block))), compressor.flush()])


def zarr_array(folder: Path, chunk: bytes, codecs: list[dict[str, Any]], dtype: str = "<f8") -> Path:
    """Write an array of one chunk."""
    (folder / "x").mkdir(parents=True)
    (folder / ".zgroup").write_text('{"zarr_format": 2}')
    *filters, compressor = codecs
    metadata = {"zarr_format": 2, "shape": [DECLARED], "chunks": [DECLARED], "dtype": dtype, "fill_value": 0}
    metadata |= {"order": "C", "filters": filters or None, "compressor": compressor}
    (folder / "x" / ".zarray").write_text(json.dumps(metadata))
    (folder / "x" / "0").write_bytes(chunk)
    return folder


def zeros_by(codec: dict[str, Any]) -> bytes:
    """Return zeros that numcodecs has compressed."""
    return bytes(numcodecs.get_codec(dict(codec)).encode(np.zeros(ZEROS, np.uint8)))


@cache
def zlib_zeros() -> bytes:
    """Return zeros that zlib has compressed."""
    return stream(zlib.compressobj(1))


ZLIB = {"id": "zlib", "level": 1}
COMPRESSED: dict[str, Callable[[], bytes]] = {
    "zlib": lambda: zlib_zeros(),
    "gzip": lambda: stream(zlib.compressobj(1, zlib.DEFLATED, 31)),
    "bz2": lambda: bz2.compress(bytes(ZEROS // 4), 9) * 4,
    "lzma": lambda: stream(lzma.LZMACompressor(preset=0)),
    "zstd": lambda: zeros_by({"id": "zstd", "level": 1}),
    "lz4": lambda: zeros_by({"id": "lz4"}),
    "blosc": lambda: zeros_by({"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 0}),
}


def zarr_compressed(folder: Path) -> list[Path]:
    """Chunks that inflate to much more than they declare, by each compressor."""
    return [
        zarr_array(folder / name, make(), [{"id": name, "level": 1} if name in ("zlib", "gzip") else {"id": name}])
        for name, make in COMPRESSED.items()
    ]


def zarr_twice_compressed(folder: Path) -> list[Path]:
    """Zeros that were compressed twice: what the outer one inflates to is not declared."""
    return [zarr_array(folder, zlib.compress(zlib_zeros(), 1), [ZLIB, ZLIB])]


def zarr_texts(folder: Path) -> list[Path]:
    """Texts: a number of them that the chunk does not have, and a chunk without end."""
    texts = {"id": "vlen-utf8"}
    many = struct.pack("<I", 0xFFFFFFFF) + bytes(100)
    endless = zlib_zeros()
    return [
        zarr_array(folder / "many", zlib.compress(many), [texts, ZLIB], "|O"),
        zarr_array(folder / "endless", endless, [texts, ZLIB], "|O"),
    ]


def zarr_types(folder: Path) -> list[Path]:
    """A codec that turns each byte into a text of a million characters."""
    casting = {"id": "astype", "encode_dtype": "|u1", "decode_dtype": "<U1000000"}
    return [zarr_array(folder, bytes(4000), [casting, {"id": "crc32"}])]


def hdf5_filters(folder: Path) -> list[Path]:
    """Chunks that were compressed twice, and a chunk of bitshuffle that claims to be large."""
    folder.mkdir()
    twice = folder / "twice.h5"
    with h5py.File(twice, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((DECLARED,))
        properties.set_deflate(1)
        properties.set_filter(32000, h5py.h5z.FLAG_OPTIONAL, (4, 261, 32))  # lzf, behind which nothing is declared
        space = h5py.h5s.create_simple((DECLARED,))
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_DOUBLE, space, properties)
        dataset.write_direct_chunk((0,), zlib.compress(zlib_zeros(), 1), 2)
    claimed = folder / "claimed.h5"
    with h5py.File(claimed, "w") as file:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((1 << 16,))
        properties.set_filter(32008, h5py.h5z.FLAG_OPTIONAL, (0, 4, 8, 0, 2))
        space = h5py.h5s.create_simple((1 << 16,))
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.NATIVE_DOUBLE, space, properties)
        dataset.write_direct_chunk((0,), struct.pack(">QI", ZEROS, 8192) + bytes(1 << 19), 0)
    return [twice, claimed]


def pickled_attributes(folder: Path) -> list[Path]:
    """A frame of pandas whose attribute numbers an object by two thousand millions."""
    folder.mkdir()
    path = folder / "frame.h5"
    with h5py.File(path, "w") as file:
        file.attrs["PYTABLES_FORMAT_VERSION"] = b"2.1"
        group = file.create_group("frame")
        group.attrs["pandas_type"] = b"frame_table"
        group.attrs["table_type"] = b"appendable_frame"
        group.attrs["non_index_axes"] = np.bytes_(b"\x80\x02]r\xff\xff\xff\x7f.")
        group["table"] = np.zeros(3, [("index", "i8"), ("values_block_0", "f8")])
        group["table"].attrs["values_block_0_kind"] = np.bytes_(b"\x80\x02]r\xff\xff\xff\x7f.")
    return [path]


def pickled_images(folder: Path) -> list[Path]:
    """A batch of CIFAR that numbers an object by two thousand millions, and one with an array of a claimed shape."""
    folder.mkdir()
    numbered, shaped = folder / "data_batch_1", folder / "data_batch_2"
    numbered.write_bytes(b"\x80\x02}r\xff\xff\xff\x7f.")
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nJ\xff\xff\xff\x7f\x85U\x01btR"
    shaped.write_bytes(b"\x80\x02}U\x04data" + array + b"s.")
    return [numbered, shaped]


def matlab_element(name: bytes, declared: int, inside: int) -> bytes:
    """Return a compressed variable, a column of zeros, which declares other bytes than it has."""
    head = struct.pack("<8I", 6, 8, 6, 0, 5, 8, declared // 8, 1) + struct.pack("<II8s", 1, len(name), name)
    head += struct.pack("<II", 9, declared)
    compressor = zlib.compressobj(1)
    parts = [compressor.compress(struct.pack("<II", 14, len(head) + declared) + head)]
    parts += [compressor.compress(bytes(min(16 << 20, inside - at))) for at in range(0, inside, 16 << 20)]
    data = b"".join([*parts, compressor.flush()])
    return struct.pack("<II", 15, len(data)) + data


def parquet_repeated(folder: Path) -> list[Path]:
    """A row group of a text that repeats, which has hundreds of megabytes where each row has its own."""
    folder.mkdir()
    path = folder / "a.parquet"
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(ZEROS // 4000, np.int32)), pa.array(["x" * 4000]))
    pq.write_table(pa.table({"text": text}), path, row_group_size=len(text))
    return [path]


MATLAB = b"MATLAB 5.0 MAT-file".ljust(124) + b"\x00\x01IM"


def matlab_beside(folder: Path) -> list[Path]:
    """A small variable beside a large one: only the first one is asked for."""
    folder.mkdir()
    path = folder / "a.mat"
    path.write_bytes(MATLAB + matlab_element(b"x", 80, 80) + matlab_element(b"y", ZEROS, ZEROS))
    return [path]


def matlab_claims(folder: Path) -> list[Path]:
    """A variable that inflates to more than it declares, and one that declares more than it has."""
    folder.mkdir()
    more, fewer = folder / "more.mat", folder / "fewer.mat"
    more.write_bytes(MATLAB + matlab_element(b"x", 80, ZEROS))
    fewer.write_bytes(MATLAB + matlab_element(b"x", 1 << 31, 80))
    return [more, fewer]


CASES: dict[str, Callable[[Path], list[Path]]] = {
    make.__name__: make
    for make in (
        zarr_compressed,
        zarr_twice_compressed,
        zarr_texts,
        zarr_types,
        hdf5_filters,
        pickled_attributes,
        pickled_images,
        matlab_beside,
        matlab_claims,
        parquet_repeated,
    )
}
HARMLESS = ("pickled_attributes", "matlab_beside", "parquet_repeated")
"""Files that are read without what they claim."""
OPTIONS: dict[str, dict[str, Any]] = {
    "pickled_images": {"options": {"format": "cifar"}},
    "matlab_beside": {"inputs": "x"},
}


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, str]]]:
    """Return the files of each case, and what happened when a process with little memory opened them."""
    folder = tmp_path_factory.mktemp("hostile")
    harmless = zarr_array(folder / "harmless", zlib.compress(np.zeros(DECLARED).tobytes()), [ZLIB])
    made = [(name, path) for name, make in CASES.items() for path in make(folder / name)]
    lines = [{"path": str(path), **OPTIONS.get(name, {})} for name, path in [("harmless", harmless), *made]]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.security.opening"],
        input="\n".join(map(json.dumps, lines)),
        capture_output=True,
        text=True,
        timeout=scaled(100),
        env=environment,
        check=False,
    )
    texts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(texts) == len(lines), done.stderr[-2000:]
    assert texts[0] == ""
    found: dict[str, list[tuple[str, str]]] = {}
    for (name, path), text in zip(made, texts[1:], strict=True):
        found.setdefault(name, []).append((path.name, text))
    return found


@pytest.mark.parametrize("case", CASES)
def test_no_memory_is_taken_that_was_not_declared(errors: dict[str, list[tuple[str, str]]], case: str) -> None:
    for name, text in errors[case]:
        kind = text.partition(":")[0]
        assert kind in ("DecodeError", "FormatError", "PartitionError", *([""] if case in HARMLESS else [])), (
            name,
            text,
        )
