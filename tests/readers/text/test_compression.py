"""Compressed and transcoded texts: read to their end or refused, and never more than fits into memory."""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from mpi4py import MPI

from matex_data import machine, open_dataset
from matex_data.errors import DecodeError, PartitionError
from matex_data.readers.text import compression
from matex_data.readers.text.compression import plain_text


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
TEXT = b"a,b\n" + b"".join(b"%d,%d\n" % (i, i * i) for i in range(5000))


@pytest.mark.parametrize("size", [1000, 1 << 20])
@pytest.mark.parametrize("stored_as", COMPRESSORS)
def test_a_text_is_read_to_its_end(stored_as: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "READ_BYTES", size)
    stored = np.frombuffer(COMPRESSORS[stored_as](TEXT), np.uint8)
    assert plain_text(stored, stored_as).tobytes() == TEXT
    if stored_as in ("gzip", "bz2", "xz"):
        assert plain_text(np.tile(stored, 2), stored_as).tobytes() == TEXT + TEXT


@pytest.mark.parametrize("stored_as", [name for name in COMPRESSORS if name != "utf-16"])
def test_a_truncated_or_damaged_file_is_refused(stored_as: str) -> None:
    stored = np.frombuffer(COMPRESSORS[stored_as](TEXT), np.uint8)
    for damaged in (stored[:-3], stored[: len(stored) // 2]):
        with pytest.raises(DecodeError, match="does not unpack"):
            plain_text(damaged, stored_as)
    flipped = stored.copy()
    flipped[len(flipped) // 2] ^= 0x10
    if stored_as != "zstd":  # Arrow writes it without a checksum
        with pytest.raises(DecodeError, match="does not unpack"):
            plain_text(flipped, stored_as)


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
    assert caught.value.file == path and "ranks read blocks" in str(caught.value.remedy)
