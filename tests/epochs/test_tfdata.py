"""``tf_dataset`` equals ``batches``, for every kind of field, in every mode of TensorFlow."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path
from typing import Any
from weakref import ref

import h5py
import numpy as np
import pytest

from matex_data import Dataset, open_dataset

tf = pytest.importorskip("tensorflow")

ROWS, BATCH = 53, 8
TIMEOUT = 20.0  # seconds


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path, rng, numbers = tmp_path_factory.mktemp("tfdata") / "x.h5", np.random.default_rng(0), np.arange(ROWS)
    with h5py.File(path, "w") as file:
        file["image"] = rng.normal(size=(ROWS, 3, 2)).astype("f4")
        file["half"], file["complex"] = numbers.astype("f2"), (numbers * 1j).astype("c8")
        file["big"], file["large"], file["flag"] = numbers.astype(">i2"), numbers.astype("u8"), numbers % 2 == 0
        file["text"] = np.array([f"é{i}".encode() for i in numbers], object)
        file["fixed"] = np.array([b"ab", b"c"] * (ROWS // 2) + [b""], "S5")
        file["empty"] = np.zeros((ROWS, 0), "f4")
        ragged = file.create_dataset("ragged", (ROWS,), h5py.vlen_dtype("i4"))
        for i in numbers:
            ragged[i] = np.arange(i % 4) + i
    return open_dataset(str(path))


def _lists(batch: Any) -> dict[str, list[Any]]:
    """Return each field as lists, of tensors or of arrays."""
    lists = {name: value.to_list() for name, value in batch.items() if isinstance(value, tf.RaggedTensor)}
    rest = {name: value for name, value in batch.items() if name not in lists}
    arrays = {name: value.numpy() if tf.is_tensor(value) else value for name, value in rest.items()}
    return lists | {
        name: [row.tolist() for row in value] if name == "ragged" else value.tolist() for name, value in arrays.items()
    }


@pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
def test_every_kind_of_field_in_every_epoch(data: Dataset, remainder: str) -> None:
    options = {"shuffle": True, "seed": 1, "remainder": remainder}
    tensors, arrays = data.tf_dataset(BATCH, **options), data.batches(BATCH, **options)
    assert int(tensors.cardinality()) == len(arrays)
    for _ in range(2):
        for found, expected in zip(tensors, arrays, strict=True):
            assert _lists(found) == _lists(expected)
            for name, spec in tensors.element_spec.items():
                assert found[name].dtype == spec.dtype and spec.shape.is_compatible_with(found[name].shape)


def test_padding_of_a_ragged_field_has_no_elements(data: Dataset) -> None:
    *_, last = data.batches(BATCH, remainder="pad")
    assert [len(row) for row in last["ragged"][ROWS % BATCH :]] == [0] * (BATCH - ROWS % BATCH)


def test_in_a_graph_with_other_transforms(data: Dataset) -> None:
    batches = data.tf_dataset(BATCH, shuffle=True, seed=1, remainder="keep")

    @tf.function
    def total(batches: Any) -> Any:
        return batches.reduce(tf.constant(0, tf.int64), lambda sum_, batch: sum_ + tf.reduce_sum(batch["ragged"]))

    assert int(total(batches.map(lambda batch: {"ragged": tf.cast(batch["ragged"], tf.int64)}))) == sum(
        sum(range(i, i + i % 4)) for i in range(ROWS)
    )


def test_a_session_of_tensorflow_1(data: Dataset) -> None:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        iterator = tf.compat.v1.data.make_initializable_iterator(data.tf_dataset(BATCH))
        batch = iterator.get_next()
        for _ in range(2):
            session.run(iterator.initializer)
            for begin in range(0, ROWS - BATCH + 1, BATCH):
                assert session.run(batch["large"]).tolist() == list(range(begin, begin + BATCH))
            with pytest.raises(tf.errors.OutOfRangeError):
                session.run(batch["large"])


def test_a_deleted_iterator_ends_its_epoch(data: Dataset) -> None:
    def reading() -> int:
        return sum(thread.name == "matex-read" for thread in threading.enumerate())

    before, iterator = reading(), iter(data.tf_dataset(BATCH))  # the data set itself is already collected
    gc.collect()
    assert next(iterator)["large"].numpy().tolist() == list(range(BATCH))
    del iterator
    gc.collect()
    deadline = time.monotonic() + TIMEOUT
    while reading() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert reading() <= before


def test_a_deleted_data_set_frees_what_it_keeps_in_memory(data: Dataset) -> None:
    made = data.tf_dataset(BATCH, shuffle=True, seed=1)
    kept, mapped = ref(made.matex_batches), made.map(lambda *batch: batch)
    del made
    for _ in range(2):
        assert len(list(mapped)) == len(kept())
    del mapped
    gc.collect()
    assert kept() is None


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as file:
        file["x"] = np.zeros((64, 100), "f4")
    batches = open_dataset(str(path)).tf_dataset(BATCH)
    with path.open("r+b") as raw:
        raw.truncate(4096)
    with pytest.raises(tf.errors.OpError, match=r"x\.h5"):
        list(batches)
