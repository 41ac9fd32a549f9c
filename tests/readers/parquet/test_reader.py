"""Parquet files: conformance suite, types, missing values, files of other writers, and error messages."""

from __future__ import annotations

import datetime
import gc
import json
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from mpi4py import MPI

from matex_data import DataError, FieldNotFound, FormatError, open_dataset
from matex_data.errors import DecodeError
from matex_data.fields import EPOCH
from matex_data.index.cache import ChunkCache
from matex_data.index.model import RowSelection
from matex_data.lru import LeastRecentlyUsed
from matex_data.readers.parquet import footer, reader
from tests.support.format_suite import Case, FormatSuite, same
from tests.support.ranks import Pools

ROWS = (150, 37, 1, 110)
GROUP = 16  # rows


def table(rows: int, first: int = 0) -> pa.Table:
    """Return rows of all kinds of fields."""
    rng = np.random.default_rng(first)
    count = rng.integers(0, 5, rows)
    pt = [rng.normal(size=n).astype("f4").tolist() for n in count]
    jets = [[{"eta": x, "charge": int(x > 0)} for x in row] for row in pt]
    columns = {
        "event": pa.array(np.arange(first, first + rows)),
        "energy": pa.array(rng.normal(size=rows)),
        "trigger": pa.array(rng.integers(0, 2, rows).astype(bool)),
        "name": pa.array([f"run {i}" * (i % 3) for i in range(rows)]),
        "species": pa.array(np.array(["Adelie", "Gentoo"])[rng.integers(0, 2, rows)]).dictionary_encode(),
        "position": pa.FixedSizeListArray.from_arrays(rng.normal(size=rows * 3).astype("f4"), 3),
        "image": pa.FixedShapeTensorArray.from_numpy_ndarray(rng.integers(0, 255, (rows, 2, 4), np.uint8)),
        "pt": pa.array(pt, pa.list_(pa.float32())),
        "jets": pa.array(jets, pa.list_(pa.struct({"eta": pa.float64(), "charge": pa.int8()}))),
        "vertex": pa.array([{"x": i, "y": i / 2} for i in range(rows)]),
    }
    return pa.table(columns)


def write(path: Path, content: pa.Table | dict[str, Any], group: int = GROUP, **options: Any) -> str:
    """Write a file with row groups of ``group`` rows."""
    content = pa.table(content) if isinstance(content, dict) else content
    pq.write_table(content, path, row_group_size=group, **options)
    return str(path)


def expected(content: pa.Table) -> dict[str, Any]:
    """Return the columns as pyarrow's own conversions give them."""
    plain = {name: content[name].to_numpy() for name in ("event", "energy", "trigger")}
    texts = {
        name: np.array([text.encode() for text in content[name].to_pylist()], object) for name in ("name", "species")
    }
    fixed = {
        "position": np.array(content["position"].to_pylist(), "f4"),
        "vertex.x": np.array([row["x"] for row in content["vertex"].to_pylist()]),
        "vertex.y": np.array([row["y"] for row in content["vertex"].to_pylist()]),
    }
    fixed["image"] = np.concatenate([chunk.to_numpy_ndarray() for chunk in content["image"].chunks])
    lists = {"pt": objects(content["pt"].to_pylist(), "f4")}
    for name, dtype in (("eta", "f8"), ("charge", "i1")):
        rows = [[jet[name] for jet in jets] for jets in content["jets"].to_pylist()]
        lists[f"jets.{name}"] = objects(rows, dtype)
    return plain | {name: np.array(rows, object) for name, rows in texts.items()} | fixed | lists


def objects(rows: list[Any], dtype: str) -> np.ndarray[Any, Any]:
    """Return an object array of lists as arrays."""
    return np.fromiter((np.array(row, dtype) for row in rows), object, len(rows))


