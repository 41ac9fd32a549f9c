"""Files without samples among others, as jobs that write in parallel leave them."""

from __future__ import annotations

import io
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from mpi4py import MPI

import matex_data as md
from matex_data.errors import NoSamples
from tests.support.ranks import Pool


def _table(path: Path, numbers: list[int]) -> None:
    path.write_text("n,text\n" + "".join(f"{n},a\n" for n in numbers))


def _lines(path: Path, numbers: list[int]) -> None:
    path.write_text("".join(f'{{"n": {n}}}\n' for n in numbers))


def _records(path: Path, numbers: list[int]) -> None:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for n in numbers:
            feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[n]))
            features = tf.train.Features(feature={"n": feature})
            writer.write(tf.train.Example(features=features).SerializeToString())


def _shard(path: Path, numbers: list[int]) -> None:
    with tarfile.open(path, "w") as file:
        for n in numbers:
            member = tarfile.TarInfo(f"{n:03}.n.cls")
            member.size = len(str(n))
            file.addfile(member, io.BytesIO(str(n).encode()))


WRITERS: dict[str, Callable[[Path, list[int]], None]] = {
    "csv": _table,
    "jsonl": _lines,
    "tfrecord": _records,
    "tar": _shard,
}


def _write(folder: Path, suffix: str, counts: tuple[int, ...]) -> None:
    first = 0
    for number, count in enumerate(counts):
        WRITERS[suffix](folder / f"{number}.{suffix}", list(range(first, first + count)))
        first += count


def _opened(comm: MPI.Intracomm, folder: str, options: dict[str, Any]) -> tuple[list[int], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = md.open_dataset(folder, comm=comm, **options)
        found = data.load()
    (name,) = (name for name in found if name.startswith("n"))
    return found[name].tolist(), [str(one.message) for one in caught if "samples" in str(one.message)]


@pytest.mark.rank_counts(1, 3)
@pytest.mark.parametrize("suffix", WRITERS)
@pytest.mark.parametrize("counts", [(0, 4, 0, 3), (5, 0)], ids=str)
def test_they_are_left_out(pool: Pool, tmp_path: Path, suffix: str, counts: tuple[int, ...]) -> None:
    _write(tmp_path, suffix, counts)
    by_rank = pool.run(_opened, str(tmp_path), {}, timeout=60)
    assert np.concatenate([numbers for numbers, _ in by_rank]).tolist() == list(range(sum(counts)))
    (said,) = by_rank[0][1]
    such = tmp_path / f"{counts.index(0)}.{suffix}"
    assert said == f"{counts.count(0)} of {len(counts)} files have no samples, and are left out, such as {str(such)!r}"
    assert all(not said for _, said in by_rank[1:])


@pytest.mark.parametrize("suffix", WRITERS)
def test_all_files_of_a_set(tmp_path: Path, suffix: str) -> None:
    for count in (1, 2):
        _write(tmp_path, suffix, (0,) * count)
        with pytest.raises(NoSamples):
            md.open_dataset(tmp_path, comm=MPI.COMM_SELF)


def test_options_decide_whether_a_file_has_samples(tmp_path: Path) -> None:
    (tmp_path / "0.csv").write_text("1,2\n")
    (tmp_path / "1.csv").write_text("# nothing\n")
    with pytest.warns(UserWarning, match="1 of 2 files have no samples"):
        data = md.open_dataset(tmp_path, comm=MPI.COMM_SELF, header=None, comment="#")
    assert len(data) == 1


def test_no_index_is_stored_that_would_miss_samples_that_come_later(tmp_path: Path) -> None:
    _write(tmp_path, "jsonl", (3, 0))
    index = tmp_path / "index.matex"
    for _ in range(2):
        numbers, said = _opened(MPI.COMM_SELF, f"{tmp_path}/*.jsonl", {"index": index})
        assert numbers == [0, 1, 2] and "have no samples" in said[0] and "is not written" in said[1]
    _write(tmp_path, "jsonl", (3, 2))
    assert _opened(MPI.COMM_SELF, f"{tmp_path}/*.jsonl", {"index": index}) == ([0, 1, 2, 3, 4], [])
    assert index.exists()


def _refused(comm: MPI.Intracomm, folder: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            md.open_dataset(folder, comm=comm)
        except Exception as error:
            return str(error)
    return "opened"


@pytest.mark.rank_counts(2)
def test_a_warning_of_one_rank_that_is_an_error_is_one_of_all(pool: Pool, tmp_path: Path) -> None:
    _write(tmp_path, "tar", (0, 1))
    with tarfile.open(tmp_path / "1.tar", "a") as file:
        file.addfile(tarfile.TarInfo("README"), io.BytesIO())  # the reader warns of it
    first, second = pool.run(_refused, str(tmp_path), timeout=30)
    assert first == second and "belong to no sample" in first
