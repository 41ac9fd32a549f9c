"""Blocks that the ranks read for one another: the batches, the bytes, and the errors are those of a single rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import matex_data as md
from matex_data.epochs.exchange import OwnedSamples
from matex_data.errors import DecodeError, OutOfMemory
from matex_data.index.runs import Runs
from matex_data.mpi.communicator import Communicator
from matex_data.reading.buffers import BufferPool
from matex_data.sampling.schedule import Schedule
from tests.support.ranks import Pools
from tests.support.sources import with_source

ROWS, BATCH, WIDTH, DEPTH = 1003, 24, 300, 100
TEXTS = [b"n" * (number % 7) for number in range(ROWS)]
LISTS = [np.arange(number % 5, dtype="i4") + number for number in range(ROWS)]
SIZES = [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]
Batch = dict[str, Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write large compressed chunks, lists, and texts that only the library can read."""
    path = tmp_path_factory.mktemp("shared") / "a.h5"
    with h5py.File(path, "w") as file:
        x = np.random.default_rng(0).integers(0, 1000, (ROWS, WIDTH)).astype("f4")
        x[:, 0] = np.arange(ROWS)
        file.create_dataset("x", data=x, chunks=(DEPTH, WIDTH), compression="gzip")
        file.create_dataset("id", data=np.arange(ROWS), chunks=(DEPTH,))
        file.create_dataset("text", data=TEXTS, dtype=h5py.string_dtype())
        lists = file.create_dataset("list", (ROWS,), h5py.vlen_dtype("i4"))
        lists[:] = LISTS
    return path


def _damaged(path: Path, tmp_path: Path) -> Path:
    """Copy the file with a chunk of x that does not decode: rows 300 to 399."""
    copy = tmp_path / "damaged.h5"
    copy.write_bytes(path.read_bytes())
    with h5py.File(copy) as file:
        offset = file["x"].id.get_chunk_info(3).byte_offset
    with copy.open("r+b") as file:
        file.seek(offset)
        file.write(b"\0" * 64)
    return copy


def _opened(comm: MPI.Intracomm, path: Path, shared: bool | None, **options: Any) -> md.Dataset:
    data = md.open_dataset(path, comm=comm, window_bytes=4 * BATCH * WIDTH * 4, **options)
    return with_source(data, shared=shared)


def _epochs(comm: MPI.Intracomm, path: Path, shared: bool, shuffle: bool, remainder: str, **options: Any) -> Any:
    """Return the batches of two epochs on this rank, and the bytes read and exchanged."""
    data = _opened(comm, path, shared, **options)
    batches = data.batches(BATCH, shuffle=shuffle, seed=3 if shuffle else None, remainder=remainder)
    epochs = [[_copied(batch) for batch in batches] for _ in range(2)]
    return epochs, data.profile.bytes, data.profile.exchanged, [(s.row, s.problem) for s in data.skipped]


def _copied(batch: Any) -> Batch:
    if isinstance(batch, tuple):  # with the weights of padding
        batch = {**batch[0], "sample_weight": batch[1]}
    return {name: array.copy() for name, array in batch.items()}


def _check(batch: Batch) -> list[int]:
    """Return the numbers of the samples of a batch, after comparing its fields with what was written."""
    real = batch["sample_weight"] > 0 if "sample_weight" in batch else slice(None)
    ids = batch["id"][real]
    assert np.array_equal(batch["x"][real][:, 0], ids)
    if "text" in batch:
        assert list(batch["text"][real]) == [TEXTS[number] for number in ids]
        assert all(np.array_equal(row, LISTS[number]) for row, number in zip(batch["list"][real], ids, strict=True))
    return ids.tolist()


def _whole(by_rank: list[Any]) -> list[list[list[int]]]:
    """Return the samples of every global batch of every epoch, in the order of the ranks."""
    return [
        [[number for batch in of_ranks for number in _check(batch)] for of_ranks in zip(*epochs, strict=True)]
        for epochs in zip(*(epochs for epochs, *_ in by_rank), strict=True)
    ]


