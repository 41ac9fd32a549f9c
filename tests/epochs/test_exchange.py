"""``shuffle="global"``: a uniform permutation of all samples, exchanged in memory or read row by row."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import matex_data as md
from matex_data import PartitionError, machine
from matex_data.epochs import exchange
from matex_data.errors import FormatError, OutOfMemory
from matex_data.io.counters import process_profile
from matex_data.sampling import permutation
from matex_data.sampling.permutation import Permutation
from tests.support.launch import run_script
from tests.support.machine_speed import scaled
from tests.support.ranks import Pools

ROWS, BATCH, WIDTH = 1003, 24, 100
TEXTS = [b"n" * (number % 7) for number in range(ROWS)]
SIZES = [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write compressed chunks, and texts that only the library can read."""
    path = tmp_path_factory.mktemp("global") / "a.h5"
    with h5py.File(path, "w") as file:
        x = np.repeat(np.arange(ROWS, dtype="f4")[:, None], WIDTH, axis=1)
        file.create_dataset("x", data=x, chunks=(50, WIDTH), compression="gzip")
        file["id"] = np.arange(ROWS)
        file.create_dataset("text", data=TEXTS, dtype=h5py.string_dtype())
        file.create_dataset("none", shape=(ROWS, 0), dtype="f4")
    return path


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write contiguous rows."""
    path = tmp_path_factory.mktemp("global") / "b.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.repeat(np.arange(ROWS, dtype="f4")[:, None], WIDTH, axis=1)
        file["id"] = np.arange(ROWS)
    return path


def _epochs(comm: MPI.Intracomm, path: Path, remainder: str = "keep", step: int = 0, **options: Any) -> list[Any]:
    """Return the sample numbers of three epochs on this rank, and the bytes read, and exchanged in the last epoch."""
    data = md.open_dataset(path, comm=comm, **options)
    start = {**data.batches(BATCH, shuffle="global", seed=3, remainder=remainder).state(step)} if step else None
    before = process_profile().bytes
    batches = data.batches(BATCH, shuffle="global", seed=3, remainder=remainder, start=start)
    epochs: list[Any] = []
    for _ in range(3):
        exchanged, epoch = data.profile.exchanged, []
        for batch in batches:
            real = batch["sample_weight"] > 0 if remainder == "pad" else slice(None)
            ids = batch["id"][real].copy()
            assert np.array_equal(batch["x"][real][:, 0], ids) and np.array_equal(batch["x"][real][:, -1], ids)
            if "text" in batch:
                assert list(batch["text"][real]) == [TEXTS[number] for number in ids]
                assert batch["none"].shape == (len(batch["id"]), 0)
            if remainder == "pad":
                assert not np.any(batch["x"][~real])
            epoch.append(ids)
        epochs.append(epoch)
    read = process_profile().bytes - before
    return [epochs, read, data.profile.exchanged - exchanged]


def _whole(by_rank: list[list[Any]]) -> list[list[list[int]]]:
    """Return the sorted samples of every global batch of every epoch."""
    return [
        [np.sort(np.concatenate(of_ranks)).tolist() for of_ranks in zip(*epochs, strict=True)]
        for epochs in zip(*(epochs for epochs, *_ in by_rank), strict=True)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("remainder", ["drop", "pad", pytest.param("keep", marks=pytest.mark.openmpi)])
def test_batches_are_those_of_the_permutation_on_any_number_of_ranks(
    path: Path, ranks: Pools, size: int, remainder: str
) -> None:
    by_rank = ranks(size).run(_epochs, path, remainder)
    epochs = _whole(by_rank)
    order = [Permutation(ROWS, 3, number)(np.arange(ROWS)) for number in range(3)]
    for found, expected in zip(epochs, order, strict=True):
        steps = [expected[i : i + BATCH] for i in range(0, ROWS - (BATCH - 1) * (remainder == "drop"), BATCH)]
        assert found == [np.sort(step).tolist() for step in steps]
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


@pytest.mark.parametrize("size", SIZES)
def test_each_rank_reads_its_shard_once_and_receives_the_other_samples(path: Path, ranks: Pools, size: int) -> None:
    by_rank = ranks(size).run(_epochs, path, inputs=["x", "id"])
    stored = sum(layout.stored_bytes() for layout in md.open_dataset(path)._source.index.files[0].layouts.values())
    chunk = stored / (ROWS / 50)
    row, shard = WIDTH * 4 + 8, ROWS / size
    for epochs, read, exchanged in by_rank:
        received = sum(map(len, epochs[2]))
        assert read <= stored / size + 2 * chunk
        assert abs(exchanged - received * row * (1 - 1 / size)) <= 5 * row * np.sqrt(shard)


@pytest.mark.parametrize("size", SIZES[:3])
def test_single_rows_give_the_same_batches(plain: Path, ranks: Pools, size: int) -> None:
    by_rank = ranks(size).run(_epochs, plain, global_reads="rows")
    assert _whole(by_rank) == _whole([_epochs(MPI.COMM_SELF, plain)])
    assert {exchanged for *_, exchanged in by_rank} == {0}


def test_it_resumes_on_any_number_of_ranks(path: Path, plain: Path, ranks: Pools) -> None:
    first, second, _ = _whole(ranks(2).run(_epochs, path))
    done = len(first) + 5
    for size, options in ((1, {}), (3, {})):
        (rest, *_) = _whole(ranks(size).run(_epochs, path, step=done, **options))
        assert rest == second[5:]
    state = md.open_dataset(path, comm=MPI.COMM_SELF).batches(BATCH, shuffle="global", seed=3).state(7)
    assert json.loads(json.dumps(state)) == state and state["shuffle"] == "global"
    with pytest.raises(PartitionError, match="another shuffle"):
        md.open_dataset(path, comm=MPI.COMM_SELF).batches(BATCH, shuffle=True, start=state)
    small = md.open_dataset(path, comm=MPI.COMM_SELF, window_bytes=1 << 12, block_bytes=4096)
    assert (
        len(small.batches(BATCH, shuffle="global", start=state)) == ROWS // BATCH - 7
    )  # its state has neither windows nor blocks


def _at_different_speeds(comm: MPI.Intracomm, path: Path) -> list[list[int]]:
    data = md.open_dataset(path, comm=comm, inputs=["id", "x"])
    batches = data.batches(BATCH, shuffle="global", seed=1)
    found = []
    for number, batch in enumerate(batches):
        time.sleep(0.01 * comm.rank * (number % 5))
        found.append(batch["id"].copy())
        if number == 30:
            break
    found += [batch["id"].copy() for batch in batches]  # the unfinished epoch ends on all ranks
    return [ids.tolist() for ids in found]


@pytest.mark.parametrize("size", SIZES)
def test_skewed_ranks_leave_an_epoch_and_begin_the_next(path: Path, ranks: Pools, size: int) -> None:
    by_rank = ranks(size).run(_at_different_speeds, path)
    found = [sorted(n for ids in of_ranks for n in ids) for of_ranks in zip(*by_rank, strict=True)]
    order = [Permutation(ROWS, 1, number)(np.arange(ROWS)) for number in range(2)]
    expected = [sorted(order[0][i * BATCH : (i + 1) * BATCH].tolist()) for i in range(31)]
    expected += [sorted(order[1][i * BATCH : (i + 1) * BATCH].tolist()) for i in range(ROWS // BATCH)]
    assert found == expected


def _one_leaves(comm: MPI.Intracomm, path: Path) -> None:
    batches = md.open_dataset(path, comm=comm).batches(BATCH, shuffle="global", seed=1)
    for number, _ in enumerate(batches):
        if comm.rank == 0 and number == 1:
            break
    if comm.rank == 0:
        raise PartitionError("another rank has left this epoch before its end")


def test_a_rank_that_leaves_alone_stops_the_others(path: Path, ranks: Pools, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = ranks(2).outcomes(_one_leaves, path, timeout=60)
    assert all("has left this epoch" in str(error) for error in outcomes)


def _no_memory(comm: MPI.Intracomm, path: Path, where: str) -> None:
    batches = md.open_dataset(path, comm=comm).batches(BATCH, shuffle="global", seed=1)
    holder: Any = exchange.KeptSamples if where == "owners" else exchange
    original, calls = getattr(holder, where), 0

    def failing(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if comm.rank == comm.size - 1 and calls > 3:
            raise MemoryError
        return original(*arguments)

    setattr(holder, where, failing)
    try:
        for _ in batches:
            pass
    finally:
        setattr(holder, where, original)


def _references(comm: MPI.Intracomm, path: Path, shuffle: Any) -> int:
    batches = md.open_dataset(path, inputs="link", comm=comm).batches(6, shuffle=shuffle, remainder="keep")
    return sum(len(batch) for batch in batches)


def test_values_of_one_process_are_not_sent(tmp_path: Path, ranks: Pools) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        made = file.create_dataset("x", data=np.arange(12))
        file.create_dataset("link", data=np.array([made.ref] * 12, h5py.ref_dtype))
    assert sum(ranks(3).run(_references, path, True)) == 12
    for outcome in ranks(3).outcomes(_references, path, "global", timeout=60):
        assert isinstance(outcome, FormatError) and "'link'" in str(outcome) and "cannot be sent" in str(outcome)


@pytest.mark.parametrize("where", ["owners", "_pack", "scatter"])
def test_out_of_memory_ends_the_epoch_on_all_ranks(path: Path, ranks: Pools, where: str) -> None:
    outcomes = ranks(2).outcomes(_no_memory, path, where, timeout=60)
    assert all(isinstance(error, OutOfMemory) for error in outcomes), outcomes
    assert len({str(error) for error in outcomes}) == 1
    assert len(ranks(2).run(_epochs, path)) == 2  # the next epoch works


def _unfit(comm: MPI.Intracomm, path: Path) -> None:
    data, scarce = md.open_dataset(path, comm=comm), comm.rank == comm.size - 1
    original = machine.free_memory
    machine.free_memory = lambda: 1 << 17 if scarce else 1 << 30
    try:
        data.batches(BATCH, shuffle="global", seed=1)
    finally:
        machine.free_memory = original


@pytest.mark.parametrize("size", [1, 2])
def test_samples_that_do_not_fit_are_refused_with_the_figures(path: Path, plain: Path, ranks: Pools, size: int) -> None:
    for file, rows in ((path, False), (plain, True)):
        outcomes = ranks(size).outcomes(_unfit, file)
        assert len({str(error) for error in outcomes}) == 1
        text = str(outcomes[0])
        assert isinstance(outcomes[0], PartitionError) and "does not fit" in text
        assert re.search(r"found: [\d.]+ \w*B \(\d+ bytes\)", text)
        assert ('global_reads="rows"' in text) == rows


def test_options_are_checked(path: Path) -> None:
    with pytest.raises(PartitionError, match="blocks of 50 rows") as raised:
        md.open_dataset(path, comm=MPI.COMM_SELF, inputs="x", global_reads="rows").batches(BATCH, shuffle="global")
    assert raised.value.field == "x"
    with pytest.raises(PartitionError, match="takes no global_reads= of this kind"):
        md.open_dataset(path, comm=MPI.COMM_SELF, global_reads="disk")
    with pytest.raises(PartitionError, match="takes no shuffle= of this kind"):
        md.open_dataset(path, comm=MPI.COMM_SELF).batches(BATCH, shuffle="local")  # type: ignore[arg-type]


def test_tensors(path: Path) -> None:
    data = md.open_dataset(path, comm=MPI.COMM_SELF, inputs="x", targets="id")
    tensors = data.tf_dataset(BATCH, shuffle="global", seed=3)
    assert int(tensors.cardinality()) == ROWS // BATCH
    found = [y.numpy().tolist() for _, y in tensors]
    assert found == Permutation(ROWS, 3, 0)(np.arange(ROWS // BATCH * BATCH)).reshape(-1, BATCH).tolist()


_KILLED = """
import os, sys
from mpi4py import MPI
import matex_data as md
batches = md.open_dataset(sys.argv[1]).batches(24, shuffle="global", seed=1)
for epoch in range(50):
    for number, _ in enumerate(batches):
        if MPI.COMM_WORLD.rank == 1 and epoch == 1 and number == 3:
            os.kill(os.getpid(), 9) if sys.argv[2] == "killed" else sys.exit(3)