class TestParquet(FormatSuite):
    def write(self, folder: Path) -> Case:
        first = np.cumsum((0, *ROWS[:-1])).tolist()
        contents = [table(rows, start) for rows, start in zip(ROWS, first, strict=True)]
        kinds = (
            {"compression": "zstd"},
            {"compression": "none", "use_dictionary": False},
            {"data_page_version": "2.0"},
            {},
        )
        paths = [
            write(folder / f"part{i}.parquet", content, **options)
            for i, (content, options) in enumerate(zip(contents, kinds, strict=True))
        ]
        return Case(paths, expected(pa.concat_tables(contents)), "event")

    def damage(self, folder: Path) -> Case:
        case = self.write(folder)
        column = pq.read_metadata(case.paths[0]).row_group(3).column(1)
        with Path(case.paths[0]).open("r+b") as file:
            file.seek(column.data_page_offset)
            file.write(bytes(8))
        return case


def read(path: str, **options: Any) -> dict[str, Any]:
    return open_dataset(path, comm=MPI.COMM_SELF, **options).load()


def test_only_the_columns_that_are_asked_for_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = write(tmp_path / "a.parquet", {name: rng.random(5000) for name in "abcdef"}, 500)
    data = open_dataset(path, inputs="b", targets="e", comm=MPI.COMM_SELF)
    for _ in data.batches(100):
        pass
    metadata = pq.read_metadata(path)
    chunks = [metadata.row_group(i).column(j).total_compressed_size for i in range(10) for j in (1, 4)]
    size = Path(path).stat().st_size
    assert data.profile.bytes == sum(chunks) < size / 2


def test_missing_values(tmp_path: Path) -> None:
    content = {
        "whole": pa.array([1, None, 3]),
        "flag": pa.array([True, None, False]),
        "real": pa.array([1.5, None, 2.5], pa.float32()),
        "text": pa.array(["a", None, "c"]),
        "time": pa.array([datetime.datetime(2020, 1, 1), None, datetime.datetime(2021, 1, 1)]),
        "full": pa.array([1, 2, 3]),
    }
    path = write(tmp_path / "a.parquet", content)
    found = read(path)
    same(found["whole"], np.array([1, np.nan, 3]))
    same(found["flag"], np.array([1, np.nan, 0]))
    same(found["real"], np.array([1.5, np.nan, 2.5], "f4"))
    assert found["text"].tolist() == [b"a", b"", b"c"]
    same(found["time"], np.array([1577836800.0, np.nan, 1609459200.0]))
    assert found["full"].dtype == np.int64
    kept = read(path, inputs=["whole", "text", "full"], missing="drop")
    assert kept["full"].tolist() == [1, 3]


def test_missing_values_that_no_statistics_count_are_an_error(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"x": pa.array([*range(20), None])}, write_statistics=False)
    with pytest.raises(DecodeError, match=r"a value is missing.*field 'x', row 20") as error:
        read(path)
    assert "dtype=" in str(error.value)
    same(read(path, dtype={"x": "float64"})["x"], np.array([*range(20), np.nan]))


def test_integers_that_float64_does_not_hold_are_an_error(tmp_path: Path) -> None:
    for rows in ([2**60 + 1, None], [1, None, *[3] * GROUP, 2**60 + 1]):
        path = write(tmp_path / "a.parquet", {"x": pa.array(rows)})
        with pytest.raises(DecodeError, match=f"not exact as float64.*field 'x', row {rows.index(2**60 + 1)}"):
            read(path)
    assert read(path, dtype={"x": "float32"})["x"][-1] == np.float32(2**60)


def test_lists_have_the_dtype_of_their_field(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"n": pa.array([[1, 2], []]), "b": pa.array([[True], [False, True]])})
    found = read(path, dtype={"n": "float32"})
    assert [row.dtype for name in "nb" for row in found[name]] == [np.float32] * 2 + [bool] * 2


