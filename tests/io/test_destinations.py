"""Bytes that MPI reads arrive where they belong, by way of the processor's cache or not."""

from __future__ import annotations

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from matex_data import DecodeError, open_dataset
from matex_data.codecs.kernels import pieces_to_places
from matex_data.io import destinations as module
from matex_data.io.coalesce import Ranges
from matex_data.io.destinations import destinations
from matex_data.io.files import Files
from matex_data.io.sessions import read_sessions
from tests.support.ranks import Pool

MARGIN = 100  # bytes around all pieces, which nobody may write to


@given(sizes=st.lists(st.integers(0, 400), max_size=20), seed=st.integers(0, 99), shift=st.integers(0, 63))
def test_pieces_go_to_their_places_and_nowhere_else(sizes: list[int], seed: int, shift: int) -> None:
    rng = np.random.default_rng(seed)
    source = rng.integers(1, 256, sum(sizes), np.uint8)
    nbytes, begin = np.array(sizes, np.int64), np.cumsum([0, *sizes])[:-1]
    at = np.zeros(len(sizes), np.int64)
    end = MARGIN + shift
    for piece in rng.permutation(len(sizes)).tolist():
        at[piece], end = end, end + sizes[piece] + int(rng.integers(0, 70))
    memory, expected = np.zeros(end + MARGIN, np.uint8), np.zeros(end + MARGIN, np.uint8)
    for piece, size in enumerate(sizes):
        expected[at[piece] : at[piece] + size] = source[begin[piece] : begin[piece] + size]
    pieces_to_places()(source.ctypes.data, memory.ctypes.data + at, nbytes)
    assert np.array_equal(memory, expected)


@pytest.mark.parametrize(
    ("sizes", "read", "by_way_of_the_cache"),
    [
        ([20_000] * 3, module.WORTH_COMPILING, True),
        ([20_000] * 3, module.WORTH_COMPILING - 1, False),
        ([20_000, 20_000, 100], module.WORTH_COMPILING, True),  # the last one is a gap
        ([3000] * 3, module.WORTH_COMPILING, False),
        ([600_000] * 2, module.WORTH_COMPILING, False),
        ([20_000], module.WORTH_COMPILING, False),
    ],
)
def test_runs_that_fit_into_the_cache_go_that_way(sizes: list[int], read: int, by_way_of_the_cache: bool) -> None:
    nbytes, memory = np.array(sizes), np.zeros(2 * sum(sizes), np.uint8)
    offset = np.cumsum(nbytes) - nbytes
    with destinations(Ranges(offset, nbytes, memory.ctypes.data + 2 * offset), read) as (run,):
        assert (run.copied is not None) == by_way_of_the_cache


def test_without_numba_nothing_goes_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matex_data.codecs.kernels", None)  # as where Numba cannot be imported
    nbytes, memory = np.array([20_000, 20_000]), np.zeros(50_000, np.uint8)
    with destinations(Ranges(np.array([0, 20_000]), nbytes, memory.ctypes.data + nbytes), 1 << 40) as (run,):
        assert run.copied is None


def _ranges(rng: np.random.Generator, memory: np.ndarray, most: int) -> tuple[Ranges, np.ndarray]:
    """Pieces of ten runs of a file, in any order in memory, and where each byte of memory comes from; -1: nowhere."""
    nbytes = rng.integers(1, most, 60)
    gap = np.where(np.arange(60) % 6 == 0, rng.integers(1, 999, 60), 0)
    offset = np.cumsum(nbytes + gap) - nbytes
    order = rng.permutation(60)
    at = np.empty(60, np.int64)
    at[order] = np.cumsum(nbytes[order] + 7) - nbytes[order]
    origin = np.full(len(memory), -1)
    for one, to, count in zip(offset.tolist(), at.tolist(), nbytes.tolist(), strict=True):
        origin[to : to + count] = np.arange(one, one + count)
    return Ranges(offset, nbytes, memory.ctypes.data + at), origin


def _read_runs(comm: MPI.Intracomm, path: str, worth: int, most: int) -> bool:
    """Whether all bytes are those of the file, and no others were written."""
    before, module.WORTH_COMPILING = module.WORTH_COMPILING, worth
    content, rng = np.fromfile(path, np.uint8), np.random.default_rng(comm.rank)
    files = Files(read_sessions(comm).comm, [path], "collective")
    try:
        for _ in range(5):
            memory = np.zeros(60 * (most + 7), np.uint8)
            ranges, origin = _ranges(rng, memory, most)
            files.read(0, ranges)
            if not np.array_equal(memory, np.where(origin < 0, 0, content[origin])):
                return False
        return True
    finally:
        files.close()
        module.WORTH_COMPILING = before


@pytest.mark.rank_counts(2, 3)
@pytest.mark.parametrize("worth", [0, 1 << 40])
@pytest.mark.parametrize("most", [3000, 20_000, 400_000])  # below, within, and beyond what goes by way of the cache
def test_runs_of_a_file_arrive(pool: Pool, tmp_path: Path, worth: int, most: int) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 60 * (most + 999), np.uint8).tobytes())
    assert pool.run(_read_runs, str(path), worth, most) == [True] * pool.size


def _epochs(comm: MPI.Intracomm, path: str, shortened: bool) -> list[np.ndarray]:
    """The images of this rank in two epochs, the second by way of the cache; the file may be cut off between them."""
    before, module.WORTH_COMPILING = module.WORTH_COMPILING, 1
    try:
        batches = open_dataset(path, comm=comm, io="collective").batches(24, shuffle=True, seed=1)
        first = [batch["image"].copy() for batch in batches]
        comm.barrier()
        if shortened and comm.rank == 0:
            with Path(path).open("r+b") as file:
                file.truncate(Path(path).stat().st_size // 2)
        comm.barrier()
        return [np.concatenate(first), np.concatenate([batch["image"] for batch in batches])]
    finally:
        module.WORTH_COMPILING = before


@pytest.fixture
def images(tmp_path: Path) -> Path:
    path = tmp_path / "images.h5"
    with h5py.File(path, "w") as file:
        file["image"] = np.random.default_rng(0).normal(size=(240, 70, 71)).astype("f4")  # 19,880 bytes each
    return path


@pytest.mark.openmpi
def test_every_image_arrives_once_an_epoch(pool: Pool, images: Path) -> None:
    with h5py.File(images) as file:
        expected = _ordered(file["image"][:])
    for epoch in zip(*pool.run(_epochs, str(images), False), strict=True):
        assert np.array_equal(_ordered(np.concatenate(epoch)), expected)


def _ordered(images: np.ndarray) -> np.ndarray:
    """By the first number of each, which no other has."""
    return images[np.argsort(images[:, 0, 0])]


def test_a_file_that_has_become_shorter_is_said_so_by_all(pool: Pool, images: Path) -> None:
    outcomes = pool.outcomes(_epochs, str(images), True, timeout=60)
    assert all(isinstance(error, DecodeError) for error in outcomes), outcomes
    assert len({str(error) for error in outcomes}) == 1
