"""``on_error="skip"``: the batches of sound files without the damaged samples, on any number of ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mpi4py import MPI

from matex_data import DataError, DecodeError, PartitionError, open_dataset
from matex_data.epochs.window import LoadedWindow, leave_out
from matex_data.errors import OutOfMemory
from matex_data.fields import ElementSpec, Field
from matex_data.index.chunked import Chunked
from matex_data.index.library import LibraryRows
from matex_data.index.model import FileIndex, Index
from matex_data.io.sessions import read_sessions
from matex_data.reading.context import NO_ROWS
from matex_data.reading.skipping import SampleRead
from matex_data.reading.source import ReadOptions, open_source
from tests.support.ranks import Pools
from tests.support.sources import dataset_of, with_source

ROWS, CHUNK, BATCH = 1003, 16, 24
BAD_CHUNKS = (3, 40, 41)
BAD = [row for chunk in BAD_CHUNKS for row in range(chunk * CHUNK, (chunk + 1) * CHUNK)]
SIZES = (1, 3, pytest.param(2, marks=pytest.mark.slow))
ORDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "in order": ({}, {"remainder": "drop"}),
    "independent": ({"io": "independent"}, {"remainder": "keep", "shuffle": True, "seed": 1}),
    "padded": ({}, {"remainder": "pad", "shuffle": True, "seed": 1}),
    "in memory": ({"cache": "memory"}, {"remainder": "keep", "shuffle": True, "seed": 1}),
    "exchanged": ({}, {"remainder": "pad", "shuffle": "global", "seed": 1}),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("skipping") / "sound.h5"
    with h5py.File(path, "w") as file:
        x = np.repeat(np.arange(ROWS, dtype="f4")[:, None], 50, axis=1)
        file.create_dataset("x", data=x, chunks=(CHUNK, 50), compression="gzip", shuffle=True)
        file["id"] = np.arange(ROWS)
    return path


@pytest.fixture(scope="module")
def damaged(sound: Path) -> Path:
    path = sound.with_name("damaged.h5")
    content = bytearray(sound.read_bytes())
    with h5py.File(sound) as file:
        for chunk in BAD_CHUNKS:
            content[file["x"].id.get_chunk_info(chunk).byte_offset + 9] ^= 0xFF
    path.write_bytes(content)
    return path


def _epochs(comm: MPI.Intracomm, path: Path, options: dict[str, Any], order: dict[str, Any]) -> Any:
    """Return the sample numbers of two epochs, the warnings, the skipped samples, and their number on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = open_dataset(path, comm=comm, **options)
        batches = data.batches(BATCH, **order)
        epochs = [[_numbers(batch, comm.size) for batch in batches] for _ in range(2)]
    said = [str(w.message) for w in caught if "cannot be read" in str(w.message)]
    return epochs, said, data.skipped, data.profile.skipped


def _numbers(batch: Any, size: int) -> list[int]:
    real = batch.get("sample_weight", np.ones(len(batch["id"]))) > 0
    assert np.array_equal(batch["x"][real][:, 0], batch["id"][real]) and not batch["x"][~real].any()
    assert len(batch["id"]) == BATCH // size or "sample_weight" not in batch
    return batch["id"][real].tolist()