NUMBERS: dict[str, tuple[list[Any], str, int]] = {  # rows, dtype, row that it does not hold
    "wide": ([7, 2**31 + 5], "int32", 1),
    "negative": ([7, -1], "uint64", 1),
    "unsigned": ([2**63 + 1, 7], "int64", 0),
    "fraction": ([1.0, 1.7], "int32", 1),
    "nan": ([1.0, float("nan")], "int32", 1),
    "infinite": ([float("inf")], "int64", 0),
    "truth": ([1, 0, 2], "bool", 2),
    "lists": ([[1, 2], [], [300]], "int8", 2),
    "deep": ([[[1], [2]], [[300]]], "int8", 1),
    "decimal": ([Decimal(2), Decimal(2**53 + 1)], "int64", 1),
    "time": ([datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 1, 0, 0, 0, 500_000)], "int64", 1),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_integers_on_request_are_exact(tmp_path: Path, name: str) -> None:
    rows, dtype, row = NUMBERS[name]
    path = write(tmp_path / "a.parquet", {"x": pa.array(rows, pa.uint64() if name == "unsigned" else None)})
    with pytest.raises(DecodeError, match=f"field 'x', row {row}.*\\n.*expected"):
        read(path, dtype={"x": dtype})
    assert len(read(path, dtype={"x": "float32"})["x"]) == len(rows)
    path = write(tmp_path / "b.parquet", {"x": pa.array([1.0, 0.0]), "y": pa.array([True, False])})
    same(read(path, inputs="*", dtype={"*": dtype})["x"], np.array([1, 0], dtype))
    same(read(path, inputs="*", dtype={"*": dtype})["y"], np.array([1, 0], dtype))


def test_dtypes_are_those_of_fields_columns_and_patterns(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.parquet", {"jet": pa.array([{"pt": 1.5, "n": 1}]), "x": pa.array([1]), "y": pa.array([2])}
    )

    def dtypes(requested: dict[str, str]) -> list[str]:
        return [values.dtype.str[1:] for values in read(path, dtype=requested).values()]

    assert dtypes({"jet.pt": "float32", "x": "int8"}) == ["f4", "i8", "i1", "i8"]
    assert dtypes({"*": "float64", "jet": "float32", "jet.n": "int16"}) == ["f4", "i2", "f8", "f8"]
    assert dtypes({"j*": "float32", "z*": "int8"}) == ["f4", "f4", "i8", "i8"]
    with pytest.raises(FieldNotFound, match=r"dtype= names a column.*'jet\.tp'(.|\n)*one of 'jet\.pt'"):
        read(path, dtype={"jet.tp": "float32"})
    later = write(tmp_path / "b.parquet", {"jet": pa.array([{"pt": 1.5, "n": 1}]), "z": pa.array([3])})
    assert open_dataset([later, path], inputs="jet.pt", dtype={"z": "int8"}, comm=MPI.COMM_SELF).load()
    found = open_dataset([path, later], inputs=["x", "z"], dtype={"[z]": "float32"}, comm=MPI.COMM_SELF).load()
    same(found["z"], np.array([np.nan, 3], np.float32))


@pytest.mark.parametrize(("kind", "count"), [(pa.int8(), 128), (pa.uint8(), 256)])
def test_dictionaries_may_have_all_entries_of_their_numbers(tmp_path: Path, kind: pa.DataType, count: int) -> None:
    texts = pa.DictionaryArray.from_arrays(
        pa.array([0, None, count - 1], kind), pa.array([f"c{i}" for i in range(count)])
    )
    path = write(tmp_path / "a.parquet", {"s": texts})
    assert read(path)["s"].tolist() == [b"c0", b"", b"c%d" % (count - 1)]


def test_decimals_with_many_places_are_correctly_rounded(tmp_path: Path) -> None:
    numbers = [Decimal("1.2345678901234e-20"), Decimal("7e-25"), None]
    path = write(tmp_path / "a.parquet", {"x": pa.array(numbers, pa.decimal128(38, 33))})
    same(read(path)["x"], np.array([1.2345678901234e-20, 7e-25, np.nan]))


def test_times_and_decimals(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 2, 29, 12, 30, 15, 250000)
    content = {
        **{unit: pa.array([moment], pa.timestamp(unit)) for unit in ("ms", "us", "ns")},
        "zoned": pa.array([moment], pa.timestamp("us", "Europe/Berlin")),
        "date": pa.array([moment.date()]),
        "day": pa.array([moment.time()], pa.time64("us")),
        "lapse": pa.array([datetime.timedelta(days=2, milliseconds=5)]),
        "price": pa.array([Decimal("12345.67")]),
        "small": pa.array([Decimal("-0.10")], pa.decimal128(15, 2)),
        "old": pa.array([moment], pa.timestamp("ns")),
    }
    path = write(tmp_path / "a.parquet", content)
    data = open_dataset(path, comm=MPI.COMM_SELF)
    found = {name: values[0] for name, values in data.load().items()}
    seconds = moment.replace(tzinfo=datetime.UTC).timestamp()
    assert all(found[name] == seconds for name in ("ms", "us", "ns", "zoned", "old"))
    assert found["date"] == seconds // 86400 * 86400
    assert found["day"] == 12 * 3600 + 30 * 60 + 15.25 and found["lapse"] == 172800.005
    assert found["price"] == 12345.67 and found["small"] == -0.1
    assert data.schema["us"].attributes["units"] == EPOCH and data.schema["lapse"].attributes["units"] == "seconds"


