"""The costs of an epoch that are computed beforehand are those of real epochs."""

from __future__ import annotations

import json
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import matex_data as md
from benchmarks.cases import scale
from benchmarks.cases.scale import Stored
from matex_data import PartitionError, batching
from matex_data.epochs.costs import CHOICE_EFFORT, estimate_costs
from matex_data.epochs.strategies import ORDERED_SAMPLES, READ_BYTES, steps_within
from matex_data.index import table
from matex_data.io.counters import process_profile
from tests.support.ranks import Pool, Pools
from tests.support.sources import with_source

ROWS, CHUNK, BATCH = 3000, 50, 60
TIGHT = 1 << 20  # bytes of a window of five chunks


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write random rows of 4 KB in chunks of 50, and labels one after the other."""
    path = tmp_path_factory.mktemp("costs") / "rows.h5"
    with h5py.File(path, "w") as file:
        x = np.random.default_rng(1).normal(size=(ROWS, 1000)).astype("f4")
        file.create_dataset("x", data=x, chunks=(CHUNK, 1000), compression="gzip", compression_opts=1)
        file["y"] = np.arange(ROWS)
    return path


def _stored_bytes(path: Path) -> int:
    """Return the bytes of all samples in the file, by h5py."""
    with h5py.File(path) as file:
        return sum(file[name].id.get_storage_size() for name in file)


def _open(path: Path, **options: Any) -> md.Dataset:
    return md.open_dataset(path, comm=MPI.COMM_SELF, **options)


def _read(comm: MPI.Intracomm, path: Path, options: dict[str, Any], shuffle: Any) -> int:
    """Return the bytes that this rank reads in the first epoch."""
    data = md.open_dataset(path, comm=comm, **options)
    before = process_profile().bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in data.batches(BATCH, shuffle=shuffle, seed=1, remainder="keep"):
            pass
    return int(process_profile().bytes - before)


CASES: list[tuple[dict[str, Any], Any]] = [
    ({}, True),
    ({"window_bytes": TIGHT}, True),
    ({"window_bytes": TIGHT, "inputs": "y"}, True),
    ({}, False),
    ({}, "global"),
    ({"cache": "memory"}, True),
    ({"global_reads": "rows", "inputs": "y"}, "global"),
]


@pytest.mark.rank_counts(1, 3, slow=(2, 4, 6))
@pytest.mark.parametrize(("options", "shuffle"), CASES, ids=str)
def test_planned_bytes_are_those_that_are_read(pool: Pool, path: Path, options: dict[str, Any], shuffle: Any) -> None:
    read = pool.run(_read, path, options, shuffle)
    costs = _open(path, **options).read_plan(BATCH, ranks=pool.size, shuffle=shuffle, seed=1, remainder="keep")
    assert costs.exact
    assert costs.bytes_read == pytest.approx(sum(read), rel=0.02)
    if "inputs" not in options:
        assert costs.amplification == pytest.approx(sum(read) / _stored_bytes(path), rel=0.02)


def test_one_rank_reads_each_byte_once(path: Path) -> None:
    costs = _open(path).read_plan(BATCH, ranks=1)
    assert costs.bytes_read == pytest.approx(_stored_bytes(path), rel=0.01)
    assert costs.amplification == pytest.approx(1, abs=0.01)
    assert costs.steps == ROWS // BATCH and costs.opens_per_rank == 1 and costs.messages_per_step == 0
    assert costs.reads_per_rank * costs.mean_read_bytes == pytest.approx(costs.bytes_read, rel=0.001)
    assert costs.remedies == () and costs.uncounted == ()


def test_ranks_that_share_lanes_read_the_same_chunks(path: Path) -> None:
    """A window of 1 MiB has five chunks, so that at most two lanes are shared by 30 ranks."""
    data = _open(path, window_bytes=TIGHT)
    shared = data.read_plan(BATCH, ranks=30)
    assert shared.shared and shared.amplification < 1.05 and not shared.remedies
    assert "each chunk is read by one rank" in str(shared)
    assert 4 < shared.messages_per_step < shared.most_messages_per_step
    data = with_source(data, shared=False)
    costs = data.read_plan(BATCH, ranks=30, ranks_per_node=10)
    assert not costs.shared and costs.messages_per_step < 4
    assert costs.lanes == 2 and costs.amplification > 10
    assert costs.bytes_per_node == 10 * costs.bytes_per_rank
    (found,) = re.findall(r"window_bytes=(\d+) << 20", costs.remedies[0])
    better = _open(path, window_bytes=int(found) << 20).read_plan(BATCH, ranks=30)
    assert better.lanes >= 30 and better.amplification < 1.2


def test_rows_of_a_block_are_read_as_one_where_many_ranks_need_one_each() -> None:
    """Ten terabytes of rows of 10 KB."""
    data = scale.opened(Stored(10 * scale.TB, 10_000))
    few, many = (data.read_plan(64 * ranks, ranks=ranks) for ranks in (256, 10_000))
    assert not few.shared and many.shared
    assert many.mean_read_bytes > 250_000 and many.amplification < 1.05
    data = with_source(data, shared=False)
    assert data.read_plan(640_000, ranks=10_000).mean_read_bytes < 25_000


def test_the_order_of_few_samples_is_computed_at_once() -> None:
    """Rows of 112 bytes for 10,000 ranks: what a rank reads at once is part of a window of all ranks, or of many."""
    data = scale.opened(Stored(10**12, 112, 40 * 10**6), window_bytes=128 << 20)
    schedule = data._batching._batch_schedule(640_000, 10_000, True, 1, "drop")
    steps = steps_within(READ_BYTES, data._source, schedule, 10_000)
    assert schedule.lanes == 1
    assert schedule.window_steps <= steps <= ORDERED_SAMPLES // 640_000


@pytest.mark.parametrize("stored", [(10, 160_000, 40), (10, 160_000, 2.56), (10, 10_000, 2.5)])
def test_a_rank_exchanges_rows_with_few_others(stored: tuple[int, int, float]) -> None:
    """Ten thousand ranks share what they read of 10 GB: on average as many messages as the collectives take."""
    total, row_bytes, chunk = stored
    file = Stored(total * scale.GB, row_bytes, int(chunk * scale.MB))
    costs = scale.opened(file).read_plan(file.batch_size(10_000), ranks=10_000)
    assert costs.shared and costs.messages_per_step < 60
    assert costs.most_messages_per_step < 1100  # sends to the ranks that share a lane, or as many as a block has rows


@pytest.mark.parametrize("ranks", [4, 16, 64])
@pytest.mark.parametrize("chunk_bytes", [None, 250_000, 2_500_000])
def test_a_sample_of_the_windows_shows_the_costs_of_all(ranks: int, chunk_bytes: int | None) -> None:
    """Two gigabytes of rows of 10 KB, in windows that are so small that many ranks share a lane."""
    data = scale.opened(Stored(2 * scale.GB, 10_000, chunk_bytes), window_bytes=16 << 20)
    schedule = data._batching._batch_schedule(16 * ranks, ranks, True, 1, "drop")
    every, sample = (estimate_costs(data._source, schedule, ranks, effort=effort) for effort in (1 << 26, 1 << 15))
    assert every.exact and not sample.exact
    assert sample.amplification == pytest.approx(every.amplification, rel=0.08)
    assert sample.reads_per_rank == pytest.approx(every.reads_per_rank, rel=0.08)


def test_files_that_are_opened(tmp_path: Path) -> None:
    for number in range(150):
        np.save(tmp_path / f"{number:03}.npy", np.zeros((4, 1000), "f4"))
    data = _open(tmp_path)
    assert data.read_plan(60, ranks=1).opens_per_rank == pytest.approx(150, abs=10)
    assert data.read_plan(60, ranks=30).opens_per_rank < 60
    assert len(data.read_plan(60, ranks=30).as_dict()["remedies"]) == 0


def test_few_of_many_small_files_are_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1500):
        np.save(tmp_path / f"{number}.npy", np.arange(4.0))
    data = _open(tmp_path, sample="file")
    looked_at: list[str] = []
    plan = table.plan_reads
    monkeypatch.setattr(table, "plan_reads", lambda *args: looked_at.append("file") or plan(*args))
    monkeypatch.setattr(batching, "estimate_costs", partial(estimate_costs, effort=CHOICE_EFFORT))
    costs = data.read_plan(100, ranks=2, shuffle=True, seed=1)
    assert costs.amplification == pytest.approx(1) and not costs.shared
    assert len(looked_at) <= 1500  # half of them by a window of one rank, and some in the order of the files


def test_text_is_read_by_the_library_and_not_counted(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "text.h5", "w") as file:
        file["text"] = [f"sample {n}" for n in range(100)]
        file["x"] = np.zeros((100, 10), "f4")
    both, text = (_open(tmp_path / "text.h5", inputs=names) for names in (None, "text"))
    assert both.read_plan(10, ranks=2).uncounted == ("text",)
    assert both.read_plan(10, ranks=2).amplification == pytest.approx(1, abs=0.01)
    costs = text.read_plan(10, ranks=2)
    assert np.isnan(costs.amplification) and costs.as_dict()["amplification"] is None
    assert "not counted" in str(costs) and json.dumps(costs.as_dict())


def test_arguments_are_checked(path: Path) -> None:
    data = _open(path)
    for arguments, message in (
        ({"ranks": 0}, "ranks= is too small"),
        ({"ranks": 2, "ranks_per_node": 0}, "ranks_per_node= is too small"),
        ({"ranks": 7}, "cannot share a batch"),
        ({"ranks": 2, "shuffle": "all"}, "takes no shuffle= of this kind"),
        ({"ranks": 2, "remainder": "all"}, "takes no remainder= of this kind"),
    ):
        with pytest.raises(PartitionError, match=message):
            data.read_plan(BATCH, **arguments)
    with pytest.raises(PartitionError, match="fewer samples than a batch"):
        data.read_plan(ROWS + 1, ranks=1)


def _warned(comm: MPI.Intracomm, path: Path, shared: bool | None) -> list[str]:
    """Return the warnings of two calls of ``batches``."""
    data = md.open_dataset(path, comm=comm, window_bytes=TIGHT)
    data = with_source(data, shared=shared)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data.batches(BATCH, shuffle=True, seed=1)
        data.batches(BATCH, shuffle=True, seed=2)
    return [str(warning.message) for warning in caught if "times the bytes" in str(warning.message)]


def test_rank_0_warns_once_of_bytes_that_are_read_again(path: Path, ranks: Pools) -> None:
    first, *others = ranks(6).run(_warned, path, False)
    assert len(first) == 1 and "6 ranks read" in first[0] and "window_bytes=" in first[0]
    assert others == [[]] * 5
    assert ranks(6).run(_warned, path, None) == [[]] * 6  # what the ranks share is read once
    assert ranks(1).run(_warned, path, False) == [[]]


def _estimated(comm: MPI.Intracomm, path: Path) -> list[tuple[int, bool]]:
    """Return the batch sizes for which the costs are estimated, and whether the samples are shuffled."""
    data, found = md.open_dataset(path, comm=comm, window_bytes=TIGHT), []

    def estimate(source: Any, schedule: Any, ranks: int, effort: int) -> Any:
        found.append((schedule.batch_size, schedule.seed is not None))
        return estimate_costs(source, schedule, ranks, effort=effort)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "estimate_costs", estimate)
        for size, shuffle, seed in ((BATCH, True, 1), (BATCH, True, 2), (BATCH, False, None), (2 * BATCH, True, 1)) * 2:
            data.batches(size, shuffle=shuffle, seed=seed)
    return found


def test_costs_of_equal_batches_are_estimated_once(path: Path, ranks: Pools) -> None:
    """To plan windows of other ranks takes longer than to begin a pass."""
    expected = [(BATCH, True), (BATCH, False), (2 * BATCH, True)]
    assert ranks(3).run(_estimated, path) == [expected, [], []]


@pytest.mark.parametrize("stop", ["first", "longest"])
def test_plans_of_mixtures_count_samples_that_are_read_again(tmp_path: Path, stop: str) -> None:
    for name, rows in (("a", 1000), ("b", 100)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(float(rows))
    mixed = md.mix(
        [md.open_dataset(tmp_path / f"{name}.h5", inputs="x") for name in "ab"], weights=[0.5, 0.5], stop=stop
    )
    costs = mixed.read_plan(20, ranks=1, shuffle=True, seed=1)
    batches = mixed.batches(20, shuffle=True, seed=1)
    before = mixed.profile.bytes
    assert sum(len(batch) for batch in batches) == 20 * costs.steps
    assert costs.bytes_read == mixed.profile.bytes - before
