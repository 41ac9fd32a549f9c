"""Deflated chunks to rows in one go, against zlib and NumPy's transposition."""

from __future__ import annotations

import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from matex_data import DecodeError, open_dataset
from matex_data.codecs import inflate
from matex_data.codecs.inflate import inflate_rows, width_for
from matex_data.codecs.pipeline import DEFLATE, FLETCHER32, SHUFFLE, Filter, Pipeline
from matex_data.index import chunked
from tests.codecs.test_shuffle import planes_of

ROWS, DEPTH, LENGTH = 100, 8, 31


def _pipeline(*numbers: int, itemsize: int = 4, nbytes: int = 96) -> Pipeline:
    return Pipeline(tuple(Filter(number) for number in numbers), itemsize, nbytes)


@given(st.data())
def test_rows_of_many_chunks_go_to_their_places(data: st.DataObject) -> None:
    dtype = np.dtype(data.draw(st.sampled_from(["u1", "i2", "f4", "f8"])))
    chunks, depth, length = (data.draw(st.integers(1, most)) for most in (5, 4, 9))
    shuffled = dtype.itemsize > 1 and data.draw(st.booleans())
    total = chunks * depth - data.draw(st.integers(0, depth - 1))  # the last chunk may reach over the end
    raw = data.draw(st.binary(min_size=dtype.itemsize * length, max_size=dtype.itemsize * length))
    rows = np.frombuffer(raw * (chunks * depth), dtype).reshape(chunks, depth, length).copy()
    rows.view(np.uint8)[..., 0] += np.arange(chunks * depth, dtype=np.uint8).reshape(chunks, depth)
    packed = [zlib.compress((planes_of(chunk) if shuffled else chunk).tobytes()) for chunk in rows]
    destination = np.array(data.draw(st.permutations(range(total + 2))), np.int64)[:total]
    first = np.arange(chunks) * depth
    out = np.zeros((total + 2, length), dtype)
    expected = out.copy()
    expected[destination] = rows.reshape(-1, length)[:total]
    stored, nbytes = np.frombuffer(b"".join(packed), np.uint8), np.array([len(one) for one in packed])
    width = dtype.itemsize if shuffled else 1
    last = np.minimum(first + depth, total)
    assert inflate_rows(stored, nbytes, rows[0].nbytes, width, out, destination, first, last) == chunks
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("wrong", ["short", "long", "broken", "cut"])
def test_it_stops_before_a_chunk_that_is_broken(wrong: str) -> None:
    chunk, number = np.arange(50, dtype="f4"), {"short": 49, "long": 51}.get(wrong, 50)
    packed = [zlib.compress(chunk.tobytes())] * 3
    packed[1] = zlib.compress(np.arange(number, dtype="f4").tobytes())
    packed[1] = {"broken": b"\xff" * len(packed[1]), "cut": packed[1][:-9]}.get(wrong, packed[1])
    stored, nbytes = np.frombuffer(b"".join(packed), np.uint8), np.array([len(one) for one in packed])
    out, first = np.zeros((30, 5), "f4"), np.arange(3) * 10
    assert inflate_rows(stored, nbytes, chunk.nbytes, 1, out, np.arange(30), first, first + 10) == 1
    assert np.array_equal(out[:10].reshape(-1), chunk) and not out[10:].any()
    assert inflate_rows(stored[:-1], nbytes, chunk.nbytes, 1, out, np.arange(30), first, first + 10) == 0


@pytest.mark.parametrize(
    ("pipeline", "width"),
    [
        (_pipeline(DEFLATE), 1),
        (_pipeline(SHUFFLE, DEFLATE), 4),
        (_pipeline(SHUFFLE, DEFLATE, itemsize=12), None),
        (_pipeline(SHUFFLE, DEFLATE, FLETCHER32), None),
        (_pipeline(DEFLATE, SHUFFLE), None),
        (_pipeline(), None),
        (_pipeline(DEFLATE, nbytes=inflate.LARGEST + 4), None),
    ],
)
def test_which_pipelines_it_can_undo(pipeline: Pipeline, width: int | None) -> None:
    assert width_for(pipeline) == width


@pytest.fixture(scope="module", params=[True, False], ids=["shuffle", "plain"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inflate") / "x.h5"
    with h5py.File(path, "w") as file:
        x = np.random.default_rng(0).integers(0, 99, (ROWS, LENGTH)).astype("i4")
        file.create_dataset("x", data=x, chunks=(DEPTH, LENGTH), compression="gzip", shuffle=request.param)
    return path


def _rows(path: Path) -> np.ndarray:
    """All rows of a shuffled epoch, in ascending order."""
    batches = open_dataset(str(path)).batches(7, shuffle=True, seed=1, remainder="keep")
    rows = np.concatenate([batch["x"] for batch in batches])
    return rows[np.lexsort(rows.T)]


@pytest.mark.parametrize("found", [True, False])
def test_rows_are_the_same_without_the_library(path: Path, monkeypatch: pytest.MonkeyPatch, found: bool) -> None:
    calls: list[int] = []
    if not found:
        monkeypatch.setattr(inflate, "_library", lambda: None)
    monkeypatch.setattr(chunked, "inflate_rows", lambda *given: calls.append(1) or inflate_rows(*given))
    with h5py.File(path) as file:
        expected = file["x"][:]
    assert np.array_equal(_rows(path), expected[np.lexsort(expected.T)])
    assert bool(calls) == found


def test_a_broken_chunk_is_named(path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "x.h5"
    copy.write_bytes(path.read_bytes())
    with h5py.File(copy) as file:
        chunk = file["x"].id.get_chunk_info_by_coord((5 * DEPTH, 0))
    with copy.open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(b"\xff" * chunk.size)
    with pytest.raises(DecodeError, match=f"row {5 * DEPTH}, byte {chunk.byte_offset}"):
        _rows(copy)