def test_deeper_lists_and_lists_of_texts(tmp_path: Path) -> None:
    rows = [[[1.0, 2.0], []], [], [[3.0]]]
    texts = [["a", "b"], [], ["c"]]
    path = write(tmp_path / "a.parquet", {"deep": pa.array(rows), "words": pa.array(texts)})
    found = read(path)
    assert [[inner.tolist() for inner in row] for row in found["deep"]] == rows
    batches = open_dataset(path, comm=MPI.COMM_SELF, inputs=["deep"]).batches(2, remainder="keep")
    assert [[inner.tolist() for inner in row] for batch in batches for row in batch["deep"]] == rows
    assert [[word.decode() for word in row] for row in found["words"]] == texts


def _loaded(comm: MPI.Intracomm, path: str) -> dict[str, list[Any]]:
    return {name: values.tolist() for name, values in open_dataset(path, comm=comm).load().items()}


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN", "RLE_DICTIONARY"])
def test_texts_in_all_encodings(tmp_path: Path, ranks: Pools, encoding: str) -> None:
    texts = [f"{'prefix' * 5}{i // 100}" for i in range(1000)]
    columns = {"text": pa.array(texts), "bytes": pa.array([b"%d" % (i % 10) for i in range(1000)])}
    columns["words"] = pa.array([texts[i : i + i % 3] for i in range(1000)])
    is_dictionary = encoding.endswith("DICTIONARY")
    chosen = dict.fromkeys(("text", "bytes", "words.list.element"), encoding)
    options: dict[str, Any] = {} if is_dictionary else {"use_dictionary": False, "column_encoding": chosen}
    path = write(tmp_path / "a.parquet", columns, 500, **options)
    stored = pq.read_metadata(path).row_group(0)
    assert all(encoding in stored.column(i).encodings for i in range(3))
    for size in (1, 3):
        by_rank = ranks(size).run(_loaded, path)
        for name in ("text", "bytes"):
            found = [value for part in by_rank for value in part[name]]
            assert found == columns[name].cast(pa.binary()).to_pylist()
        words = [[word.decode() for word in row] for part in by_rank for row in part["words"]]
        assert words == columns["words"].to_pylist()


def test_columns_of_one_name_are_left_out(tmp_path: Path) -> None:
    columns = [pa.array([1]), pa.array([{"b": 2, "c": 3}]), pa.array([4]), pa.array([5])]
    path = write(tmp_path / "a.parquet", pa.table(columns, names=["a.b", "a", "d", "d"]))
    with pytest.warns(UserWarning, match=r"'a\.b': several columns(.|\n)*'d': several columns"):
        assert {name: values.tolist() for name, values in read(path).items()} == {"a.c": [3]}


def test_lists_of_arrays(tmp_path: Path) -> None:
    kind = pa.list_(pa.list_(pa.float32(), 3))
    path = write(tmp_path / "a.parquet", {"hits": pa.array([[[1, 2, 3], [4, 5, 6]], []], kind)})
    data = open_dataset(path, comm=MPI.COMM_SELF)
    assert data.schema["hits"].sample_shape == (None, 3)
    found = data.load()["hits"]
    assert [row.tolist() for row in found] == [[[1, 2, 3], [4, 5, 6]], []]


def test_a_missing_element_of_a_list_names_its_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {"x": pa.array([*[[1, 2]] * 20, [3, None]])})
    with pytest.raises(DecodeError, match=r"a value is missing.*row 20") as error:
        read(path, dtype={"x": "int64"})
    assert error.value.field == "x"