@pytest.mark.openmpi
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("shuffle", "remainder"), [(True, "drop"), (True, "pad"), (True, "keep"), (False, "keep")])
def test_batches_are_those_of_one_rank(path: Path, ranks: Pools, size: int, shuffle: bool, remainder: str) -> None:
    by_rank = ranks(size).run(_epochs, path, True, shuffle, remainder)
    alone = _whole([_epochs(MPI.COMM_SELF, path, False, shuffle, remainder)])
    shared = _whole(by_rank)
    if remainder == "drop" or not shuffle:
        assert shared == alone  # in the same order, too
    else:
        assert [[sorted(step) for step in epoch] for epoch in shared] == [
            [sorted(step) for step in epoch] for epoch in alone
        ]
    assert all(exchanged > 0 for _, _, exchanged, _ in by_rank)


def test_each_chunk_is_read_once(path: Path, ranks: Pools) -> None:
    """Without sharing, three ranks read each chunk of these windows two times or more."""
    names = {"inputs": ["x", "id"]}
    with h5py.File(path) as file:
        stored = sum(file[name].id.get_storage_size() for name in ("x", "id"))
    shared = sum(read for _, read, *_ in ranks(3).run(_epochs, path, True, True, "keep", **names))
    apart = sum(read for _, read, *_ in ranks(3).run(_epochs, path, False, True, "keep", **names))
    assert shared == 2 * stored  # in two epochs
    assert apart > 1.5 * shared


def _chosen(comm: MPI.Intracomm, path: Path) -> Any:
    data = _opened(comm, path, None, inputs=["x", "id"])
    kinds = [type(data.batches(BATCH, shuffle=shuffle, seed=1)._epochs.strategy).__name__ for shuffle in (True, False)]
    costs = data.read_plan(BATCH, ranks=comm.size, seed=1)
    return kinds, costs.shared, costs.amplification, _read(data)


def _read(data: md.Dataset) -> tuple[int, int]:
    before, batches = data.profile.bytes, data.batches(BATCH, shuffle=True, seed=1)
    for _ in batches:
        pass
    return data.profile.bytes - before, data.read_plan(BATCH, ranks=data.ranks, seed=1).bytes_read


def test_ranks_share_where_they_would_read_too_much(path: Path, ranks: Pools) -> None:
    by_rank = ranks(3).run(_chosen, path)
    for kinds, shared, amplification, _ in by_rank:
        assert kinds == ["Shared", "Shared"] and shared and amplification < 1.1
    assert sum(read for *_, (read, _) in by_rank) == pytest.approx(by_rank[0][3][1], rel=0.02)
    ((kinds, shared, amplification, _),) = ranks(1).run(_chosen, path)
    assert kinds == ["Streamed", "Streamed"] and not shared and amplification < 1.05


def _resumed(comm: MPI.Intracomm, path: Path, state: dict[str, Any]) -> list[list[int]]:
    batches = _opened(comm, path, True).batches(BATCH, shuffle=True, start=state)
    return [_check(batch) for batch in batches]


def test_it_resumes_on_another_number_of_ranks(path: Path, ranks: Pools) -> None:
    data = _opened(MPI.COMM_SELF, path, False)
    batches = data.batches(BATCH, shuffle=True, seed=3)
    expected = [_check(batch) for batch in batches]
    by_rank = ranks(3).run(_resumed, path, data.state(7))
    assert [[n for rows in step for n in rows] for step in zip(*by_rank, strict=True)] == expected[7:]


