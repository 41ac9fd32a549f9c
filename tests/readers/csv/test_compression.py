"""Text files that are packed as a whole: unpacked to the end, or an error; and never more than there is memory."""

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
from matex_data.readers.csv import compression
from matex_data.readers.csv.compression import unpacked


def _zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zstd": _zstd,
    "utf-16": lambda text: text.decode().encode("utf-16"),
}
TEXT = b"a,b\n" + b"".join(b"%d,%d\n" % (i, i * i) for i in range(5000))


@pytest.mark.parametrize("piece", [100, 1 << 20])
@pytest.mark.parametrize("packed", PACKERS)
def test_all_of_it_comes(packed: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "PIECE_BYTES", piece)
    stored = np.frombuffer(PACKERS[packed](TEXT), np.uint8)
    assert unpacked(stored, packed).tobytes() == TEXT
    if packed in ("gzip", "bz2", "xz"):
        assert unpacked(np.tile(stored, 2), packed).tobytes() == TEXT + TEXT


@pytest.mark.parametrize("packed", [name for name in PACKERS if name != "utf-16"])
def test_what_ends_early_or_is_damaged_is_refused(packed: str) -> None:
    stored = np.frombuffer(PACKERS[packed](TEXT), np.uint8)
    for damaged in (stored[:-3], stored[: len(stored) // 2]):
        with pytest.raises(DecodeError, match="does not unpack"):
            unpacked(damaged, packed)
    flipped = stored.copy()
    flipped[len(flipped) // 2] ^= 0x10
    if packed != "zstd":  # Arrow writes it without a checksum
        with pytest.raises(DecodeError, match="does not unpack"):
            unpacked(flipped, packed)


@pytest.mark.filterwarnings("ignore:.*no part can be read alone")
@pytest.mark.parametrize("packed, suffix", [("gzip", ".gz"), ("xz", ".xz"), ("zstd", ".zst"), ("utf-16", "")])
def test_a_text_that_does_not_fit(tmp_path: Path, packed: str, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / f"a.csv{suffix}")
    Path(path).write_bytes(PACKERS[packed](TEXT))
    assert len(open_dataset(path, comm=MPI.COMM_SELF)) == 5000
    monkeypatch.setattr(machine, "free_memory", lambda: len(TEXT))
    with pytest.raises(PartitionError, match="does not fit into the memory") as caught:
        open_dataset(path, comm=MPI.COMM_SELF)
    assert caught.value.file == path and "ranks read blocks" in str(caught.value.remedy)
