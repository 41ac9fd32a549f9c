"""Batches of sorted files represent the whole file, and the reported quality is the measured one."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
from mpi4py import MPI

import matex_data as md
from benchmarks.cases import scale, shuffling
from benchmarks.cases.scale import Stored
from benchmarks.cases.shuffling import FILES, Sorted
from matex_data import PartitionError, machine
from matex_data._types import Integers
from matex_data.epochs.strategies import EXCHANGE_BYTES
from matex_data.fields import Field
from matex_data.index.files import FileIndex, columns_of
from matex_data.index.model import Index
from matex_data.index.runs import Chosen, Runs
from matex_data.index.strided import Strided
from matex_data.io.counters import process_profile
from matex_data.sampling.sizing import (
    WINDOW_LIMIT,
    ShuffleQuality,
    block_borders,
    choose_block_rows,
    estimate_quality,
    make_schedule,
)
from tests.support.ranks import Pool, Pools

SCALE = 8  # times fewer samples, in tests that are not slow
ROWS, CHUNK, BATCH = 3000, 100, 60


def _scaled(file: Sorted) -> Sorted:
    return replace(file, samples=file.samples // SCALE)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.samples}-{file.batch_size}")
@pytest.mark.parametrize("scaled", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_class_fractions_are_close_to_uniform_sampling(file: Sorted, scaled: bool) -> None:
    file = _scaled(file) if scaled else file
    found = shuffling.shares(file, shuffling.by_default(file))
    assert found.ratio <= file.limit
    assert found.neighbours <= shuffling.NEIGHBOURS
    assert found.once and found.differ
    assert shuffling.alike(file)


@pytest.mark.parametrize("file", FILES[1:], ids=lambda file: f"{file.samples}-{file.batch_size}")
def test_a_global_shuffle_is_uniform(file: Sorted) -> None:
    found = shuffling.shares(_scaled(file), shuffling.everywhere(_scaled(file)))
    assert abs(found.ratio - 1) < 0.1 and abs(found.neighbours - 1) < 0.2
    assert found.once and found.differ


@pytest.mark.parametrize("window_bytes", [8 << 20, 16 << 20, 64 << 20, 128 << 20])
@pytest.mark.parametrize(("chunk", "batch"), [(16, 64), (16, 512), (200, 256), (1, 128), (1000, 256)])
def test_estimated_ratio_equals_the_measured_one(chunk: int, batch: int, window_bytes: int) -> None:
    """Measure blocks of one class each, as in the formula, over eight epochs."""
    samples, row_bytes = 64_000, 2048
    file = Sorted("", samples, (row_bytes // 4,), "f4", chunk, batch, 0.0)
    every, borders = Runs(np.array([0]), np.array([samples])), np.arange(0, samples, chunk)
    schedule = make_schedule(every, borders, batch, row_bytes, window_bytes, seed=1, remainder="drop")
    classes = np.random.default_rng(1).permutation(len(borders)) % shuffling.CLASSES
    found = []
    for number in range(8):
        batches = shuffling._of_schedule(schedule, number, 0, 1)
        of = classes[batches // chunk]
        found.append(np.stack([(of == each).mean(axis=1) for each in range(shuffling.CLASSES)]))
    spread = np.concatenate(found, axis=1).std() / np.sqrt(0.1 * 0.9 / file.batch_size)
    assert estimate_quality(schedule, row_bytes).ratio == pytest.approx(spread, rel=0.15, abs=0.05)


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.samples}-{file.batch_size}")
def test_windows_of_small_files_stay_small(file: Sorted) -> None:
    every, borders = Runs(np.array([0]), np.array([file.samples])), np.arange(0, file.samples, max(16, file.chunk))
    found, small = (
        make_schedule(every, borders, file.batch_size, file.row_bytes, limit, seed=1, remainder="drop")
        for limit in (None, 128 << 20)
    )
    assert (found.lanes, found.window_steps) == (small.lanes, small.window_steps)


@pytest.mark.parametrize("ranks", [256, 1024, 4096])
@pytest.mark.parametrize("chunk_bytes", [640_000, 2_500_000])
def test_windows_grow_so_that_ranks_have_lanes_of_their_own(ranks: int, chunk_bytes: int) -> None:
    """Ten terabytes of rows of 10 KB, 64 rows a rank."""
    costs = scale.opened(Stored(10 * scale.TB, 10_000, chunk_bytes)).read_plan(64 * ranks, ranks=ranks)
    assert costs.lanes >= ranks and costs.amplification == pytest.approx(1, abs=0.05)
    assert costs.bytes_per_rank < 3e9


def test_lanes_of_blocks_that_are_kept_in_fewer_bytes_than_their_samples() -> None:
    """Shards of 1,000 images of 196 KB: a window holds no decoded shard, but four windows hold 28 archives of 18 MB."""
    every, borders = Runs(np.array([0]), np.array([60_000])), np.arange(0, 60_000, 1000)
    of_samples, of_archives = (
        make_schedule(every, borders, 256, 196_608, None, seed=1, remainder="drop", kept_bytes=kept)
        for kept in (0, 18_100)
    )
    assert (of_samples.lanes, of_archives.lanes) == (1, 8)
    assert of_samples.window_steps == of_archives.window_steps


def test_grown_windows_have_the_same_batches_on_any_number_of_ranks() -> None:
    large = Sorted("", 1 << 16, (40_000,), "f4", 16, 4096, 0.0)  # batches of 655 MB
    assert len(shuffling.by_default(large)(0)) == 16
    assert shuffling.alike(large)


def test_contiguous_rows_of_a_large_data_set_are_read_in_megabytes() -> None:
    costs = scale.opened(Stored(10 * scale.TB, 10_000)).read_plan(65536, ranks=1024)
    assert costs.mean_read_bytes > 1e6 and costs.amplification < 1.05


def _batches_without_memory(comm: MPI.Intracomm, path: Path) -> str:
    """Return the error of batches of a large data set on ranks of which one has 64 MiB; make others that fit."""
    data, free = md.open_dataset(path, comm=comm), machine.free_memory
    machine.free_memory = lambda: 64 << 20 if comm.rank == comm.size - 1 else free()
    try:
        data.batches(6 << 10, shuffle=True, seed=1)
    except PartitionError as error:
        return str(error)
    finally:
        machine.free_memory = free
        md.open_dataset(path, comm=comm, window_bytes=1 << 20).batches(6 << 10, shuffle=True, seed=1)
    return ""


def test_grown_windows_have_to_fit_into_the_memory(pool: Pool, tmp_path: Path) -> None:
    rows = 1 << 25
    np.lib.format.open_memmap(tmp_path / "sparse.npy", "w+", np.float32, (rows, 512))  # 64 GiB of a sparse file
    first, *others = pool.run(_batches_without_memory, tmp_path / "sparse.npy")
    assert "window_bytes=128 << 20" in first and f"rank {pool.size - 1}" in first
    assert others == [first] * (pool.size - 1)


def _open(path: Path, **options: Any) -> md.Dataset:
    return md.open_dataset(path, comm=MPI.COMM_SELF, **options)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write rows of 4 KB in chunks of 100."""
    path = tmp_path_factory.mktemp("quality") / "sorted.h5"
    with h5py.File(path, "w") as file:
        x = np.repeat(np.arange(ROWS, dtype="f4")[:, None], 1000, axis=1)
        file.create_dataset("x", data=x, chunks=(CHUNK, 1000), compression="gzip", compression_opts=1)
    return path


