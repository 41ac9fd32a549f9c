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
from tests.support.ranks import Pool

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
        return Case(paths, expected(paths), "event")  # pt has one length in a file of one record

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
    same(load(path, inputs="image", shapes={"image": (-1, 3)})["image"], wanted["image"].reshape(-1, 2, 3))
    with pytest.raises(DataError, match="another number of values"):
        load(path, shapes={"pt": (3,)})
    for shapes in ({"image": (-1, 4)}, {"image": (-1, -1)}, {"image": (-2, -3)}, {"pt": (-1,)}):
        with pytest.raises(FormatError, match="a feature has no such shape"):
            load(path, shapes=shapes)
    same(load(path, inputs="image", shapes={"im*": (2, 3), "x*": None})["image"], found["image"])
    with pytest.raises(FieldNotFound, match=r"shapes= names a feature.*'imgae'(.|\n)*one of 'image'"):
        load(path, shapes={"imgae": (2, 3)})


@pytest.mark.parametrize(
    ("first", "other", "wanted"),
    [
        ([[2.0], []], [[7.0], [8.0]], [[2.0], [], [7.0], [8.0]]),
        ([[7.0], [8.0]], [[], [2.0]], [[7.0], [8.0], [], [2.0]]),
        ([[1.0, 2.0]], [[3.0]], [[1.0, 2.0], [3.0]]),
        ([[b"a", b"b"]], [[b"c"], [b"d"]], [[b"a", b"b"], [b"c"], [b"d"]]),
    ],
)
def test_files_that_differ_in_the_length_of_a_feature(tmp_path: Path, first: Any, other: Any, wanted: Any) -> None:
    for name, rows in (("a", first), ("b", other)):
        with tf.io.TFRecordWriter(str(tmp_path / f"{name}.tfrecord")) as file:
            for row in rows:
                feature = {"n": _ints(3), "x": _floats(*row) if row and isinstance(row[0], float) else _bytes(*row)}
                if not row:
                    del feature["x"]
                file.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    found = load(tmp_path)
    assert [list(row) for row in found["x"]] == wanted and found["n"].tolist() == [3] * len(wanted)


def _bytes(*values: bytes) -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def _ints(*values: int) -> tf.train.Feature:
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def _floats(*values: float) -> tf.train.Feature:
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


@pytest.mark.parametrize("empty", [0, 1, 299])
def test_a_feature_without_values_and_without_a_kind(tmp_path: Path, empty: int) -> None:
    path = tmp_path / "data_tfrecord-00000-of-00001.gz"  # as TensorFlow Extended writes it
    with tf.io.TFRecordWriter(str(path), options="GZIP") as file:
        for i in range(300):
            features = {"fare": tf.train.Feature() if i == empty else _floats(i), "tract": tf.train.Feature()}
            file.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())
    wanted = [[] if i == empty else [i] for i in range(300)]
    with pytest.warns(UserWarning, match="'tract': no record that was looked at has values"):
        found = load(tmp_path)
    assert list(found) == ["fare"] and [row.tolist() for row in found["fare"]] == wanted


def write_sequences(path: Path, rows: int, options: str = "") -> str:
    """Write records of lists of features: words, points of one size, lists of different lengths, and pictures."""
    with tf.io.TFRecordWriter(str(path), options=options) as file:
        for i in range(rows):
            lists = {
                "word": [_ints(i * j) for j in range(i % 5)],
                "point": [_floats(i, j / 4, 2) for j in range(i % 3)],
                "uneven": [_ints(*range(j)) for j in range(i % 4)],
                "frame": [
                    tf.train.Feature(bytes_list=tf.train.BytesList(value=[f"{i}.{j}".encode()])) for j in range(i % 3)
                ],
            }
            of_lists = {name: tf.train.FeatureList(feature=features) for name, features in lists.items()}
            example = tf.train.SequenceExample(
                context=tf.train.Features(feature={"event": _ints(i), "label": _floats(i / 2)}),
                feature_lists=tf.train.FeatureLists(feature_list=of_lists),
            )
            file.write(example.SerializeToString())
    return str(path)


def _all(comm: MPI.Intracomm, path: str) -> list[dict[str, Any]]:
    return comm.allgather(open_dataset(path, comm=comm).load())


@pytest.mark.parametrize("options", ["", "GZIP"])
def test_sequences(tmp_path: Path, pool: Pool, options: str) -> None:
    path = write_sequences(tmp_path / "a.tfrecord", 60, options)
    parts = pool.run(_all, path)[0]
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    assert set(found) == {"event", "label", "word", "point", "uneven", "frame"}
    spec = {
        "word": tf.io.FixedLenSequenceFeature((), tf.int64),
        "point": tf.io.FixedLenSequenceFeature((3,), tf.float32),
        "uneven": tf.io.RaggedFeature(tf.int64),
        "frame": tf.io.FixedLenSequenceFeature((), tf.string),
    }
    records = [record.numpy() for record in tf.data.TFRecordDataset(path, compression_type=options)]
    for i, record in enumerate(records):
        context, lists = tf.io.parse_single_sequence_example(
            record, {"event": tf.io.FixedLenFeature((), tf.int64), "label": tf.io.FixedLenFeature((), tf.float32)}, spec
        )
        assert (found["event"][i], found["label"][i]) == (context["event"], context["label"])
        for name in ("word", "point", "frame"):
            assert found[name][i].tolist() == lists[name].numpy().tolist(), name
        assert [one.tolist() for one in found["uneven"][i]] == lists["uneven"].to_list()
    (batch,) = open_dataset(path, comm=MPI.COMM_SELF, inputs=["uneven"]).batches(60)
    assert [[one.tolist() for one in row] for row in batch["uneven"]] == [
        [one.tolist() for one in row] for row in found["uneven"]
    ]


@pytest.mark.parametrize("row", [7, 3000])
def test_a_feature_of_another_type(tmp_path: Path, row: int) -> None:
    """One record has floats where the others have integers, among the records that are looked at, and behind them."""
    path = tmp_path / "a.tfrecord"
    with tf.io.TFRecordWriter(str(path)) as file:
        for i in range(5000):
            feature = {"x": _floats(0.5) if i == row else _ints(i), "y": _ints() if i in (0, 9) else _floats(i)}
            file.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())
    with pytest.raises(DataError, match=r"another type(.|\n)*int64_list(.|\n)*float_list") as caught:
        load(path)
    assert (caught.value.file, caught.value.field, caught.value.row) == (str(path), "x", row)


def test_damaged_files_of_gzip(tmp_path: Path) -> None:
    path = Path(write_sequences(tmp_path / "a.tfrecord", 60, "GZIP"))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=r"does not unpack(.|\n)*gzip"):
        load(path)


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
