"""Decoding of chunks that HDF5 and its plugins wrote."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data.codecs.bounded import BrokenChunk
from matex_data.codecs.pipeline import DEFLATE, FLETCHER32, SHUFFLE, Filter, Pipeline, can_decode

hdf5plugin = pytest.importorskip("hdf5plugin")

RANDOM = np.random.default_rng(11)
FILTERS: dict[str, Any] = {
    "nothing": {},
    "deflate": {"compression": 4},
    "shuffle": {"shuffle": True},
    "fletcher32": {"fletcher32": True},
    "all three": {"compression": 1, "shuffle": True, "fletcher32": True},
    "lzf": {"compression": "lzf", "shuffle": True},
    "szip nn": {"compression": "szip", "compression_opts": ("nn", 16)},
    "szip ec": {"compression": "szip", "compression_opts": ("ec", 8)},
    "lz4": hdf5plugin.LZ4(),
    "lz4 in blocks": hdf5plugin.LZ4(nbytes=1024),
    "zstd": hdf5plugin.Zstd(),
    "bzip2": hdf5plugin.BZip2(),
    "bitshuffle": hdf5plugin.Bitshuffle(cname="none"),
    "bitshuffle lz4": hdf5plugin.Bitshuffle(cname="lz4"),
    "bitshuffle zstd": hdf5plugin.Bitshuffle(cname="zstd"),
    "bitshuffle in blocks": hdf5plugin.Bitshuffle(nelems=64, cname="lz4"),
}
for codec in ("blosclz", "lz4", "lz4hc", "zlib", "zstd"):
    for shuffle, name in enumerate(("", " shuffle", " bitshuffle")):
        FILTERS[f"blosc {codec}{name}"] = hdf5plugin.Blosc(codec, 5, shuffle)
        FILTERS[f"blosc2 {codec}{name}"] = hdf5plugin.Blosc2(codec, 5, shuffle)
SHAPES = [(7,), (1540,), (7, 20, 11), (10, 70, 50)]


def chunk_of(path: Path, data: np.ndarray[Any, Any], filters: Any) -> tuple[Pipeline, np.ndarray[Any, Any], int]:
    """Write a dataset of one chunk with HDF5, and return its pipeline, bytes and filter mask."""
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", data=data, chunks=data.shape, **filters)
        plist = made.id.get_create_plist()
        steps = [plist.get_filter(i) for i in range(plist.get_nfilters())]
        mask, stored = made.id.read_direct_chunk((0,) * data.ndim)
    pipeline = Pipeline(tuple(Filter(step[0], tuple(step[2])) for step in steps), data.itemsize, data.nbytes)
    return pipeline, np.frombuffer(stored, np.uint8), mask


def sample(shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Return numbers that compress moderately."""
    walk = np.cumsum(RANDOM.integers(-3, 4, shape), axis=0)
    if dtype.startswith("V"):
        return np.frombuffer(np.repeat(walk.astype("u1"), int(dtype[1:]), axis=-1).tobytes(), dtype).reshape(shape)
    return np.asarray(walk.astype(dtype))


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode_chunks_of_hdf5(tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    for dtype in (">i2", "f8") if name.startswith(("blosc", "szip")) else ("i1", ">i2", "i4", "c16", "V12"):
        for data in (sample(shape, dtype), np.zeros(shape, dtype)):
            try:
                pipeline, stored, mask = chunk_of(tmp_path / "a.h5", data, FILTERS[name])
            except (ValueError, OSError):  # szip has no blocks larger than a row
                assert name.startswith("szip")
                continue
            assert all(can_decode(step) for step in pipeline.filters)
            assert pipeline.decode(stored, mask).tobytes() == data.tobytes()
            out = np.full(data.nbytes, 0xA5, np.uint8)
            assert pipeline.decode(stored, mask, out) is out
            assert out.tobytes() == data.tobytes()


ORDERS = [
    (DEFLATE, SHUFFLE, FLETCHER32),
    (FLETCHER32, SHUFFLE, DEFLATE),
    (SHUFFLE, FLETCHER32, DEFLATE),
    (FLETCHER32, DEFLATE, FLETCHER32),
    (DEFLATE, DEFLATE),
    (SHUFFLE, 32004, SHUFFLE, 32015, FLETCHER32),
    (32000, DEFLATE),
    (32008, 32001),
    (32015, 32026, DEFLATE),
]


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_filters_in_any_order(tmp_path: Path, order: tuple[int, ...]) -> None:
    options = {32008: (0, 2), 32015: (3,), 32004: (0,)}
    data = sample((40, 50), "i4")
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((40, 50))
    for number in order:
        plist.set_filter(number, h5py.h5z.FLAG_OPTIONAL, options.get(number, ()) if number > DEFLATE else (4,))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        space = h5py.h5s.create_simple((40, 50))
        made = h5py.Dataset(h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I32LE, space, plist))
        made[...] = data
        kept = made.id.get_create_plist()
        steps = tuple(Filter(kept.get_filter(i)[0], tuple(kept.get_filter(i)[2])) for i in range(len(order)))
        mask, stored = made.id.read_direct_chunk((0, 0))
    decoded = Pipeline(steps, 4, data.nbytes).decode(np.frombuffer(stored, np.uint8), mask)
    assert [step.number for step in steps] == list(order)
    assert decoded.tobytes() == data.tobytes()