class Array2D(pa.ExtensionType):  # type: ignore[misc]
    """Type that ``datasets`` registers with Arrow when it is imported."""

    def __init__(self, shape: Any = (3, 4), dtype: str = "float32") -> None:
        self.shape, self.dtype = shape, dtype
        super().__init__(pa.list_(pa.list_(pa.float32())), "datasets.features.features.Array2DExtensionType")

    def __arrow_ext_serialize__(self) -> bytes:
        return json.dumps((self.shape, self.dtype)).encode()

    @classmethod
    def __arrow_ext_deserialize__(cls, storage_type: Any, serialized: bytes) -> Array2D:
        return cls(*json.loads(serialized))


@pytest.fixture(params=[False, True], ids=["alone", "datasets is imported"])
def registered(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.param:
        pa.register_extension_type(Array2D())
    yield
    if request.param:
        pa.unregister_extension_type("datasets.features.features.Array2DExtensionType")


@pytest.mark.usefixtures("registered")
def test_what_hugging_face_stores(tmp_path: Path) -> None:
    """The storage and the metadata are those that ``datasets`` 2.19 writes for ``Array2D`` and ``ClassLabel``."""
    pixels = np.arange(24, dtype="f4").reshape(2, 3, 4)
    metadata = {
        "ARROW:extension:name": "datasets.features.features.Array2DExtensionType",
        "ARROW:extension:metadata": json.dumps([[3, 4], "float32"]),
    }
    info = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    schema = pa.schema(
        [
            pa.field("pixels", pa.list_(pa.list_(pa.float32())), metadata=metadata),
            pa.field("label", pa.int64()),
        ],
        metadata={"huggingface": json.dumps(info)},
    )
    content = pa.table([pa.array(pixels.tolist(), schema.field(0).type), pa.array([1, 0])], schema=schema)
    with pa.OSFile(str(tmp_path / "b.arrow"), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
        writer.write_table(content)
    for path in (write(tmp_path / "a.parquet", content), tmp_path / "b.arrow"):
        data = open_dataset(path, comm=MPI.COMM_SELF)
        assert data.schema["pixels"].shape == (3, 4)
        same(data.load()["pixels"], pixels)
        assert data.schema["label"].attributes["categories"] == ["cat", "dog"]


def test_files_are_closed_without_the_collector(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table(20))
    opened = []
    for _ in range(6):
        opened.append(len([*Path("/proc/self/fd").iterdir()]))
        read(path)
        gc.collect()  # a data set may be in a cycle
    assert opened[-1] <= opened[1]


def test_encrypted_columns(tmp_path: Path) -> None:
    from pyarrow.parquet import encryption

    class Keys(encryption.KmsClient):  # type: ignore[misc]
        def wrap_key(self, key: Any, master: Any) -> Any:
            return key

        def unwrap_key(self, key: Any, master: Any) -> Any:
            return key

    factory = encryption.CryptoFactory(lambda connection: Keys())
    chosen = encryption.EncryptionConfiguration(footer_key="f", column_keys={"c": ["a"]}, plaintext_footer=True)
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), chosen)
    content = pa.table({"a": [1, 2], "b": [3, 4]})
    with pq.ParquetWriter(tmp_path / "a.parquet", content.schema, encryption_properties=properties) as writer:
        writer.write_table(content)
    assert read(str(tmp_path / "a.parquet"), inputs="b")["b"].tolist() == [3, 4]
    with pytest.raises(FormatError, match="columns are encrypted"):
        read(str(tmp_path / "a.parquet"))


def test_a_frame_of_pandas(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"x": [1.0, 2.0], "kind": pandas.Categorical(["b", "a"]), "when": pandas.to_datetime(["2020-01-01", None])}
    )
    frame.to_parquet(tmp_path / "a.parquet")
    found = read(str(tmp_path / "a.parquet"))
    assert found["kind"].tolist() == [b"b", b"a"]
    same(found["when"], np.array([1577836800, np.nan]))