def test_quality_of_a_file(path: Path) -> None:
    whole = _open(path).shuffle_quality(BATCH)
    assert (whole.blocks, whole.blocks_per_window, whole.samples_per_window) == (30, 30, ROWS)
    assert whole.ratio <= 1 and str(whole).startswith("30 of 30 blocks a window")
    small = _open(path, window_bytes=1 << 21).shuffle_quality(BATCH)
    assert small.blocks_per_window < 6 and small.ratio > 2
    assert f"window_bytes={-(-30 * 400_000 // 2**20)} << 20" in small.remedy  # all blocks
    assert _open(path, window_bytes=1 << 21, cache="memory").shuffle_quality(BATCH).ratio <= 1
    with pytest.raises(PartitionError, match="integer of 1 or more"):
        _open(path).shuffle_quality(0)


def test_block_bytes_option(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = np.zeros((20_000, 256), "f4")
    by_default, larger = (_open(tmp_path / "rows.h5", block_bytes=b) for b in (None, 1 << 20))
    assert by_default.shuffle_quality(BATCH).block_bytes <= 1 << 17
    assert larger.shuffle_quality(BATCH).block_bytes == pytest.approx(1 << 20, rel=0.05)
    state = by_default.batches(BATCH, shuffle=True, seed=1).state(3)
    with pytest.raises(PartitionError, match=r"another .*blocks"):
        larger.batches(BATCH, shuffle=True, start=state)
    assert len(larger.batches(BATCH, start=by_default.batches(BATCH).state(2))) == 20_000 // BATCH - 2
    for kind in ("block", "window"):
        with pytest.raises(PartitionError, match=f"a {kind} is too small"):
            _open(tmp_path / "rows.h5", **{f"{kind}_bytes": 0})


def test_poor_shuffle_warns_once(path: Path) -> None:
    data = _open(path, window_bytes=1 << 21)
    with pytest.warns(UserWarning, match='not be well mixed.*shuffle="global"'):
        data.batches(BATCH, shuffle=True, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.split(0.5, 0.5)[0].batches(BATCH, shuffle=True, seed=1)
        _open(path, window_bytes=1 << 21).batches(BATCH)
        _open(path, window_bytes=1 << 21).batches(BATCH, shuffle="global", seed=1)
        _open(path).batches(BATCH, shuffle=True, seed=1)


def test_files_of_one_sample_each(tmp_path: Path) -> None:
    for number in range(120):
        np.save(tmp_path / f"{number:03}.npy", np.full((1, 10), number))
    found = _open(tmp_path).shuffle_quality(12)
    assert (found.blocks, found.ratio) == (120, pytest.approx(1, abs=0.05))


def test_quality_of_a_text_file(tmp_path: Path) -> None:
    rows = np.arange(40_000)
    lines = "\n".join(f"{n},{n / 7:.6f},{n * 3}" for n in rows.tolist())
    (tmp_path / "sorted.csv").write_text(f"a,b,c\n{lines}\n")
    data = _open(tmp_path / "sorted.csv", inputs=["a", "b", "c"])
    found = data.shuffle_quality(64)
    assert found.ratio <= 1.1 and found.blocks > 32
    batches = data.batches(64, shuffle=True, seed=1)
    counts = [np.bincount(batch["a"].astype(int) // 4000, minlength=10) for batch in batches]
    assert np.std(counts) / np.sqrt(64 * 0.1 * 0.9) <= 1.1


def _read(comm: MPI.Intracomm, path: Path, window_bytes: int) -> tuple[int, int]:
    """Return the bytes of the file that this rank reads in an epoch, and the bytes of a chunk."""
    data = md.open_dataset(path, comm=comm, window_bytes=window_bytes)
    (layout,) = data._source.index.files[0].layouts.values()
    before = process_profile().bytes
    for _ in data.batches(BATCH, shuffle=True, seed=1, remainder="keep"):
        pass
    return process_profile().bytes - before, layout.stored_bytes() * CHUNK // ROWS


@pytest.mark.parametrize(
    ("size", "window_bytes"), [(1, 1 << 21), (1, 1 << 23), (2, 1 << 22), (2, 1 << 23), (2, 128 << 20), (3, 128 << 20)]
)
def test_each_chunk_is_read_once(path: Path, ranks: Pools, size: int, window_bytes: int) -> None:
    for read, chunk in ranks(size).run(_read, path, window_bytes):
        assert read <= 1.05 * ROWS / CHUNK * chunk / size + 2 * chunk


def test_quality_of_a_uniform_schedule() -> None:
    every = Runs(np.array([0]), np.array([1000]))
    schedule = make_schedule(every, np.array([0]), 10, 8, 1 << 20, seed=1, remainder="drop", uniform=True)
    assert isinstance(estimate_quality(schedule, 8), ShuffleQuality) and estimate_quality(schedule, 8).ratio == 1


def _memory(comm: MPI.Intracomm, path: Path, window_bytes: int, shuffle: Any) -> tuple[int, int]:
    """Return the memory that two epochs add after a warm-up, and the size of this rank's samples, in bytes."""
    process = psutil.Process()
    data = md.open_dataset(path, comm=comm, window_bytes=window_bytes)
    next(iter(md.open_dataset(path, comm=comm, window_bytes=1).batches(64, shuffle=True, seed=1)))
    before, most = process.memory_info().rss, 0
    batches = data.batches(64, shuffle=shuffle, seed=1)
    for _ in range(2):
        for number, _ in enumerate(batches):
            most = max(most, process.memory_info().rss if number % 20 == 0 else 0)
    return most - before, len(data) * 1024 // comm.size


@pytest.mark.parametrize("size", [1, 2])
def test_memory_is_limited_by_windows(tmp_path: Path, ranks: Pools, size: int) -> None:
    path, window_bytes = tmp_path / "rows.h5", 16 << 20
    with h5py.File(path, "w") as file:
        file["x"] = np.ones((200_000, 256), "f4")
    for added, own in ranks(size).run(_memory, path, window_bytes, True):
        assert added < 7 * max(window_bytes / size, own / 6) + (32 << 20)  # a sixth of an epoch may be one window
    for added, own in ranks(size).run(_memory, path, window_bytes, "global"):
        assert added < own + 13 * EXCHANGE_BYTES + (32 << 20)  # seven windows; six that are sent or received


class _Uneven(Strided):
    """Rows in blocks of 1, 2, 3, ... rows."""

    def borders(self) -> Integers | None:
        borders = np.cumsum(np.arange(self.rows))
        return borders[borders < self.rows]


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("block_bytes", [1, 300, 5000])
def test_borders_of_many_files(columns: bool, block_bytes: int) -> None:
    """Against a loop over the files, and the rows of each."""
    kinds: list[tuple[type[Strided], int, int]] = [(Strided, 7, 1), (Strided, 0, 1), (Strided, 20, 5), (_Uneven, 11, 1)]
    dtype = np.dtype("f4")
    files = [
        FileIndex(f"{i}", rows, {"x": kind(rows, 0, 40, dtype, (10,), block)})
        for i, (kind, rows, block) in enumerate(kinds * 3)
    ]
    index = Index({"x": Field("x", (10,), dtype)}, columns_of(files) if columns else files)
    expected, first = [], 0
    for file in files:
        layout = file.layouts["x"]
        depth = np.array([layout.block_rows])
        step = choose_block_rows(depth, np.array([40]), len(index), block_bytes)
        uneven = layout.borders()
        if uneven is None:
            expected += [first + row for row in range(0, file.rows, step)]
        else:
            last = -1
            for border in uneven.tolist():
                if border // step > last:
                    expected.append(first + border)
                    last = border // step
        first += file.rows
    assert block_borders(index, block_bytes).tolist() == expected


def test_advice_asks_for_no_more_than_all_blocks() -> None:
    quality = ShuffleQuality(256, 12, 40 << 20, 1, 1, 20, 8.0)
    assert "window_bytes=480 << 20" in quality.remedy
    assert "window_bytes=480 << 20" in quality.remedy_for_windows


def test_windows_in_order_leave_room_for_a_run_of_each_chosen_sample() -> None:
    rows = 1 << 24
    every_second, none = Chosen.of_bits(np.full(rows // 8, 0b01010101, np.uint8)), np.zeros(1, np.int64)
    of_flags = make_schedule(every_second, none, 1024, 1, None, seed=None, remainder="drop")
    of_rows = make_schedule(Runs.between(0, rows), none, 1024, 1, None, seed=None, remainder="drop")
    assert of_flags.window_rows <= WINDOW_LIMIT // 64 < of_rows.window_rows
    shuffled = make_schedule(every_second, none, 1024, 1, None, seed=1, remainder="drop")
    assert shuffled.window_rows == rows // 2  # the order of a seed depends on it
