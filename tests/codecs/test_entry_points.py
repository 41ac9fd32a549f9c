"""A codec that another package adds by an entry point."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from matex_data import DecodeError, FormatError, open_dataset
from matex_data.codecs import pipeline
from matex_data.codecs.pipeline import Filter, can_decode

NUMBER = 300  # HDF5 reserves 256 to 511 for tests
CODEC = """
import numpy as np

def decode(data, options, nbytes):
    if data[0] != 0x42:
        raise ValueError("no magic byte")
    return np.bitwise_xor(data[1:], options[0]).tobytes()
"""


@pytest.fixture(autouse=True)
def _forget_codecs() -> Iterator[None]:
    pipeline._decoder.cache_clear()
    yield
    pipeline._decoder.cache_clear()


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, module: str = "toy_codec") -> None:
    info = folder / "toy-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[matex_data.codecs]\n{NUMBER} = {module}:decode\n")
    (folder / "toy_codec.py").write_text(CODEC)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "toy_codec", raising=False)


def _write(path: Path, magic: int = 0x42) -> np.ndarray:
    rows = np.arange(120, dtype="<i4").reshape(20, 6)
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_chunk((5, 6))
    plist.set_filter(NUMBER, h5py.h5z.FLAG_OPTIONAL, (0x5A,))
    with h5py.File(path, "w") as file:
        space = h5py.h5s.create_simple((20, 6))
        dataset = h5py.h5d.create(file.id, b"x", h5py.h5t.STD_I32LE, space, plist)
        for start in range(0, 20, 5):
            encoded = np.bitwise_xor(rows[start : start + 5].reshape(-1).view(np.uint8), 0x5A)
            dataset.write_direct_chunk((start, 0), bytes([magic]) + encoded.tobytes())
    return rows


def test_decode_with_the_codec_of_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not can_decode(Filter(NUMBER))
    pipeline._decoder.cache_clear()
    _install(tmp_path / "site", monkeypatch)
    assert can_decode(Filter(NUMBER, (0x5A,)))
    rows = _write(tmp_path / "x.h5")
    assert np.array_equal(open_dataset(tmp_path / "x.h5").load()["x"], rows)
    shuffled = open_dataset(tmp_path / "x.h5").batches(4, shuffle=True, seed=1)
    assert sorted(row[0] for batch in shuffled for row in batch["x"].tolist()) == rows[:, 0].tolist()


def test_name_a_chunk_that_the_codec_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path / "site", monkeypatch)
    _write(tmp_path / "x.h5", magic=0)
    with pytest.raises(DecodeError, match="filter 300: no magic byte"):
        open_dataset(tmp_path / "x.h5").load()


def test_name_a_package_whose_codec_does_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(tmp_path / "site", monkeypatch, module="missing_module")
    _write(tmp_path / "x.h5")
    with pytest.raises(FormatError, match="the codec 'missing_module:decode' of HDF5 filter 300 cannot be loaded"):
        open_dataset(tmp_path / "x.h5")
    with pytest.raises(FormatError, match="as the package 'toy' declares"):
        can_decode(Filter(NUMBER))