def test_names_and_patterns(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", table(20))
    assert list(read(path, inputs="jets.*")) == ["jets.eta", "jets.charge"]
    with pytest.raises(FieldNotFound, match="one of 'energy'"):
        read(path, inputs="enregy")


def test_empty_row_groups_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    with pq.ParquetWriter(path, pa.schema({"x": pa.int64()})) as writer:
        for rows in ([1, 2], [], [3]):
            writer.write_table(pa.table({"x": pa.array(rows, pa.int64())}))
    assert read(str(path))["x"].tolist() == [1, 2, 3]


@pytest.mark.parametrize("writer", [b"parquet-mr", b"parquet-mr version 1.2.8", b"parquet-mr version 1.6.0"])
def test_headers_that_old_writers_did_not_count_are_read(tmp_path: Path, writer: bytes) -> None:
    """pyarrow reads 100 bytes more of the column chunks of parquet-mr before 1.2.9: PARQUET-816."""
    path, table = tmp_path / "x.parquet", pa.table({"a": [1.5, 2.5], "b": [b"one", b"two"], "c": [3, 4]})
    pq.write_table(table, path)
    ours = pq.ParquetFile(path).metadata.created_by.encode()
    path.write_bytes(path.read_bytes().replace(ours, writer.ljust(len(ours))))
    for names in (["a"], ["c", "b"]):
        found = open_dataset(str(path), inputs=names, comm=MPI.COMM_SELF).load()
        for name in names:
            assert [*found[name]] == table[name].to_pylist()


def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.parquet", table(20)))
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(FormatError, match="no footer of Parquet"):
        read(str(path))


def test_a_file_that_changes_behind_its_size_is_noticed(tmp_path: Path) -> None:
    """Rows of the same size are written to a file that is open: its old footer does not describe them."""
    path = Path(write(tmp_path / "a.parquet", {"x": np.arange(100)}, use_dictionary=False, compression="none"))
    found, _ = footer.read_footer(str(path))
    assert found.metadata().num_rows == 100
    footer._footers.clear()
    write(path, {"y": np.arange(100, 200)}, use_dictionary=False, compression="none")
    with pytest.raises(DecodeError, match="has changed"):
        found.metadata()


def test_footers_are_kept_and_indexes_are_small(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", {f"c{i}": np.arange(100) for i in range(200)}, 50)
    data = open_dataset(path, inputs="c3", comm=MPI.COMM_SELF)
    assert len(pickle.dumps(data._source.index)) < 3000 < pq.read_metadata(path).serialized_size


def test_checksums_of_pages_are_compared(tmp_path: Path) -> None:
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False}
    path = Path(write(tmp_path / "a.parquet", {"x": np.arange(1000)}, **options))
    data = bytearray(path.read_bytes())
    data[4000] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match="block of rows does not decode"):
        read(str(path))


def test_decoded_rows_do_not_share_the_memory_that_was_read(tmp_path: Path) -> None:
    """Pages without compression could be views of it, and it is used again."""
    content = table(40).append_column("fixed", pa.array([bytes(8)] * 40, pa.binary(8)))
    path = write(tmp_path / "a.parquet", content, 40, compression="none", use_dictionary=False)
    index = reader.index(path).index()
    layouts = index.files[0].layouts
    stored = np.fromfile(path, np.uint8)
    outs = [(name, field.empty(40)) for name, field in index.fields.items()]
    cache = ChunkCache(1 << 20)
    request_of_a_part = RowSelection(np.array([0]), np.array([20]), np.arange(20))
    for request in layouts["event"].table.requests(request_of_a_part, outs, cache):
        scratch = np.concatenate([stored[o : o + n] for o, n in zip(request.offset, request.nbytes, strict=True)])
        request.on_complete(scratch)
        scratch[:] = 255
    rest = RowSelection(np.array([20]), np.array([40]), np.arange(20, 40))
    for request in layouts["event"].table.requests(rest, outs, cache):
        assert not len(request.offset)  # the block is in the cache
        request.on_complete(np.empty(0, np.uint8))
    wanted = expected(content)
    for name, out in outs:
        same(out, wanted[name] if name != "fixed" else np.array([bytes(8)] * 40, object))


def test_footers_are_kept_whatever_threads_ask_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footer, "_footers", LeastRecentlyUsed[Any](2))
    found = [footer.read_footer(write(tmp_path / f"{i}.parquet", {"x": np.arange(i + 1)}))[0] for i in range(5)]

    def ask(thread: int) -> bool:
        order = np.random.default_rng(thread).integers(0, 5, 200).tolist()
        return all(found[i].metadata().num_rows == i + 1 for i in order)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(8)))
    assert footer._footers.used <= 2
