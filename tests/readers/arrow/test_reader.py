"""Arrow IPC files and streams: conformance suite, dictionaries, byte ranges, damage, and partitioned folders."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flatbuffers.table
import numpy as np
import pyarrow as pa
import pyarrow.dataset
import pyarrow.feather
import pytest
from mpi4py import MPI

from matex_data import DataError, FieldNotFound, FormatError, open_dataset
from matex_data.errors import DecodeError
from matex_data.io.counters import process_profile
from matex_data.readers import detect
from tests.readers.parquet.test_reader import GROUP, ROWS, expected, read, table
from tests.readers.parquet.test_reader import write as write_parquet
from tests.support.format_suite import Case, FormatSuite, same
from tests.support.ranks import Pools


def write(path: Path, content: pa.Table, stream: bool = False, batch: int = GROUP, **options: Any) -> str:
    """Write record batches of ``batch`` rows as a file, or as a stream."""
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(str(path), content.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(content, max_chunksize=batch)
    return str(path)


BLOCK = struct.Struct("<qi4xq")  # offset, length of the metadata, length of the body


def blocks(content: bytes) -> tuple[int, list[int], list[int]]:
    """Return the first byte of the footer of a file, and where it lists dictionaries and record batches."""
    begin = len(content) - 10 - int.from_bytes(content[-10:-6], "little")
    footer = flatbuffers.table.Table(content, begin + int.from_bytes(content[begin : begin + 4], "little"))
    vectors = [footer.Offset(8), footer.Offset(10)]
    listed = [[footer.Vector(v) + BLOCK.size * i for i in range(footer.VectorLen(v))] if v else [] for v in vectors]
    return begin, listed[0], listed[1]


def as_polars(path: str) -> str:
    """Write a file again as polars lays it out: a schema without its length, and dictionaries behind the batches.

    The last dictionary comes first: the order is that of the footer.
    """
    content = Path(path).read_bytes()
    begin, dictionaries, batches = blocks(content)
    schema_end = 16 + int.from_bytes(content[12:16], "little")
    moved, footer = bytearray(content[:8] + content[16:schema_end]), bytearray(content[begin:])
    for entry in (*batches, *reversed(dictionaries)):
        offset, head_bytes, body_bytes = BLOCK.unpack_from(content, entry)
        BLOCK.pack_into(footer, entry - begin, len(moved), head_bytes, body_bytes)
        moved += content[offset : offset + head_bytes + body_bytes]
    Path(path).write_bytes(moved + footer)
    return path


class TestArrow(FormatSuite):
    def write(self, folder: Path) -> Case:
        first = np.cumsum((0, *ROWS[:-1])).tolist()
        contents = [table(rows, start) for rows, start in zip(ROWS, first, strict=True)]
        paths = [
            as_polars(write(folder / "part0.arrow", contents[0])),
            write(folder / "part1.arrow", contents[1], stream=True),
            write(folder / "part2.arrow", contents[2], compression="lz4"),
            str(folder / "part3.arrow"),
        ]
        pa.feather.write_feather(contents[3], paths[3], compression="zstd", chunksize=GROUP)
        return Case(paths, expected(pa.concat_tables(contents)), "event")

    def damage(self, folder: Path) -> Case:
        content = table(100)
        path = write(folder / "part.arrow", content, compression="zstd")
        data = bytearray(Path(path).read_bytes())
        middle = len(data) // 2
        data[middle : middle + 2000] = bytes(2000)
        Path(path).write_bytes(data)
        return Case(path, {}, "event")


def test_streams_are_told_by_content(tmp_path: Path) -> None:
    for stream in (False, True):
        path = Path(write(tmp_path / "rows", table(40), stream))
        assert detect(str(path), path.read_bytes()) == "arrow"
        same(read(str(path))["event"], np.arange(40))


def test_only_the_columns_that_are_asked_for_are_read(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    content = pa.table({name: rng.random(5000) for name in "abcdef"})
    path = write(tmp_path / "a.arrow", content, batch=500)
    data = open_dataset(path, inputs="b", targets="e", comm=MPI.COMM_SELF)
    for x, y in data.batches(500, shuffle=True, seed=1):
        rows = np.searchsorted(np.sort(content["b"]), x)
        same(content["e"].to_numpy()[np.argsort(content["b"].to_numpy())[rows]], y)
    assert 80_000 <= data.profile.bytes < 90_000  # two columns, and the metadata of ten batches


@pytest.mark.parametrize("stream", [False, True])
def test_dictionaries_that_grow_and_that_are_replaced(tmp_path: Path, stream: bool) -> None:
    kind = pa.dictionary(pa.int32(), pa.string())
    chunks = [["a", "b", "a"], ["a", "b", "c"], ["c", "a", "d"]] if not stream else [["a", "b"], ["x"], ["y", "x", "z"]]
    arrays = []
    for number, texts in enumerate(chunks):
        values = ["a", "b", "c", "d"][: 2 + number] if not stream else sorted(set(texts))
        codes = pa.array([values.index(text) for text in texts], pa.int32())
        arrays.append(pa.DictionaryArray.from_arrays(codes, pa.array(values)))
    content = pa.table({"text": pa.chunked_array(arrays, kind), "n": pa.chunked_array([range(len(c)) for c in chunks])})
    path = write(tmp_path / "a.arrow", content, stream, emit_dictionary_deltas=not stream)
    reader = pa.ipc.open_stream(path) if stream else pa.ipc.open_file(path)
    assert reader.read_all()["text"].to_pylist() == sum(chunks, [])  # noqa: RUF017
    assert [text.decode() for text in read(path)["text"]] == sum(chunks, [])  # noqa: RUF017
    data = open_dataset(path, inputs="text", comm=MPI.COMM_SELF)
    found = [text.decode() for batch in data.batches(2, shuffle=True, seed=3, remainder="keep") for text in batch]
    assert sorted(found) == sorted(sum(chunks, []))  # noqa: RUF017


def test_a_dictionary_that_is_written_anew(tmp_path: Path) -> None:
    for words in (["one", "two"], ["six", "ten"]):
        codes = pa.array([0, 1, 1], pa.int32())
        path = write(tmp_path / "a.arrow", pa.table({"x": pa.DictionaryArray.from_arrays(codes, pa.array(words))}))
        found = open_dataset(path, comm=MPI.COMM_SELF).load()["x"].tolist()
        assert found == [words[code].encode() for code in (0, 1, 1)]


def test_types_and_missing_values(tmp_path: Path) -> None:
    content = pa.table(
        {
            "whole": pa.array([1, None, 3]),
            "real": pa.array([1.5, None, 2.5], pa.float32()),
            "text": pa.array(["a", None, "c"]),
            "viewed": pa.array(["short", None, "much longer than a view holds" * 3], pa.string_view()),
            "large": pa.array([[1], None, [2, 3]], pa.large_list(pa.int16())),
            "gaps": pa.array([[1, None], None, [3]]),
            "inner": pa.array([{"a": 1, "b": [1.0]}, {"a": None, "b": []}, {"a": 3, "b": [2.0, 3.0]}]),
            "full": pa.array([7, 8, 9]),
        }
    )
    path = write(tmp_path / "a.arrow", content, batch=2)
    data = read(path)
    same(data["whole"], content["whole"].to_numpy())
    same(data["real"], content["real"].to_numpy())
    same(data["inner.a"], np.array([1, np.nan, 3]))
    assert data["full"].dtype == np.int64 and data["full"].tolist() == [7, 8, 9]
    assert data["text"].tolist() == [b"a", b"", b"c"] and data["viewed"][2] == b"much longer than a view holds" * 3
    assert [row.tolist() for row in data["large"]] == [[1], [], [2, 3]] and data["large"][0].dtype == np.int16
    assert [repr(row.tolist()) for row in data["gaps"]] == ["[1.0, nan]", "[]", "[3.0]"]
    assert read(path, inputs="inner.b", dtype={"inner": "float32"})["inner.b"][0].dtype == np.float32
    assert [row.tolist() for row in read(path, inputs="inner.b")["inner.b"]] == [[1.0], [], [2.0, 3.0]]


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_rows_that_a_batch_cannot_hold(tmp_path: Path, compression: str | None) -> None:
    path = Path(write(tmp_path / "a.arrow", pa.table({"x": np.zeros(123_457)}), batch=1 << 20, compression=compression))
    assert len(read(str(path))["x"]) == 123_457
    content = path.read_bytes()
    rows, claimed = ((count).to_bytes(8, "little") for count in (123_457, 1 << 50))
    assert rows in content
    path.write_bytes(content.replace(rows, claimed))
    with pytest.raises(FormatError, match="does not have the rows that it claims"):
        read(str(path))


def test_broken_files(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.arrow", table(40)))
    content = path.read_bytes()
    for length in (len(content) - 20, len(content) // 2, 300, 20):
        path.write_bytes(content[:length])
        with pytest.raises(FormatError, match=r"truncated|damaged"):
            read(str(path))
    with pytest.raises(FieldNotFound, match="'energy'"):
        path.write_bytes(content)
        read(str(path), inputs="enrgy")
    (tmp_path / "b.feather").write_bytes(b"FEA1" + bytes(100))
    with pytest.raises(FormatError, match=r'version 1(.|\n)*write_feather\(pandas.read_feather\("b.feather"\)'):
        read(str(tmp_path / "b.feather"))


@pytest.mark.parametrize("name", ["energies", "member of one"])
def test_names_that_are_no_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.arrow"
    write(path, pa.table({"energies": [1.0], "outer": [{"member of one": 2}]}))
    damaged = name.encode()[:-1] + b"\xff"
    path.write_bytes(path.read_bytes().replace(name.encode(), damaged))
    with pytest.raises(FormatError, match=r"a name in the file is no text \(file .*x\.arrow(.|\n)*UTF-8"):
        open_dataset(path, comm=MPI.COMM_SELF)


def _texts(comm: MPI.Intracomm, path: str) -> list[str]:
    return [text.decode() for text in open_dataset(path, comm=comm).load()["text"]]


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("layout", [str, as_polars])
def test_files_are_read_by_their_footer(
    tmp_path: Path, ranks: Pools, layout: Callable[[str], str], compression: str | None
) -> None:
    values = ["a", "b", "c", "d", "e"]
    grown = [
        pa.DictionaryArray.from_arrays(pa.array([n, 0, n], pa.int8()), pa.array(values[: n + 1])) for n in range(5)
    ]
    content = pa.table({"n": pa.array(range(15)).dictionary_encode(), "text": pa.chunked_array(grown)})
    options = {"compression": compression, "emit_dictionary_deltas": True}
    path = layout(write(tmp_path / "a.arrow", content.replace_schema_metadata({"by": "a test"}), batch=3, **options))
    assert pa.ipc.open_file(path).read_all()["text"].to_pylist() == content["text"].to_pylist()
    for size in (1, 3):
        by_rank = ranks(size).run(_texts, path)
        assert [text for texts in by_rank for text in texts] == content["text"].to_pylist()


@pytest.mark.parametrize("layout", [str, as_polars])
def test_files_without_rows_and_of_earlier_versions(tmp_path: Path, layout: Callable[[str], str]) -> None:
    content = pa.table({"x": [1, 2, 3], "text": pa.array(["a", "b", "a"]).dictionary_encode()})
    assert len(open_dataset(layout(write(tmp_path / "none.arrow", content[:0])), comm=MPI.COMM_SELF)) == 0
    path = write(tmp_path / "old.arrow", content, use_legacy_format=True, metadata_version=pa.ipc.MetadataVersion.V4)
    assert read(path)["text"].tolist() == [b"a", b"b", b"a"]


OTHERS = {
    "outside": lambda offset, head, body: (1 << 62, head, body),
    "in front": lambda offset, head, body: (0, head, body),
    "negative": lambda offset, head, body: (-offset, head, body),
    "no metadata": lambda offset, head, body: (offset, 0, body),
    "negative metadata": lambda offset, head, body: (offset, -8, body),
    "longer metadata": lambda offset, head, body: (offset, head + 8, body - 8),
    "huge body": lambda offset, head, body: (offset, head, (1 << 63) - 1),
    "negative body": lambda offset, head, body: (offset, head, -1),
    "shorter body": lambda offset, head, body: (offset, head, body - 8),
    "between messages": lambda offset, head, body: (offset + 8, head, body - 8),
}


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("other", OTHERS)
def test_footers_that_list_other_messages(tmp_path: Path, other: str, kind: int) -> None:
    path = Path(write(tmp_path / "a.arrow", table(40)))
    content = bytearray(path.read_bytes())
    entry = blocks(content)[kind][0]
    BLOCK.pack_into(content, entry, *OTHERS[other](*BLOCK.unpack_from(content, entry)))
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"footer|damaged"):
        read(str(path))


def test_footers_that_list_a_message_twice_or_none(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.arrow", table(40)))
    content = bytearray(path.read_bytes())
    _, _, (first, second, *_) = blocks(content)
    BLOCK.pack_into(content, second, *BLOCK.unpack_from(content, first))
    path.write_bytes(content)
    with pytest.raises(FormatError, match=r"the footer is damaged(.|\n)*one behind the other"):
        read(str(path))
    struct.pack_into("<I", content, first - 4, 0xFFFFFFFF)
    path.write_bytes(content)
    with pytest.raises(FormatError, match="the footer is damaged"):
        read(str(path))


@pytest.mark.parametrize("length", [-1, 0, 1, 6, 1 << 30, (1 << 31) - 1])
def test_lengths_of_footers(tmp_path: Path, length: int) -> None:
    path = Path(write(tmp_path / "a.arrow", table(40)))
    content = bytearray(path.read_bytes())
    struct.pack_into("<i", content, len(content) - 10, length)
    path.write_bytes(content)
    with pytest.raises(FormatError, match="footer"):
        read(str(path))


def test_no_bit_of_a_footer_changes_what_is_read(tmp_path: Path) -> None:
    """Neither columns nor types, nor batches that it no longer lists."""
    times = pa.array([1, 2], pa.timestamp("us"))
    path = write(tmp_path / "a.arrow", pa.table({"s": pa.array(["a", "b"]), "x": pa.array([1, -2]), "t": times}))
    content, wanted = bytearray(Path(path).read_bytes()), open_dataset(path, comm=MPI.COMM_SELF).load()
    end = len(content) - 10
    refused = 0
    for bit in range(8 * (end - int.from_bytes(content[end : end + 4], "little")), 8 * end, 7):
        content[bit // 8] ^= 1 << bit % 8
        Path(path).write_bytes(content)
        content[bit // 8] ^= 1 << bit % 8
        try:
            found = open_dataset(path, comm=MPI.COMM_SELF).load()
        except DataError:
            refused += 1
        else:
            assert found.keys() == wanted.keys()
            for name in wanted:
                same(found[name], wanted[name])
    assert refused > 100


def test_a_dictionary_that_a_file_has_twice(tmp_path: Path) -> None:
    """Streams replace dictionaries; in a file batches would have the texts of another one."""
    parts = [pa.DictionaryArray.from_arrays(pa.array([n]), pa.array(["a", "b"][: n + 1])) for n in range(2)]
    path = Path(write(tmp_path / "a.arrow", pa.table({"x": pa.chunked_array(parts)}), emit_dictionary_deltas=True))
    content = bytearray(path.read_bytes())
    begin = BLOCK.unpack_from(content, blocks(content)[1][1])[0] + 8
    root = flatbuffers.table.Table(content, begin + int.from_bytes(content[begin : begin + 4], "little"))
    batch = flatbuffers.table.Table(content, root.Indirect(root.Pos + root.Offset(8)))
    content[batch.Pos + batch.Offset(8)] = 0  # it is no addition
    path.write_bytes(content)
    with pytest.raises(FormatError, match="another one of number 0"):
        read(str(path))


def test_offsets_outside_of_the_values(tmp_path: Path) -> None:
    """Arrow itself would read memory of others."""
    path = tmp_path / "a.arrow"
    write(path, pa.table({"x": pa.array([[1, 2], [3], [4, 5, 6]], pa.list_(pa.int32()))}))
    offsets, content = np.array([0, 2, 3, 6], "<i4").tobytes(), path.read_bytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, np.array([0, 2, 3, 60_000], "<i4").tobytes()))
    with pytest.raises(DecodeError, match=str(path)):
        read(str(path))


def _partitioned(folder: Path) -> tuple[pa.Table, dict[str, Any]]:
    rng = np.random.default_rng(0)
    content = pa.table(
        {
            "year": np.repeat([2019, 2020, 2021], 40),
            "site": np.tile(["Zürich", "Bern/West"], 60),
            "x": rng.random(120),
            "n": np.arange(120),
        }
    )
    for kind in ("parquet", "feather"):
        pa.dataset.write_dataset(
            content, folder / kind, format=kind, partitioning=["year", "site"], partitioning_flavor="hive"
        )
    return content, {str(row["n"]): row for row in content.to_pylist()}


@pytest.mark.parametrize("kind", ["parquet", "feather"])
def test_folders_of_partitions(tmp_path: Path, kind: str) -> None:
    content, rows = _partitioned(tmp_path)
    data = open_dataset(tmp_path / kind, comm=MPI.COMM_SELF)
    assert set(data.schema) == {"year", "site", "x", "n"} and len(data) == 120
    for batch in data.batches(24, shuffle=True, seed=1):
        for year, site, x, n in zip(*(batch[name] for name in ("year", "site", "x", "n")), strict=True):
            assert rows[str(n)] == {"year": year, "site": site.decode(), "x": x, "n": n}
    alone = open_dataset(tmp_path / kind, inputs="year", comm=MPI.COMM_SELF).load()["year"]
    assert np.sort(alone).tolist() == np.sort(content["year"].to_numpy()).tolist()
    late = open_dataset(tmp_path / kind, inputs="n", where="year > 2019", comm=MPI.COMM_SELF)
    assert sorted(late.load()["n"].tolist()) == list(range(40, 120))
    with pytest.raises(FieldNotFound, match="'yeer'"):
        open_dataset(tmp_path / kind, inputs="yeer", comm=MPI.COMM_SELF)


def test_a_partition_without_a_value(tmp_path: Path) -> None:
    content = pa.table({"run": pa.array([1, None]), "x": [5.0, 6.0]})
    partitioned = {"partitioning": ["run"], "partitioning_flavor": "hive"}
    pa.dataset.write_dataset(content, tmp_path / "a", format="parquet", **partitioned)
    data = read(str(tmp_path / "a"))
    assert dict(zip(data["x"], data["run"].tolist(), strict=True))[5.0] == 1 and np.isnan(data["run"]).sum() == 1
    data = read(str(tmp_path / "a"), dtype={"run": "float64"})
    assert dict(zip(data["x"], data["run"].tolist(), strict=True))[5.0] == 1
    with pytest.raises(DataError, match="run"):
        read(str(tmp_path / "a"), dtype={"run": "int32"})


def _selected(comm: MPI.Intracomm, path: str, where: str) -> tuple[list[int], int]:
    before = process_profile().bytes
    data = open_dataset(path, inputs="n", where=where, comm=comm)
    return data.load()["n"].tolist(), process_profile().bytes - before


WHERE = {
    "x > 0.75": lambda x, flag: x > 0.75,
    "(x >= 0.25) & (x < 0.3)": lambda x, flag: (x >= 0.25) & (x < 0.3),
    "(x == 0.5) | (2 - x < 1.05)": lambda x, flag: (x == 0.5) | (2 - x < 1.05),
    "~(x > 0.2)": lambda x, flag: ~(x > 0.2),
    "(x != 0.5) & (flag < -1)": lambda x, flag: flag < -1,
    "sqrt(x) > 0.9": lambda x, flag: np.sqrt(x) > 0.9,
}


def test_row_groups_that_statistics_rule_out(tmp_path: Path, ranks: Pools) -> None:
    x, flag = np.linspace(0, 1, 4000), np.tile([0, 1, 2, 3], 1000)
    x[5::100] = np.nan
    columns = {"x": pa.array(x, from_pandas=True), "flag": flag, "n": np.arange(4000)}
    for number, half in enumerate((slice(0, 2000), slice(2000, 4000))):
        write_parquet(tmp_path / f"{number}.parquet", {name: a[half] for name, a in columns.items()}, 100)
    for where, condition in WHERE.items():
        wanted = np.flatnonzero(condition(x, flag)).tolist()
        for size in (1, 3):
            by_rank = ranks(size).run(_selected, str(tmp_path), where)
            assert [n for numbers, _ in by_rank for n in numbers] == wanted, where
    ((_, few),), ((_, whole),) = (ranks(1).run(_selected, str(tmp_path), text) for text in list(WHERE)[1::4])
    stored = sum((tmp_path / f"{number}.parquet").stat().st_size for number in (0, 1))
    assert few < stored / 10 < stored / 4 < whole  # three of forty row groups; all of x, a fifth of n
