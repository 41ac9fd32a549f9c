"""Samples by position: values of h5py, in any order, on each rank alone, and from a pickled data set."""

from __future__ import annotations

import multiprocessing
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import matex_data as md
from matex_data import DataError
from matex_data.reading import source
from tests.support.ranks import Pool

SAMPLES = 120


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Write two files: chunked images, contiguous numbers, texts."""
    folder, random = tmp_path_factory.mktemp("samples"), np.random.default_rng(0)
    files = []
    for number, rows in enumerate((50, 70)):
        files.append(str(folder / f"part{number}.h5"))
        with h5py.File(files[-1], "w") as file:
            images = random.integers(0, 255, (rows, 4, 3)).astype("u1")
            file.create_dataset("image", data=images, chunks=(16, 4, 3), compression="gzip", shuffle=True)
            file["number"] = random.normal(size=rows)
            file["text"] = np.array([f"row {row}" for row in range(rows)], object)
    return files


def _stored(paths: list[str], name: str) -> Any:
    arrays = []
    for path in paths:
        with h5py.File(path) as file:
            arrays.append(file[name][:])
    return np.concatenate(arrays)


KEYS: list[Any] = [
    slice(10, 20),
    slice(None, None, -7),
    slice(200, 300),
    [3, 5],
    [119, 0, 51, 0, 49],
    np.array([-1, -120, 7], np.int32),
    np.arange(SAMPLES) % 17 == 3,
    [],
]


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_batches_are_those_of_numpy(paths: list[str], key: Any) -> None:
    batch = md.open_dataset(paths)[key]
    for name in ("image", "number", "text"):
        expected = _stored(paths, name)[np.array(key, np.int64) if isinstance(key, list) else key]
        assert batch[name].dtype == expected.dtype and batch[name].tolist() == expected.tolist()


def test_a_sample_has_no_sample_axis(paths: list[str]) -> None:
    data = md.open_dataset(paths, inputs=["image"], targets="number", weights="number")
    x, y, w = data[np.int64(-3)]
    assert list(x) == ["image"] and np.array_equal(x["image"], _stored(paths, "image")[-3])
    assert y == _stored(paths, "number")[-3] and y.shape == () and w.dtype == np.float32 and w == np.float32(y)
    assert np.array_equal(data.head(2)[1], _stored(paths, "number")[:2]) and len(data.head()[1]) == 5


@pytest.mark.parametrize(
    "key", [SAMPLES, -SAMPLES - 1, [0, SAMPLES], np.array([2**64 - 1], np.uint64), np.ones(3, bool)], ids=str
)
def test_positions_out_of_range(paths: list[str], key: Any) -> None:
    with pytest.raises(IndexError, match="120 samples"):
        md.open_dataset(paths)[key]


@pytest.mark.parametrize("key", ["image", 1.5, [0.5], [[1, 2]], (1, 2), None], ids=str)
def test_other_subscripts(paths: list[str], key: Any) -> None:
    with pytest.raises(TypeError, match="an int, a slice, or a sequence of int"):
        md.open_dataset(paths)[key]


def test_positions_are_those_of_a_split_a_selection_and_windows(paths: list[str]) -> None:
    numbers = _stored(paths, "number")
    chosen = md.open_dataset(paths, where="number > 0", inputs="number")
    assert np.array_equal(chosen[::-1], numbers[numbers > 0][::-1])
    assert [float(x) for x in chosen] == numbers[numbers > 0].tolist()
    train, valid = md.open_dataset(paths, inputs="number").split(0.5, 0.5, seed=1)
    assert sorted([*train[:], *valid[:]]) == sorted(numbers)
    x, y = md.open_dataset(paths[0], inputs="number", window=4, horizon=2)[9]
    assert np.array_equal(x, numbers[9:13]) and np.array_equal(y, numbers[13:15])


def test_iteration_reads_windows_and_copies_samples(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("matex_data.reading.source.LOAD_BYTES", 1000)
    data = md.open_dataset(paths, inputs="image", targets="number")
    samples = list(data)  # kept, while the memory of their windows is reused
    assert np.array_equal([x for x, _ in samples], _stored(paths, "image"))
    assert [y for _, y in samples] == _stored(paths, "number").tolist()
    assert np.array_equal(data[::-1][0], _stored(paths, "image")[::-1])


def test_the_positions_of_small_samples_are_not_in_memory_at_once(tmp_path: Path) -> None:
    rows = 1 << 26
    with h5py.File(tmp_path / "flags.h5", "w") as file:
        file.create_dataset("x", (rows,), "i1", chunks=(1 << 20,), fillvalue=3)
    data = md.open_dataset(tmp_path / "flags.h5", inputs="x")
    tracemalloc.start()
    try:
        assert data.statistics("x").count == rows
        assert sum(len(batch) for batch in data.batches(1024)) == rows
        assert tracemalloc.get_traced_memory()[1] < 8 * rows  # that of a number of 8 bytes for each
    finally:
        tracemalloc.stop()


def test_chunks_are_decoded_once_and_single_rows_read_alone(paths: list[str]) -> None:
    chunked = md.open_dataset(paths[0], inputs="image")
    for row in range(16):
        chunked[row]
    assert chunked.profile.bytes < 16 * 4 * 3 * 2
    plain = md.open_dataset(paths[0], inputs="number")
    plain[[3, 40]]
    assert plain.profile.bytes == 16


def test_a_sample_that_cannot_be_read(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "bad.h5", "w") as file:
        data = file.create_dataset("x", data=np.arange(40.0), chunks=(10,), compression="gzip", fletcher32=True)
        at = data.id.get_chunk_info(2).byte_offset
    with (tmp_path / "bad.h5").open("r+b") as raw:
        raw.seek(at + 4)
        raw.write(b"\xff\x00\xff")
    data = md.open_dataset(tmp_path / "bad.h5", inputs="x", on_error="skip")
    assert data[35] == 35
    with pytest.raises(DataError, match=r"bad\.h5"):
        data[[5, 25]]
    with pytest.warns(UserWarning, match="10"):
        assert list(data) == [*range(20), *range(30, 40)]
    assert len(data.skipped) == 10


def _read_on_ranks(comm: Any, paths: list[str]) -> tuple[Any, Any]:
    data = md.open_dataset(paths, inputs="number", comm=comm)
    own = data[comm.rank :: comm.size]  # other samples, and other numbers of calls, on every rank
    for row in range(comm.rank):
        assert data[row] == data[[row]][0]
    copy = pickle.loads(pickle.dumps(data))
    epoch = [batch.tolist() for batch in copy.batches(12, shuffle=True, seed=1)]
    return own.tolist(), (epoch, [batch.tolist() for batch in data.batches(12, shuffle=True, seed=1)])


def test_ranks_read_on_their_own(paths: list[str], pool: Pool) -> None:
    results = pool.run(_read_on_ranks, paths)
    numbers = _stored(paths, "number")
    assert [own for own, _ in results] == [numbers[rank :: pool.size].tolist() for rank in range(pool.size)]
    for _, (of_the_copy, of_the_rank) in results:
        assert of_the_copy == of_the_rank


def _read_elsewhere(data: Any, results: Any) -> None:
    results.put((data[5].tolist(), data[100:].tolist(), [x.tolist() for x in data.batches(40, shuffle=True, seed=3)]))


def test_a_spawned_process_reads_again(paths: list[str]) -> None:
    data = md.open_dataset(paths, inputs="number", where="number > -1")
    data[0]  # has open files, which are not pickled
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_read_elsewhere, args=(data, results))
    process.start()
    found = results.get(timeout=60)
    process.join(30)
    epoch = [x.tolist() for x in data.batches(40, shuffle=True, seed=3)]
    assert found == (data[5].tolist(), data[100:].tolist(), epoch)


def test_a_pickle_of_files_that_have_changed(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.arange(10))
    pickled = pickle.dumps(md.open_dataset(tmp_path / "x.npy"))
    np.save(tmp_path / "x.npy", np.arange(20))
    with pytest.raises(DataError, match="changed"):
        pickle.loads(pickled)[0]


def test_each_sample_of_a_file_that_has_changed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_SHARED_FILES", 0)  # each file is checked when it is needed, as one of many
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["text"] = ["a", "bb"]
    data = md.open_dataset(path)
    with h5py.File(path, "w") as file:
        file["text"] = ["c", "dd", "eee"]
    for _ in range(2):
        with pytest.raises(DataError, match="changed"):
            data[0]