@given(st.binary(max_size=200), st.integers(1, 17))
def test_shuffle_is_a_transposition(content: bytes, width: int) -> None:
    data = np.frombuffer(content, np.uint8)
    whole = len(data) // width * width
    shuffled = np.concatenate([data[:whole].reshape(-1, width).T.reshape(-1), data[whole:]])
    pipeline = Pipeline((Filter(SHUFFLE, (width,)),), width, len(data))
    assert pipeline.decode(shuffled).tobytes() == content
    out = np.empty(len(data), np.uint8)
    pipeline.decode(shuffled, 0, out)
    assert out.tobytes() == content


@given(st.binary(min_size=1, max_size=300), st.integers(0, 7), st.integers(1, 8))
def test_masked_filters_are_skipped(content: bytes, mask: int, width: int) -> None:
    data = np.frombuffer(content, np.uint8)
    stored = data
    if not mask & 1:
        whole = len(data) // width * width
        stored = np.concatenate([data[:whole].reshape(-1, width).T.reshape(-1), data[whole:]])
    if not mask & 2:
        stored = np.frombuffer(zlib.compress(stored.tobytes()), np.uint8)
    if not mask & 4:
        stored = np.append(stored, np.frombuffer(fletcher32(stored.tobytes()).to_bytes(4, "little"), np.uint8))
    pipeline = Pipeline((Filter(SHUFFLE, (width,)), Filter(DEFLATE, (4,)), Filter(FLETCHER32)), width, len(data))
    assert pipeline.decode(stored, mask).tobytes() == content


