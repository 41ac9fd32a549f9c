"""Compressed and transcoded texts: read to their end or refused, and never more than fits into memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pytest
from mpi4py import MPI

from matex_data import machine, open_dataset
from matex_data.errors import DecodeError, PartitionError
from matex_data.index.layout import ReadRequest
from matex_data.readers.text import compression, unpacked


def _zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zstd": _zstd,
    "utf-16": lambda text: text.decode().encode("utf-16"),
}


def _content(data: bytes, stored_as: str) -> bytes:
    return compression.unpacked(io.BytesIO(data), stored_as, "the file", "none").getvalue()


TEXT = b"a,b\n" + b"".join(b"%d,%d\n" % (i, i * i) for i in range(5000))


@pytest.mark.parametrize("size", [1000, 1 << 20])
@pytest.mark.parametrize("stored_as", COMPRESSORS)
def test_a_text_is_read_to_its_end(stored_as: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "READ_BYTES", size)
    stored = COMPRESSORS[stored_as](TEXT)
    assert _content(stored, stored_as) == TEXT
    if stored_as in ("gzip", "bz2", "xz"):
        assert _content(stored * 2, stored_as) == TEXT + TEXT


@pytest.mark.parametrize("stored_as", COMPRESSORS)
def test_a_truncated_or_damaged_file_is_refused(stored_as: str) -> None:
    stored = np.frombuffer(COMPRESSORS[stored_as](TEXT), np.uint8)
    for damaged in (stored[:-3], stored[: len(stored) // 4 * 2 + 1]):
        with pytest.raises(DecodeError, match="does not unpack"):
            _content(damaged.tobytes(), stored_as)
    flipped = stored.copy()
    flipped[len(flipped) // 2] ^= 0x10
    if stored_as not in ("zstd", "utf-16"):  # Arrow writes it without a checksum
        with pytest.raises(DecodeError, match="does not unpack"):
            _content(flipped.tobytes(), stored_as)


@pytest.mark.filterwarnings("ignore:.*no part can be read alone")
@pytest.mark.parametrize("suffix", ["csv.gz", "jsonl.gz"])
def test_threads_unpack_a_file_once(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, lines = range(40_000), b"".join(b'{"a":%d}\n' % i for i in range(40_000))
    text = lines if suffix == "jsonl.gz" else b"a,b\n" + b"".join(b"%d,%d\n" % (i, i) for i in rows)
    (tmp_path / f"a.{suffix}").write_bytes(gzip.compress(text, 1))
    data = open_dataset(tmp_path / f"a.{suffix}", inputs="a", comm=MPI.COMM_SELF)
    calls, unpack = list[str](), unpacked.unpacked

    def counted(file: IO[bytes], stored: str, item: str, remedy: str) -> io.BytesIO:
        calls.append(stored)
        time.sleep(0.05)  # the other threads ask meanwhile
        return unpack(file, stored, item, remedy)

    monkeypatch.setattr(unpacked, "unpacked", counted)
    found = np.concatenate(list(data.batches(4000, shuffle=True, seed=0)))
    assert sorted(found.tolist()) == [*rows]
    assert calls == ["gzip"]


@pytest.mark.filterwarnings("ignore:.*no part can be read alone")
@pytest.mark.parametrize("stored_as, suffix", [("gzip", ".gz"), ("xz", ".xz"), ("zstd", ".zst"), ("utf-16", "")])
def test_a_text_that_does_not_fit_into_memory(
    tmp_path: Path, stored_as: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / f"a.csv{suffix}")
    Path(path).write_bytes(COMPRESSORS[stored_as](TEXT))
    assert len(open_dataset(path, comm=MPI.COMM_SELF)) == 5000
    monkeypatch.setattr(machine, "free_memory", lambda: len(TEXT))
    monkeypatch.setattr(machine, "UNCHECKED", 0)
    with pytest.raises(PartitionError, match="does not fit into the memory") as caught:
        open_dataset(path, comm=MPI.COMM_SELF)
    assert caught.value.file == path and "each rank then reads its own rows" in str(caught.value.remedy)


@pytest.mark.parametrize("has_target", [True, False])
def test_a_content_that_has_become_shorter(tmp_path: Path, has_target: bool) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(bytes(range(8))))
    file, received = unpacked.UnpackedFile(str(path), "gzip"), list[bytes]()
    memory = np.zeros(4, np.uint8) if has_target else None
    for begin, is_short in ((2, False), (6, True)):
        offset, nbytes = np.array([0, begin]), np.array([1, 3])
        request = ReadRequest(offset, nbytes, memory, on_complete=lambda data: received.append(data.tobytes()))
        changed = file.request(request)
        assert not changed.total
        assert changed.fetch is not None
        assert changed.on_complete is not None
        if is_short:
            with pytest.raises(DecodeError, match="the content has become shorter"):
                changed.fetch()
        else:
            changed.fetch()
            changed.on_complete(np.empty(0, np.uint8))
            taken = received[0] if memory is None else memory.tobytes()
            assert taken == bytes([0, 2, 3, 4])