@pytest.mark.parametrize("remainder", ["keep", "pad"])
def test_samples_that_cannot_be_read_are_left_out_on_all_ranks(
    path: Path, tmp_path: Path, ranks: Pools, remainder: str
) -> None:
    damaged = _damaged(path, tmp_path)
    options = {"on_error": "skip", "inputs": ["x", "id"]}
    by_rank = ranks(3).run(_epochs, damaged, True, True, remainder, **options)
    with pytest.warns(UserWarning, match="100 of 1003 samples"):
        alone = _epochs(MPI.COMM_SELF, damaged, False, True, remainder, **options)
    found, expected = _whole(by_rank), _whole([alone])
    assert [[sorted(step) for step in e] for e in found] == [[sorted(step) for step in e] for e in expected]
    for *_, skipped in by_rank:
        assert skipped == alone[3] and [row for row, _ in skipped] == list(range(300, 400))


def test_a_damaged_chunk_is_the_same_error_on_all_ranks(path: Path, tmp_path: Path, ranks: Pools) -> None:
    outcomes = ranks(3).outcomes(_epochs, _damaged(path, tmp_path), True, True, "drop", timeout=60)
    assert all(isinstance(error, DecodeError) for error in outcomes), outcomes
    assert len({str(error) for error in outcomes}) == 1 and "row 300" in str(outcomes[0])


def _without_memory(comm: MPI.Intracomm, path: Path, after: int) -> None:
    """Let memory run out on the last rank, in a window's arrays or in those that are exchanged; then read on."""
    data = _opened(comm, path, True)
    batches, original, calls = data.batches(BATCH, shuffle=True, seed=1), BufferPool.bytes, [0]

    def failing(pool: BufferPool, count: int) -> Any:
        calls[0] += comm.rank == comm.size - 1
        if calls[0] == after:
            raise MemoryError
        return original(pool, count)

    BufferPool.bytes = failing  # type: ignore[method-assign]
    try:
        for _ in batches:
            pass
    except OutOfMemory:
        assert len(list(batches)) == ROWS // BATCH  # the next epoch is whole
        raise
    finally:
        BufferPool.bytes = original  # type: ignore[method-assign]


@pytest.mark.parametrize("after", [1, 4, 9, 14])
def test_no_rank_waits_for_one_without_memory(path: Path, ranks: Pools, after: int) -> None:
    outcomes = ranks(3).outcomes(_without_memory, path, after, timeout=60)
    assert all(isinstance(error, OutOfMemory) for error in outcomes), outcomes
    assert len({str(error) for error in outcomes}) == 1


def _leaves(comm: MPI.Intracomm, path: Path) -> list[list[int]]:
    """Leave an epoch after three batches, and read two others."""
    batches = _opened(comm, path, True).batches(BATCH, shuffle=True, seed=3)
    for number, _ in enumerate(batches):
        if number == 2:
            break
    return [_check(batch) for _ in range(2) for batch in batches]


def test_an_epoch_may_be_left(path: Path, ranks: Pools) -> None:
    by_rank = ranks(3).run(_leaves, path, timeout=60)
    alone = _leaves(MPI.COMM_SELF, path)
    assert [[n for rows in step for n in rows] for step in zip(*by_rank, strict=True)] == alone


def _leaves_alone(comm: MPI.Intracomm, path: Path) -> int:
    batches = _opened(comm, path, True).batches(BATCH, shuffle=True, seed=3)
    taken = 0
    for _ in batches:
        taken += 1
        if comm.rank == 1 and taken == 2:
            break
    return taken


def test_a_rank_that_leaves_keeps_no_other_waiting(path: Path, ranks: Pools) -> None:
    outcomes = ranks(3).outcomes(_leaves_alone, path, timeout=60)
    assert any("another rank has left this epoch" in str(outcome) for outcome in outcomes), outcomes


def test_samples_are_selected_by_position() -> None:
    """``OwnedSamples.local`` against the rows of an array."""
    runs = Runs(np.array([3, 20]), np.array([4, 2]))
    order = Schedule(runs, 2, 1, 1, 1, np.arange(2)).epoch(0)
    owned = OwnedSamples(Communicator(), order, runs, {})
    numbers = np.array([3, 4, 5, 6, 20, 21])
    assert owned.local(numbers[::-1]).tolist() == [5, 4, 3, 2, 1, 0]
