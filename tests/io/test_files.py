"""Reading on several ranks: bytes read, files opened, ranks that stop or fail."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import zarr
from mpi4py import MPI

from matex_data import DataError, DecodeError, PartitionError, open_dataset
from matex_data.errors import ChangedFile
from matex_data.index.stamps import Stamp
from matex_data.io.coalesce import ReadTask
from matex_data.io.counters import process_profile
from matex_data.io.files import Files
from matex_data.io.sessions import read_sessions
from matex_data.mpi.communicator import Communicator
from matex_data.reading.buffers import BufferPool
from tests.support.launch import run_script
from tests.support.machine_speed import scaled
from tests.support.ranks import Pool, Pools


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("reading")
    for number, rows in enumerate((3000, 1001, 500)):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["x"] = np.arange(rows * 64, dtype="f4").reshape(rows, 64) + number
            file.create_dataset("z", data=np.arange(rows * 64).reshape(rows, 64), chunks=(50, 64), compression="gzip")
    return str(folder / "*.h5")


def _counted(comm: MPI.Intracomm, files: str, io: str) -> tuple[int, int]:
    """Return the bytes read in three epochs, as counted by this package and by the kernel."""
    batches = open_dataset(files, comm=comm, io=io).batches(60, shuffle=True, seed=1, remainder="keep")
    for _ in batches:
        pass
    ours, kernels = process_profile().bytes, _kernel()
    for _ in range(3):
        for _ in batches:
            pass
    return process_profile().bytes - ours, _kernel() - kernels


def _kernel() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"])


@pytest.mark.parametrize("io", ["collective", "independent"])
def test_the_kernel_counts_as_many_bytes(files: str, pool: Pool, io: str) -> None:
    for ours, kernels in pool.run(_counted, files, io):
        assert ours > 100_000
        assert abs(kernels - ours) < 0.02 * ours + 20_000


def _opened(comm: MPI.Intracomm, files: str) -> Counter[str]:
    original, opened = h5py.File.__init__, Counter[str]()

    def counting(file: Any, name: Any, *args: Any, **kwargs: Any) -> None:
        opened.update([name] if isinstance(name, str) else [])  # not objects of files that are open
        original(file, name, *args, **kwargs)

    h5py.File.__init__ = counting
    try:
        data = open_dataset(files, comm=comm)
        data.load()
        for _ in data.batches(60, shuffle=True, seed=1):
            pass
    finally:
        h5py.File.__init__ = original
    return opened


def test_only_one_rank_opens_each_file_with_h5py(files: str, pool: Pool) -> None:
    by_rank = pool.run(_opened, files)
    for path in {path for opened in by_rank for path in opened}:
        counts = [opened[path] for opened in by_rank if path in opened]
        assert len(counts) == 1 and counts[0] <= 2  # to detect the format, and to index
    assert len({path for opened in by_rank for path in opened}) == 3


def _left_early(comm: MPI.Intracomm, files: str) -> list[int]:
    """Return the batch sizes of a complete epoch, after epochs that end early."""
    batches = open_dataset(files, comm=comm, window_bytes=1 << 20).batches(60, shuffle=True, seed=1)
    for stop in (0, 1, 7):
        for number, _ in enumerate(batches):
            if number == stop:
                break
    return [len(batch["x"]) for batch in batches]


def test_after_incomplete_epochs_an_epoch_is_complete(files: str, pool: Pool) -> None:
    for sizes in pool.run(_left_early, files):
        assert sizes == [60 // pool.size] * (4501 // 60)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a file that is larger than the read-ahead."""
    path = tmp_path_factory.mktemp("large") / "large.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.zeros((1, 100_000), "f4"), maxshape=(None, 100_000), compression="gzip")
        file["x"].resize(1200, axis=0)
    return str(path)


def _one_leaves(comm: MPI.Intracomm, path: str) -> int:
    batches = open_dataset(path, comm=comm).batches(12, shuffle=True, seed=1)
    taken = 0
    for _ in batches:
        taken += 1
        if comm.rank == 0 and taken == 2:
            break
    return taken


def test_a_rank_that_continues_when_another_stops_gets_an_error(ranks: Pools, large: str) -> None:
    first, second = ranks(2).outcomes(_one_leaves, large)
    assert first == 2
    assert isinstance(second, PartitionError) and "another rank has left" in str(second)