def _joined(results: list[Any]) -> list[list[list[int]]]:
    """Return the sorted samples of every global batch of both epochs."""
    return [
        [sorted(n for own in of_ranks for n in own) for of_ranks in zip(*epochs, strict=True)]
        for epochs in zip(*(epochs for epochs, *_ in results), strict=True)
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", ORDERS)
def test_the_same_batches_without_the_damaged_samples(
    sound: Path, damaged: Path, ranks: Pools, size: int, name: str
) -> None:
    options, order = ORDERS[name]
    expected = _joined([_epochs(MPI.COMM_SELF, sound, options, order)])
    results = ranks(size).run(_epochs, damaged, {**options, "on_error": "skip"}, order)
    assert _joined(results) == [[[n for n in batch if n not in BAD] for batch in epoch] for epoch in expected]
    assert all([sample.row for sample in skipped] == BAD for _, _, skipped, _ in results)
    assert sum(own for *_, own in results) == len(BAD)
    first, *others = (said for _, said, *_ in results)
    assert len(first) == (1 if name in ("in memory", "exchanged") else 2) and not any(others)
    assert f"{len(BAD)} of " in first[0] and "damaged.h5', row 48: a chunk does not decode" in first[0]
    assert "43 more" in first[0]


@pytest.mark.parametrize("order", [{"shuffle": True}, {"shuffle": "global"}, {"cache": "memory", "shuffle": True}])
def test_lists_of_samples_that_cannot_be_read_are_left_out(tmp_path: Path, order: dict[str, Any]) -> None:
    path, lists = tmp_path / "lists.parquet", [np.full(1 + n % 7, n, float) for n in range(64)]
    pq.write_table(pa.table({"x": lists}), path, row_group_size=8, compression="gzip", use_dictionary=False)
    content, column = bytearray(path.read_bytes()), pq.ParquetFile(path).metadata.row_group(3).column(0)
    end = column.data_page_offset + column.total_compressed_size
    content[end - 20 : end - 4] = bytes(16)
    path.write_bytes(content)
    data = open_dataset(path, comm=MPI.COMM_SELF, on_error="skip", cache=order.get("cache"))
    with pytest.warns(UserWarning, match="8 of 64 samples"):
        batches = [batch["x"] for batch in data.batches(8, shuffle=order["shuffle"], seed=1, remainder="keep")]
    found = sorted(int(sample[0]) for batch in batches for sample in batch)
    assert found == [n for n in range(64) if not 24 <= n < 32]


def _outcome(comm: MPI.Intracomm, path: Path, on_error: str) -> None:
    for _ in open_dataset(path, comm=comm, on_error=on_error).batches(BATCH, shuffle=True, seed=1):
        pass


def test_raise_is_as_before(damaged: Path, ranks: Pools) -> None:
    outcomes = ranks(3).outcomes(_outcome, damaged, "raise", timeout=30)
    assert all(isinstance(error, DecodeError) for error in outcomes) and len({str(error) for error in outcomes}) == 1
    assert open_dataset(damaged, comm=MPI.COMM_SELF).skipped == []


@pytest.mark.parametrize("size", [1, 3])
def test_an_epoch_of_nothing_is_an_error(sound: Path, ranks: Pools, size: int, tmp_path: Path) -> None:
    content = bytearray(sound.read_bytes())
    with h5py.File(sound) as file:
        for chunk in range(file["x"].id.get_num_chunks()):
            content[file["x"].id.get_chunk_info(chunk).byte_offset + 9] ^= 0xFF
    (tmp_path / "lost.h5").write_bytes(content)
    outcomes = ranks(size).outcomes(_outcome, tmp_path / "lost.h5", "skip", timeout=60)
    assert all(isinstance(error, DataError) for error in outcomes) and len({str(error) for error in outcomes}) == 1
    assert "none of the 984 samples of epoch 0 can be read (file" in str(outcomes[0])


def test_unknown_value(sound: Path) -> None:
    with pytest.raises(PartitionError, match="'raise' or 'skip'"):
        open_dataset(sound, comm=MPI.COMM_SELF, on_error="ignore")


def test_later_epochs_do_not_read_damaged_samples_again(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = SampleRead._read

    def counting(self: SampleRead, begin: int, end: int) -> Any:
        read.append(end - begin)
        return original(self, begin, end)

    monkeypatch.setattr(SampleRead, "_read", counting)
    data = open_dataset(damaged, comm=MPI.COMM_SELF, on_error="skip")
    batches = data.batches(BATCH, shuffle=True, seed=1, remainder="keep")
    for epoch in range(3):
        with pytest.warns(UserWarning, match=f"48 of {ROWS} samples of epoch {epoch} cannot be read"):
            assert sum(len(batch["id"]) for batch in batches) == ROWS - 48
        assert bool(read) == (epoch == 0)
        assert sum(read) < 12 * ROWS and len(read) < 200
        read.clear()


def _whole(comm: MPI.Intracomm, path: Path) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = open_dataset(path, comm=comm, on_error="skip")
        ids, moments = data.load()["id"].tolist(), data.statistics("x")
        selected = len(open_dataset(path, comm=comm, on_error="skip", where="id >= 0", missing="drop"))
        images = open_dataset(path, comm=comm, on_error="skip", inputs="x")
        assert images.load(fields=["id"])["id"].tolist() == images.load()["x"][:, 0].tolist() == ids
    return ids, int(moments.count), float(moments.mean), selected, len(caught)


@pytest.mark.parametrize("size", [1, 2])
def test_whole_reads_leave_damaged_samples_out(damaged: Path, ranks: Pools, size: int) -> None:
    good = [row for row in range(ROWS) if row not in BAD]
    results = ranks(size).run(_whole, damaged)
    assert [row for ids, *_ in results for row in ids] == good
    for rank, (_, count, mean, selected, warned) in enumerate(results):
        assert count == 50 * len(good) and mean == pytest.approx(np.mean(good))
        assert selected == len(good)
        assert warned == (5 if rank == 0 else 0)


def test_a_loaded_field_that_batches_do_not_have_must_be_readable(damaged: Path) -> None:
    with pytest.raises(DecodeError, match="field 'x', row 48"):
        open_dataset(damaged, comm=MPI.COMM_SELF, on_error="skip", inputs="id").load(fields=["id", "x"])


def _damaged_after_opening(comm: MPI.Intracomm, path: Path, options: dict[str, Any]) -> Any:
    """Damage a file behind its index, and return the samples of an epoch and what was skipped."""
    data = open_dataset(path, comm=comm, on_error="skip", **options)
    unstamped = data._source.index.with_stamps(dict.fromkeys(data.paths))
    data = with_source(data, index=unstamped)  # a file that has changed is refused otherwise
    comm.barrier()
    if comm.rank == 0:
        DAMAGES[path.suffix](path)
    comm.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = data.batches(12, shuffle=True, seed=2, remainder="keep")
        found = [batch[(slice(None), *[0] * (batch.ndim - 1))].copy() for batch in batches]
    return np.concatenate(found).tolist(), [(Path(s.file).name, s.row, s.problem) for s in data.skipped]


def _truncate(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def _spoil_a_number(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"\n77,", b"\nxx,"))


DAMAGES: dict[str, Callable[[Path], None]] = {
    ".npy": _truncate,
    ".bin": _truncate,
    ".idx": _truncate,
    ".csv": _spoil_a_number,
}
FIELDS = {".npy": "data", ".bin": "image", ".idx": "data", ".csv": "id"}


def _write(path: Path) -> int:
    """Write samples that are numbered from 0, and return how many."""
    rows = 2400 if path.suffix == ".csv" else 240
    numbers = np.arange(rows)
    if path.suffix == ".csv":
        path.write_text("id,x\n" + "".join(f"{n},{n / 2}\n" for n in numbers))
    elif path.suffix == ".npy":
        np.save(path, numbers)
    elif path.suffix == ".idx":
        path.write_bytes(bytes([0, 0, 0x0C, 1]) + np.array([rows, *numbers], ">i4").tobytes())
    else:
        records = np.zeros((rows, 3073), "u1")
        records[:, 0], records[:, 1] = numbers % 10, numbers
        records.tofile(path)
    return rows


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("suffix", DAMAGES)
def test_files_of_other_formats(ranks: Pools, size: int, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"data{suffix}"
    rows = _write(path)
    options = {"inputs": FIELDS[suffix], **({"format": "cifar"} if suffix == ".bin" else {})}
    results = ranks(size).run(_damaged_after_opening, path, options)
    bad = [row for _, row, _ in results[0][1]]
    assert sorted(n for found, _ in results for n in found) == [n for n in range(rows) if n not in bad]
    assert bad == list(range(bad[0], bad[-1] + 1))
    if suffix == ".csv":  # the block of the record
        assert bad[0] <= 77 <= bad[-1] and len(bad) < rows / 4
    else:
        assert bad[-1] == rows - 1 and abs(len(bad) - rows / 2) < 10
    for _, skipped in results:
        assert skipped == results[0][1]
        assert {name for name, *_ in skipped} == {path.name}
        assert all(("line 79" if suffix == ".csv" else "shorter") in problem for *_, problem in skipped)


@dataclass(frozen=True)
class Folder(LibraryRows):
    """Images of a folder, some of which are broken."""

    rows: int = 60
    block_rows: int = 1

    def read(self, start: int, stop: int) -> Any:
        for row in range(start, stop):
            if row in BROKEN:
                raise DecodeError("the image is truncated", file=f"folder/{row}.jpg")
        images = np.empty(stop - start, object)
        for i in range(stop - start):
            images[i] = np.full((1 + i % 3, 2, 3), start + i, "u1")
        return images


BROKEN = (0, 7, 9, 10, 59)
IMAGE = Field("image", (), np.dtype("u1"), ragged=True, inner=(None, None, 3))


def _images(comm: MPI.Intracomm, cache: str | None, order: dict[str, Any]) -> Any:
    index = Index({"image": IMAGE}, [FileIndex("folder", 60, {"image": Folder()})])
    options = ReadOptions("independent", window_bytes=1 << 20, cache=cache, on_error="skip")
    source = open_source(read_sessions(comm), index, options)
    data = dataset_of(source, ElementSpec("image"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        batches = [[int(image.max(initial=0)) for image in batch] for batch in data.batches(6, **order)]
    return batches, [str(sample) for sample in data.skipped]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("cache", [None, "memory"])
def test_images_of_a_folder(ranks: Pools, size: int, cache: str | None) -> None:
    results = ranks(size).run(_images, cache, {"shuffle": True, "seed": 1})
    alone, _ = _images(MPI.COMM_SELF, cache, {"shuffle": True, "seed": 1})
    joined = [sorted(row for own in of_ranks for row in own) for of_ranks in zip(*(b for b, _ in results), strict=True)]
    assert joined == [sorted(batch) for batch in alone] and len(joined) == 10
    assert sorted(row for batch in joined for row in batch) == [row for row in range(60) if row not in BROKEN]
    for _, skipped in results:
        assert skipped == [f"'folder/{row}.jpg': the image is truncated" for row in BROKEN]


@pytest.mark.parametrize("remainder", ["drop", "pad"])
def test_tensors_are_the_arrays(damaged: Path, remainder: str) -> None:
    pytest.importorskip("tensorflow")
    data = open_dataset(damaged, comm=MPI.COMM_SELF, on_error="skip")
    with pytest.warns(UserWarning, match="are skipped"):
        tensors, arrays = data.tf_dataset(BATCH, remainder=remainder), list(data.batches(BATCH, remainder=remainder))
        found = list(tensors)
    rows = BATCH if remainder == "pad" else None
    assert {spec.shape[0] for spec in tensors.element_spec.values()} == {rows}
    assert int(tensors.cardinality()) == len(found) == len(arrays)
    for batch, expected in zip(found, arrays, strict=True):
        assert batch.keys() == expected.keys()
        assert all(np.array_equal(batch[name].numpy(), expected[name]) for name in batch)
    assert min(len(batch["id"]) for batch in arrays) == (BATCH if rows else 0)  # of one batch nothing is left


@pytest.mark.parametrize("pad", [False, True])
def test_rows_leave_their_steps(pad: bool) -> None:
    fields = {
        "x": Field("x", (), np.dtype("f4")),
        "image": Field("image", (), np.dtype("u1"), ragged=True, inner=(None, None)),
    }
    arrays = {name: field.empty(7) for name, field in fields.items()}
    arrays["x"][:] = np.arange(7)
    for row in range(7):
        arrays["image"][row] = np.full((1, row), row, "u1")
    padding = np.array([6]) if pad else NO_ROWS
    left = leave_out(LoadedWindow(arrays, np.array([3, 0, 4]), padding), np.array([4, 1, 3]), fields, pad)
    if pad:
        assert left.padding.tolist() == [1, 3, 4, 6] and left.sizes.tolist() == [3, 0, 4]
        assert left.arrays["x"].tolist() == [0, 0, 2, 0, 0, 5, 6]
        assert [image.shape for image in left.arrays["image"]] == [
            (1, 0),
            (0, 0),
            (1, 2),
            (0, 0),
            (0, 0),
            (1, 5),
            (1, 6),
        ]
    else:
        assert left.sizes.tolist() == [2, 0, 2] and not len(left.padding)
        assert left.arrays["x"].tolist() == [0, 2, 5, 6]
        assert [image.shape[1] for image in left.arrays["image"]] == [0, 2, 5, 6]


def test_errors_that_are_not_in_the_samples_are_raised(damaged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Chunked, "_decode_chunk", failing)
    with pytest.raises(OutOfMemory):
        _outcome(MPI.COMM_SELF, damaged, "skip")


def test_a_file_that_has_changed_is_refused(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "changed.h5"
    path.write_bytes(sound.read_bytes())
    batches = open_dataset(path, comm=MPI.COMM_SELF, on_error="skip").batches(BATCH)
    _truncate(path)
    with pytest.raises(DecodeError, match="shorter than when it was opened"):
        list(batches)


def _model() -> Any:
    import keras

    keras.backend.clear_session()
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [keras.Input((50,)), keras.layers.Rescaling(1 / ROWS), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def _fit(comm: MPI.Intracomm, path: Path, remainder: str) -> Any:
    from matex_data import training

    data = open_dataset(path, comm=comm, on_error="skip", inputs="x", targets="id")
    tensors = data.tf_dataset(BATCH, shuffle=True, seed=1, remainder=remainder)
    shapes = [spec.shape[0] for spec in tensors.element_spec]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = training.fit(model := _model(), tensors, epochs=2, verbose=0, comm=comm).history
    return history, model.get_weights(), int(tensors.cardinality()), shapes, data.profile.skipped


def _fit_by_keras(comm: MPI.Intracomm, path: Path, remainder: str) -> Any:
    """Train on the batches of the sound file without the damaged samples, by Keras alone."""
    import tensorflow as tf

    batches = open_dataset(path, comm=comm).batches(BATCH, shuffle=True, seed=1, remainder="keep")

    def epochs() -> Any:
        for _ in range(2):
            for batch in batches:
                good = ~np.isin(batch["id"], BAD)
                yield batch["x"][good], batch["id"][good]

    specs = tf.TensorSpec((None, 50), tf.float32), tf.TensorSpec((None,), tf.int64)
    model = _model()
    history = model.fit(
        tf.data.Dataset.from_generator(epochs, output_signature=specs), epochs=2, steps_per_epoch=42, verbose=0
    )
    return history.history, model.get_weights()


def test_two_ranks_train_as_one_process_without_the_damaged_samples(sound: Path, damaged: Path, ranks: Pools) -> None:
    ((expected, weights),) = ranks(1).run(_fit_by_keras, sound, "keep", timeout=120)
    results = ranks(2).run(_fit, damaged, "keep", timeout=120)
    for history, found, steps, shapes, _ in results:
        assert steps == 42 and shapes == [None, None]
        for a, b in zip(found, weights, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(history["loss"], expected["loss"], rtol=1e-4)
        np.testing.assert_allclose(history["mae"], expected["mae"], rtol=1e-4)
    assert sum(own for *_, own in results) == len(BAD)