def fletcher32(data: bytes) -> int:
    """Return the checksum of the HDF5 specification: 16-bit big-endian words, an odd last byte as an upper byte."""
    words = np.frombuffer(data + b"\0" * (len(data) % 2), ">u2").tolist()
    first = second = 0
    for word in words:
        first = (first + word) % 65535
        second = (second + first) % 65535
    return (second or 65535 * bool(words and any(words))) << 16 | (first or 65535 * bool(any(words)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name.startswith("blosc") and "shuffle" in name else ())
        for name in FILTERS
        if name not in ("nothing", "shuffle", "bitshuffle")
    ],
)
@given(data=st.data())
def test_corrupt_chunks_raise_broken_chunk(tmp_path_factory: Any, name: str, data: Any) -> None:
    whole = (np.arange(1540, dtype="i4") ** 2 // 7 % 500).reshape(7, 20, 11)
    pipeline, stored, mask = chunk_of(tmp_path_factory.getbasetemp() / "broken.h5", whole, FILTERS[name])
    broken = bytearray(stored[: data.draw(st.integers(0, len(stored)))])
    for at in data.draw(st.lists(st.integers(0, max(0, len(broken) - 1)), max_size=4)) if broken else []:
        broken[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded = pipeline.decode(np.frombuffer(bytes(broken), np.uint8), mask)
    except BrokenChunk as error:
        assert str(error)
    else:
        assert decoded.nbytes == whole.nbytes
        assert "fletcher32" not in name or decoded.tobytes() == whole.tobytes()


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_bitshuffle_chunk_that_ends_early_is_broken(tmp_path: Path, left: int) -> None:
    pipeline, stored, mask = chunk_of(tmp_path / "a.h5", sample((1027,), "i4"), FILTERS["bitshuffle lz4"])
    with pytest.raises(BrokenChunk):  # three elements at the end are stored as they are
        pipeline.decode(stored[: len(stored) - 12 + left], mask)


def test_any_error_of_a_library_is_a_broken_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """imagecodecs reads the size of a damaged Blosc2 frame, and may ask Python for bytes of a negative size."""

    def decode(*_: Any, **__: Any) -> bytes:
        raise SystemError("Negative size passed to PyBytes_FromStringAndSize")

    monkeypatch.setattr("matex_data.codecs.blosc2.imagecodecs.blosc2_decode", decode)
    whole = sample((40, 50), "i4")
    pipeline, stored, mask = chunk_of(tmp_path / "a.h5", whole, FILTERS["blosc2 lz4 bitshuffle"])
    with pytest.raises(BrokenChunk, match="Negative size"):
        pipeline.decode(stored, mask)


def test_wrong_checksum(tmp_path: Path) -> None:
    data = sample((40, 50), "i4")
    pipeline, stored, mask = chunk_of(tmp_path / "a.h5", data, FILTERS["all three"])
    for at in (0, 10, len(stored) - 2):
        broken = stored.copy()
        broken[at] ^= 1
        with pytest.raises(BrokenChunk, match="fletcher32"):
            pipeline.decode(broken, mask)


def test_decoded_chunks_do_not_share_memory(tmp_path: Path) -> None:
    pipelines = [
        Pipeline((Filter(SHUFFLE, (4,)), Filter(DEFLATE, (4,))), 4, 8000),
        Pipeline((Filter(FLETCHER32), Filter(DEFLATE, (4,))), 4, 8000),
        Pipeline((Filter(SHUFFLE, (1,)), Filter(DEFLATE, (4,))), 1, 8000),
    ]
    for pipeline in pipelines:
        chunks = []
        for value in range(4):
            content = np.full(2000, value, "<u4").tobytes()
            if pipeline.filters[0].number == FLETCHER32:
                content += fletcher32(content).to_bytes(4, "little")
            else:
                width = pipeline.filters[0].options[0]
                content = np.frombuffer(content, np.uint8).reshape(-1, width).T.tobytes()
            chunks.append(pipeline.decode(np.frombuffer(zlib.compress(content), np.uint8)))
        assert [set(chunk.view("<u4").tolist()) for chunk in chunks] == [{0}, {1}, {2}, {3}]


def test_decode_on_several_threads(tmp_path: Path) -> None:
    for name in ("all three", "bitshuffle lz4", "blosc zstd shuffle"):
        cases = []
        for i in range(8):
            data = sample((30 + i, 50), "i4")
            cases.append((data, *chunk_of(tmp_path / f"{i}.h5", data, FILTERS[name])))
        with ThreadPoolExecutor(4) as pool:
            decoded = pool.map(lambda case: case[1].decode(case[2], case[3]), cases * 25)
        assert all(got.tobytes() == case[0].tobytes() for got, case in zip(decoded, cases * 25, strict=True))


def test_unknown_filters() -> None:
    assert not can_decode(Filter(305))
    assert not can_decode(Filter(6, (1, 2)))
    assert not can_decode(Filter(32008, (0, 4, 4, 0, 9)))


def test_szip_of_another_length(tmp_path: Path) -> None:
    pipeline, stored, mask = chunk_of(tmp_path / "x.h5", np.arange(1540, dtype=">i2"), FILTERS["szip nn"])
    damaged = np.array(stored)
    damaged[:4] = 0
    with pytest.raises(BrokenChunk):
        pipeline.decode(damaged, mask)