"""


@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_rank_that_ends_ends_the_job(path: Path, how: str) -> None:
    done = run_script(2, _KILLED, str(path), how, timeout=60)
    assert done.returncode != 0 and done.seconds < scaled(40)


@pytest.mark.parametrize("table", [0, 1 << 22])
@pytest.mark.parametrize("total", [1, 2, 3, 7, 1000, 99_991])
def test_a_permutation(monkeypatch: pytest.MonkeyPatch, table: int, total: int) -> None:
    monkeypatch.setattr(permutation, "TABLE_ITEMS", table)
    orders = [Permutation(total, 5, number)(np.arange(total)) for number in range(2)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(total))
    if total > 7:
        assert abs(np.corrcoef(orders[0], np.arange(total))[0, 1]) < 5 / np.sqrt(total)
        assert abs(np.corrcoef(*orders)[0, 1]) < 5 / np.sqrt(total)
        assert (np.abs(np.diff(orders[0])) == 1).sum() < 20  # 2 on average
        selected = np.random.default_rng(0).integers(0, total, 50)
        assert np.array_equal(Permutation(total, 5, 0)(selected), orders[0][selected])


def test_all_permutations_are_equally_likely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permutation, "TABLE_ITEMS", 0)
    found = Counter(tuple(Permutation(4, seed)(np.arange(4)).tolist()) for seed in range(9600))
    assert len(found) == 24
    assert sum((count - 400) ** 2 / 400 for count in found.values()) < 50  # chi-squared of 23 degrees: 1 in 1000


def test_a_window_that_is_not_begun_since_the_epoch_ends_is_no_error() -> None:
    data = md.open_dataset({"x": np.arange(8.0)}, inputs="x", cache="memory", comm=MPI.COMM_SELF)
    strategy = data.batches(4)._epochs.strategy
    reader = strategy.reader(strategy.open(), 0, 0)
    window = next(reader.windows()).result()
    window.wait(reader.context.profile)
    assert not window.loaded.arrays