_ENDS = """
import sys, time
from mpi4py import MPI
from matex_data import PartitionError, open_dataset
rank = MPI.COMM_WORLD.rank
batches = iter(open_dataset(sys.argv[1], io=sys.argv[2]).batches(12, shuffle=True, seed=1))
try:
    for taken, _ in enumerate(batches):
        if rank == 1 and taken == 2:
            sys.exit()
        time.sleep(0.01)
except PartitionError as error:
    print(rank, error)
"""


@pytest.mark.parametrize("io", ["collective", pytest.param("independent", marks=pytest.mark.slow)])
def test_a_rank_that_continues_when_another_program_ends_gets_an_error(large: str, io: str) -> None:
    done = run_script(2, _ENDS, large, io, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("0 ") and "take the same number of batches on every rank" in done.stdout


def _only_rank_0(comm: MPI.Intracomm, files: str) -> float:
    os.environ["MATEX_TIMEOUT"] = "2"
    batches = open_dataset(files, comm=comm).batches(60)
    begin = time.monotonic()
    try:
        if comm.rank == 0:
            with pytest.raises(PartitionError, match="another rank does not take part"):
                next(iter(batches))
    finally:
        os.environ["MATEX_TIMEOUT"] = "60"
    seconds = time.monotonic() - begin
    comm.barrier()
    if comm.rank > 0:  # now the first epoch of rank 0 ends
        with suppress(PartitionError):
            next(iter(batches))
    assert sum(len(batch["x"]) for batch in batches) == 4501 // 60 * 30
    return seconds


def test_a_wait_for_an_absent_rank_ends(files: str, ranks: Pools) -> None:
    assert ranks(2).run(_only_rank_0, files)[0] < 10


def _scattered(rng: np.random.Generator, memory: np.ndarray[Any, Any], most: int) -> tuple[ReadTask, Any]:
    """Return ten runs of six ranges with destinations in random order, and the source of each byte of memory or -1."""
    nbytes = rng.integers(1, most, 60)
    gap = np.where(np.arange(60) % 6 == 0, rng.integers(1, 999, 60), 0)
    offset = np.cumsum(nbytes + gap) - nbytes
    order = rng.permutation(60)
    begin = np.empty(60, np.int64)
    begin[order] = np.cumsum(nbytes[order] + 7) - nbytes[order]
    source = np.full(len(memory), -1)
    for first, destination, count in zip(offset.tolist(), begin.tolist(), nbytes.tolist(), strict=True):
        source[destination : destination + count] = np.arange(first, first + count)
    return ReadTask(offset, nbytes, memory.ctypes.data + begin), source


def _read_scattered(comm: MPI.Intracomm, path: str, mode: str, most: int) -> bool:
    """Return whether all destinations receive their bytes, and nothing else changes."""
    content, rng = np.fromfile(path, np.uint8), np.random.default_rng(comm.rank)
    files = Files(read_sessions(comm).comm, [path], mode)
    try:
        for _ in range(5):
            memory = np.zeros(60 * (most + 7), np.uint8)
            ranges, source = _scattered(rng, memory, most)
            if files.collective is None:
                files.read(0, ranges)
            else:
                assert files.collective.read({0: [ranges]}, lambda _: np.empty(0, np.uint8), lambda *_: None) is None
            if not np.array_equal(memory, np.where(source < 0, 0, content[source])):
                return False
        return True
    finally:
        files.close()


@pytest.mark.rank_counts(3, slow=(2,))
@pytest.mark.parametrize("mode", ["collective", "independent"])
@pytest.mark.parametrize("most", [300, 100_000])
def test_scattered_ranges_arrive(pool: Pool, tmp_path: Path, mode: str, most: int) -> None:
    path = tmp_path / "bytes"
    path.write_bytes(np.random.default_rng(0).integers(0, 256, 60 * (most + 999), np.uint8).tobytes())
    assert pool.run(_read_scattered, str(path), mode, most) == [True] * pool.size


def _shortened(comm: MPI.Intracomm, path: str) -> None:
    data = open_dataset(path, comm=comm)
    comm.barrier()
    if comm.rank == 0:
        os.truncate(path, Path(path).stat().st_size // 2)
    comm.barrier()
    for _ in data.batches(12, shuffle=True, seed=1):
        pass


def test_a_truncated_file_raises_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((100, 1000))
    outcomes = pool.outcomes(_shortened, str(path), timeout=10)
    assert all(isinstance(error, DecodeError) for error in outcomes), outcomes
    assert len({str(error) for error in outcomes}) == 1
    assert str(path) in str(outcomes[0]) and "shorter" in str(outcomes[0])


def _two_iterators(comm: MPI.Intracomm, path: str) -> None:
    batches = open_dataset(path, comm=comm).batches(12)
    first, second = iter(batches), iter(batches)
    next(first)
    next(second)
    with pytest.raises(PartitionError, match="next epoch of the same batches"):
        for _ in first:
            pass


def test_a_second_iterator_ends_the_first(large: str, pool: Pool) -> None:
    pool.run(_two_iterators, large)


def _many_opened(comm: MPI.Intracomm, files: str) -> int:
    data = open_dataset(files, comm=comm)
    for _ in range(30):
        for _ in data.batches(60, shuffle=True):
            break
    return len(read_sessions(comm)._sessions)


def test_communicators_are_reused(files: str, pool: Pool) -> None:
    assert all(count < 8 for count in pool.run(_many_opened, files))


def test_without_a_seed_all_ranks_use_the_same_order(files: str, pool: Pool) -> None:
    by_rank = pool.run(_unseeded, files)
    everything = np.sort(np.concatenate(by_rank))
    assert len(np.unique(everything)) == len(everything) == 4501


def _unseeded(comm: MPI.Intracomm, files: str) -> np.ndarray[Any, Any]:
    batches = open_dataset(files, inputs="x", comm=comm).batches(60, shuffle=True, remainder="keep")
    return np.concatenate([batch[:, 0].copy() + 1e6 * (batch[:, 0] % 64) for batch in batches])


SCRIPT = """
import sys
import matex_data as md
path, inputs, targets, batch = sys.argv[1:]
data = md.open_dataset(path, inputs=inputs, targets=targets or None)
for _ in data.batches(int(batch), shuffle=True, seed=1, remainder="keep"):
    pass
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broken")
    with h5py.File(folder / "good.h5", "w") as file:
        file["image"] = np.zeros((100, 8, 8), "f4")
        file["label"] = np.zeros(100)
        file["short"] = np.zeros(90)
        made = file.create_dataset(
            "checked", data=np.random.default_rng(0).random((100, 64)), chunks=(10, 64), fletcher32=True
        )
        chunk = made.id.get_chunk_info(4)
    content = bytearray((folder / "good.h5").read_bytes())
    (folder / "cut.h5").write_bytes(content[: len(content) // 2])
    content[chunk.byte_offset + 99] ^= 1
    (folder / "flipped.h5").write_bytes(content)
    return folder


ERRORS = {
    "misspelt": ("good.h5", "imagee", "", 12, ["good.h5", "'imagee'", "'image'"]),
    "no-such-file": ("god.h5", "image", "", 12, ["god.h5", "'good.h5'"]),
    "unequal-lengths": ("good.h5", "image", "short", 12, ["good.h5", "100", "90"]),
    "batch-size": ("good.h5", "image", "label", 13, ["13", "batch_size="]),
    "truncated": ("cut.h5", "image", "label", 12, ["cut.h5", "truncated"]),
    "flipped-byte": ("flipped.h5", "checked", "", 12, ["flipped.h5", "'checked'", "row 40", "checksum"]),
}
QUICK = [(2, "misspelt"), (2, "no-such-file"), (2, "batch-size"), (2, "flipped-byte"), (1, "flipped-byte")]
MORE = [(size, case) for case in ERRORS for size in (1, 2, 4) if (size, case) != (1, "batch-size")]
ON_RANKS = [*QUICK, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE if each not in QUICK)]


@pytest.mark.parametrize(("size", "case"), ON_RANKS)
def test_errors_end_the_job(broken: Path, size: int, case: str) -> None:
    path, inputs, targets, batch, texts = ERRORS[case]
    done = run_script(size, SCRIPT, str(broken / path), inputs, targets, str(batch), timeout=30)
    assert done.returncode != 0
    assert done.seconds < scaled(25)
    assert size == 1 or f"---- uncaught error on all {size} ranks:" in done.stderr  # printed once
    for text in texts:
        assert text in done.stderr


def test_buffers_are_reused_only_without_views() -> None:
    buffers = BufferPool()
    first = buffers.bytes(100_000)
    address = first.ctypes.data
    view = first[10:20].view("u1")[2:]
    first[:] = 7
    del first
    other = buffers.bytes(100_000)
    assert other.ctypes.data != address
    other[:] = 0
    assert (view == 7).all()
    del view
    assert buffers.bytes(90_000).ctypes.data == address


def test_errors_are_data_errors() -> None:
    assert issubclass(DecodeError, DataError) and issubclass(PartitionError, ValueError)


def _replaced(comm: MPI.Intracomm, path: str) -> list[str]:
    """Return the errors of an epoch, ``load`` and ``statistics`` after another file has replaced the file."""
    data = open_dataset(path, comm=comm)
    batches = data.batches(60, shuffle=True, seed=1)
    for _ in range(2):
        for _ in batches:
            pass
    comm.barrier()
    if comm.rank == comm.size - 1:
        other = Path(path).with_suffix(f".{comm.size}")
        other.write_bytes(Path(path).read_bytes())
        other.replace(path)
    comm.barrier()
    errors = []
    for call in (lambda: list(batches), data.load, lambda: data.statistics("x")):
        with pytest.raises(DataError) as caught:
            call()
        errors.append(str(caught.value))
    return errors


@pytest.mark.rank_counts(1, 3)
def test_a_replaced_file_raises(pool: Pool, tmp_path: Path) -> None:
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(6400.0).reshape(100, 64)
    by_rank = pool.run(_replaced, path)
    assert all(errors == by_rank[0] for errors in by_rank)
    for error in by_rank[0]:
        assert "the file has changed since it was opened" in error and path in error and "open it again" in error


MANY = 70  # files: more than all ranks open together


def _write_many(folder: Path, kind: str) -> None:
    for number in range(MANY):
        if kind == "npy":
            np.save(folder / f"{number:02d}.npy", np.full((3, 5), number, "f4"))
        elif kind == "zarr":
            group = zarr.create_group(folder / f"{number:02d}.zarr", zarr_format=2)
            group.create_array("x", shape=3, dtype="f4")[:] = number
        else:  # texts, which h5py reads
            with h5py.File(folder / f"{number:02d}.h5", "w") as file:
                file["x"] = [f"{number} {row}" for row in range(3)]


def _change(path: Path, change: str) -> None:
    if change == "gone":
        path.unlink()
    elif change == "shorter":
        os.truncate(path, path.stat().st_size - 8)
    else:
        os.utime(path / "x" / ".zarray" if path.suffix == ".zarr" else path, ns=(1, 10**18))


def _changed_while_read(comm: MPI.Intracomm, folder: Path, change: str, on_error: str) -> tuple[list[str], int]:
    """Return the errors of an epoch and of ``load`` after one of many files has changed, and the stamps of an epoch."""
    stamps = []
    original = Stamp.of.__func__  # type: ignore[attr-defined]
    data = open_dataset(folder, comm=comm, on_error=on_error)
    batches = data.batches(6, shuffle=True, seed=1)
    Stamp.of = classmethod(lambda cls, path, parts=(): stamps.append(path) or original(cls, path, parts))  # type: ignore[method-assign]
    try:
        for _ in batches:
            pass
        taken = len(stamps)
        comm.barrier()
        if comm.rank == 0:
            (path, *_) = sorted(folder.glob("40.*"))
            _change(path, change)
        comm.barrier()
        errors = []
        for call in (lambda: list(batches), data.load):
            with pytest.raises(ChangedFile) as caught:
                call()
            errors.append(str(caught.value))
    finally:
        Stamp.of = classmethod(original)  # type: ignore[method-assign]
    return errors, taken


@pytest.mark.rank_counts(1, 3)
@pytest.mark.parametrize(
    ("kind", "change", "on_error"),
    [
        ("npy", "later", "raise"),
        ("npy", "shorter", "skip"),
        ("npy", "gone", "skip"),
        ("h5", "later", "skip"),
        ("zarr", "later", "raise"),
    ],
)
def test_one_of_many_files_changes(pool: Pool, tmp_path: Path, kind: str, change: str, on_error: str) -> None:
    _write_many(tmp_path, kind)
    by_rank = pool.run(_changed_while_read, tmp_path, change, on_error)
    first = by_rank[0][0]
    for errors, stamps in by_rank:
        assert errors == first
        assert stamps <= {"npy": 0, "h5": MANY}.get(kind, stamps)  # the descriptor tells what a path would
    if kind == "zarr":  # the folder, and of the group and the array their metadata, and those that may be added
        assert sum(stamps for _, stamps in by_rank) == 7 * MANY
    problems = {"shorter": "shorter than when it was opened", "gone": "no longer where it was opened"}
    problem = problems.get(change, "has changed since it was opened")
    for error in first:
        assert problem in error and "40." in error and "open it again" in error


def _opens(comm: MPI.Intracomm, folder: Path) -> list[int]:
    """Return how often this rank opens files in two epochs, each of many batches."""
    opened = []
    original = os.open
    data = open_dataset(folder, comm=comm, block_bytes=20, window_bytes=1000)
    batches = data.batches(6, shuffle=True, seed=1)

    def counting(path: Any, *arguments: Any, **options: Any) -> int:
        opened[-1] += str(path).startswith(str(folder))
        return original(path, *arguments, **options)

    os.open = counting
    try:
        for _ in range(2):
            opened.append(0)
            for _ in batches:
                pass
    finally:
        os.open = original
    return opened


@pytest.mark.rank_counts(1)
def test_files_of_an_epoch_are_opened_once(pool: Pool, tmp_path: Path) -> None:
    _write_many(tmp_path, "npy")
    assert pool.run(_opens, tmp_path) == [[MANY, MANY]]


def test_no_descriptors_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that nobody reads are closed, and the file is opened."""
    paths = [str(tmp_path / f"{i}") for i in range(8)]
    for number, path in enumerate(paths):
        Path(path).write_bytes(bytes([number]))
    original, open_files = os.open, set()

    def limited(path: Any, *arguments: Any, **options: Any) -> int:
        alive = [descriptor for descriptor in open_files if Path(f"/proc/self/fd/{descriptor}").exists()]
        if len(alive) >= 3:
            raise OSError(errno.EMFILE, "Too many open files")
        open_files.add(descriptor := original(path, *arguments, **options))
        return descriptor

    monkeypatch.setattr(os, "open", limited)
    files, memory = Files(Communicator(), paths, "independent"), np.zeros(1, np.uint8)
    for number in range(8):
        files.read(number, ReadTask(*(np.array([value]) for value in (0, 1, memory.ctypes.data))))
        assert memory[0] == number


def _images(comm: MPI.Intracomm, files: str) -> tuple[bool, list[list[int]]]:
    """Return whether the ranks read as one, and the numbers of the images of this rank in two epochs."""
    data = open_dataset(files, comm=comm, inputs="image", io="collective", window_bytes=1 << 17)
    batches = data.batches(48, shuffle=True, seed=3, remainder="keep")
    opened = Files(read_sessions(comm).comm, data.paths, "collective")
    together = opened.collective is not None
    opened.close()
    return together, [[int(image[0, 0]) for batch in batches for image in batch] for _ in range(2)]


@pytest.mark.openmpi
@pytest.mark.rank_counts(2, slow=(3,))
def test_collective_windows_of_compressed_images(pool: Pool, tmp_path: Path) -> None:
    for number in range(3):
        images = np.random.default_rng(number).integers(0, 100, (1048, 16, 16)).astype("i2")
        images[:, 0, 0] = np.arange(1048) + 1048 * number
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file.create_dataset("image", data=images, chunks=(16, 16, 16), compression="gzip", shuffle=True)
    by_rank = pool.run(_images, str(tmp_path / "*.h5"))
    assert all(together for together, _ in by_rank)
    for epoch in range(2):
        assert sorted(number for _, epochs in by_rank for number in epochs[epoch]) == list(range(3 * 1048))


def _different_fields(comm: MPI.Intracomm, path: str) -> str:
    with pytest.raises(PartitionError) as caught:
        open_dataset(path, inputs="y" if comm.rank else "x", comm=comm)
    return str(caught.value)


@pytest.mark.rank_counts(3)
def test_different_fields_on_the_ranks_raise(pool: Pool, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = file["y"] = np.zeros(100)
    errors = pool.run(_different_fields, str(tmp_path / "x.h5"))
    assert len(set(errors)) == 1
    assert "inputs='x'" in errors[0] and "on rank 1: inputs='y'" in errors[0]
