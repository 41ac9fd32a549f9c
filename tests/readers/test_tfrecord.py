"""TFRecord files of ``tf.train.Example``: conformance suite, shapes, and errors; values by TensorFlow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from mpi4py import MPI

from matex_data import DataError, FieldNotFound, FormatError, open_dataset
from matex_data.readers import tfrecord
from tests.support.format_suite import Case, FormatSuite, same

ROWS = (150, 37, 1, 110)
SPEC = {
    "event": tf.io.FixedLenFeature((), tf.int64),
    "image": tf.io.FixedLenFeature((6,), tf.float32),
    "name": tf.io.FixedLenFeature((), tf.string),
    "pt": tf.io.RaggedFeature(tf.float32),
}


def write(path: Path, rows: int, first: int = 0) -> str:
    """Write records of all kinds of features."""
    rng = np.random.default_rng(first)
    with tf.io.TFRecordWriter(str(path)) as file:
        for i in range(first, first + rows):
            feature = {
                "event": tf.train.Feature(int64_list=tf.train.Int64List(value=[i])),
                "image": tf.train.Feature(float_list=tf.train.FloatList(value=rng.normal(size=6))),
                "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[f"é{i}".encode()])),
                "pt": tf.train.Feature(float_list=tf.train.FloatList(value=rng.normal(size=i % 4))),
            }
            file.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    return str(path)


def expected(paths: list[str]) -> dict[str, Any]:
    """Return the features as TensorFlow parses them."""
    parsed = tf.io.parse_example([record.numpy() for record in tf.data.TFRecordDataset(paths)], SPEC)
    found = {name: parsed[name].numpy() for name in ("event", "image", "name")}
    pt = parsed["pt"]
    lists = [pt.values.numpy()[a:b] for a, b in zip(pt.row_starts().numpy(), pt.row_limits().numpy(), strict=True)]
    return {**found, "pt": np.fromiter(lists, object, len(lists))}


class TestTfRecord(FormatSuite):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def small_blocks(cls) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tfrecord, "BLOCK_BYTES", 2000)
            yield

    def write(self, folder: Path) -> Case:
        first = np.cumsum((0, *ROWS[:-1])).tolist()
        paths = [
            write(folder / f"part{i}.tfrecord", rows, at) for i, (rows, at) in enumerate(zip(ROWS, first, strict=True))
        ]
        return Case(paths, expected(paths), "event", {"shapes": {"pt": None}})

    def damage(self, folder: Path) -> Case:
        case = self.write(folder)
        path = Path(case.paths[0])
        data = bytearray(path.read_bytes())
        data[len(data) // 2 : len(data) // 2 + 3] = b"\xff\xfe\xff"
        path.write_bytes(data)
        return case


def load(path: Any, **options: Any) -> dict[str, Any]:
    """Return all rows by matex_data."""
    return open_dataset(path, comm=MPI.COMM_SELF, **options).load()


def test_shapes(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tfrecord", 40)
    wanted = expected([path])
    found = load(path, shapes={"image": (2, 3), "event": (1,)})
    same(found["image"], wanted["image"].reshape(-1, 2, 3))
    same(found["event"], wanted["event"][:, None])
    same(found["pt"], wanted["pt"])
    with pytest.raises(DataError, match="another number of values"):
        load(path, shapes={"pt": (3,)})


def test_errors(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.tfrecord", 40))
    with pytest.raises(FieldNotFound, match="evnt"):
        load(path, inputs="evnt")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(FormatError, match="truncated"):
        load(path)
    with tf.io.TFRecordWriter(str(path)) as file:
        file.write(b"no example")
    with pytest.raises(DataError, match=r"no features|does not decode"):
        load(path)
