"""JSON Lines: conformance suite, types, missing members, and errors."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from mpi4py import MPI

from matex_data import DataError, FieldNotFound, FormatError, open_dataset
from matex_data.readers import json_lines
from tests.support.format_suite import Case, FormatSuite, same
from tests.support.ranks import Pool

ROWS = (150, 37, 1, 110)


def lines(rows: int, first: int = 0) -> list[dict[str, Any]]:
    """Return objects of all kinds of members."""
    rng = np.random.default_rng(first)
    return [
        {
            "event": first + i,
            "energy": float(rng.normal()),
            "trigger": bool(i % 3),
            "name": f"run {i}, {{é}}" * (i % 3),
            "vertex": {"x": i, "y": i / 2},
            "pt": rng.normal(size=i % 4 + 1).tolist(),
        }
        for i in range(rows)
    ]


def write(path: Path, rows: list[dict[str, Any]], end: str = "\n") -> str:
    """Write an object on each line."""
    path.write_bytes(end.join(json.dumps(row) for row in rows).encode() + end.encode())
    return str(path)


def expected(paths: list[str]) -> dict[str, Any]:
    """Return the members as pandas reads them."""
    frame = pd.concat([pd.read_json(path, lines=True, precise_float=True) for path in paths])
    found: dict[str, Any] = {name: frame[name].to_numpy() for name in ("event", "energy", "trigger")}
    found["name"] = np.array([text.encode() for text in frame["name"]], object)
    found |= {f"vertex.{name}": np.array([vertex[name] for vertex in frame["vertex"]]) for name in "xy"}
    return found | {"pt": np.fromiter(map(np.array, frame["pt"]), object, len(frame))}


class TestJsonLines(FormatSuite):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def small_blocks(cls) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_lines, "BLOCK_BYTES", 2000)
            yield

    def write(self, folder: Path) -> Case:
        first = np.cumsum((0, *ROWS[:-1])).tolist()
        contents = [lines(rows, start) for rows, start in zip(ROWS, first, strict=True)]
        ends = ("\n", "\r\n", "\n", "\n\n")
        paths = [
            write(folder / f"part{i}.jsonl", c, end) for i, (c, end) in enumerate(zip(contents, ends, strict=True))
        ]
        return Case(paths, expected(paths), "event")

    def damage(self, folder: Path) -> Case:
        case = self.write(folder)
        path = Path(case.paths[0])
        path.write_bytes(path.read_bytes().replace(b'"event": 77', b'"event": 7"'))
        return case


def load(path: Any, **options: Any) -> dict[str, Any]:
    """Return all rows by matex_data."""
    return open_dataset(path, comm=MPI.COMM_SELF, **options).load()


def test_types_follow_from_all_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 300)
    rows = [{"x": 1, "when": "2020-01-02T03:04:05", "n": i} for i in range(40)]
    rows += [{"x": 1.5, "when": "2020-01-02T03:04:06", "m": i} for i in range(40)]
    path = write(tmp_path / "a.ndjson", rows)
    found, frame = load(path), pd.read_json(path, lines=True)
    for name in ("x", "n", "m"):
        same(found[name], frame[name].to_numpy(float))
    same(found["when"], pd.to_datetime(frame["when"]).to_numpy("datetime64[s]").astype(float))


def _all(comm: MPI.Intracomm, path: str) -> list[dict[str, Any]]:
    return comm.allgather(open_dataset(path, comm=comm).load())


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz", "zst"])
def test_compressed_lines(tmp_path: Path, pool: Pool, suffix: str) -> None:
    frame = pd.DataFrame({"n": range(500), "t": [f"text {i}" for i in range(500)]})
    for number in range(2):
        path = tmp_path / f"{number}.jsonl.{suffix}"
        if suffix == "zst":  # pandas needs another package for it
            text = frame.to_json(orient="records", lines=True).encode()
            path.write_bytes(pa.compress(text, "zstd", asbytes=True))
        else:
            frame.to_json(path, orient="records", lines=True)
    parts = pool.run(_all, str(tmp_path))[0]
    found = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    assert found["n"].tolist() == [*range(500)] * 2
    assert [text.decode() for text in found["t"]] == [*frame["t"]] * 2


def test_a_type_that_shows_in_few_lines_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 100)
    monkeypatch.setattr(json_lines, "INFERRED", 2)
    rows = [{"x": i if i != 50 else 0.5} for i in range(100)]
    path = write(tmp_path / "a.jsonl", rows)
    for options in ({}, {"dtype": {"x": "int32"}}):
        with pytest.raises(
            DataError, match=r"another type.*'x', row 50(.|\n)*int64(.|\n)*0\.5(.|\n)*dtype=\{'x': 'float64'\}"
        ):
            load(path, **options)
    wanted = np.array([row["x"] for row in rows])
    for dtype in ("float64", "float16"):
        same(load(path, dtype={"x": dtype})["x"], wanted.astype(dtype))


def test_dtypes_of_numbers(tmp_path: Path) -> None:
    """Read numbers as requested, by the rules of names and patterns that Parquet has."""
    path = write(tmp_path / "a.jsonl", [{"n": 2**60 + 1, "on": i} for i in range(2)])
    found = load(path, dtype={"*": "float32", "n": "int64", "on": "bool"})
    assert (found["n"].tolist(), found["on"].tolist()) == ([2**60 + 1] * 2, [False, True])
    with pytest.raises(DataError, match=r"not of the requested dtype(.|\n)*int8(.|\n)*1152921504606846977"):
        load(path, dtype={"n": "int8"})
    with pytest.raises(FormatError, match=r"no such type(.|\n)*'flaot'"):
        load(path, dtype={"n": "flaot"})
    with pytest.raises(FieldNotFound, match=r"dtype= names a column.*'m'"):
        load(path, dtype={"m": "int8"})


def test_missing_values_within_objects_and_lists(tmp_path: Path) -> None:
    rows = [
        {"o": {"n": 1, "b": True}, "l": [1, None], "j": [{"n": 1}, {"n": None}]},
        {"o": {"n": None, "b": None}, "l": [], "j": []},
        {"o": {}, "l": [2], "j": [{"n": 2}]},
    ]
    found = load(write(tmp_path / "a.jsonl", rows))
    np.testing.assert_array_equal(found["o.n"], [1, np.nan, np.nan])
    np.testing.assert_array_equal(found["o.b"], [1, np.nan, np.nan])
    for name in ("l", "j.n"):
        np.testing.assert_array_equal(np.concatenate(found[name]), [1, np.nan, 2])
        assert [len(row) for row in found[name]] == [2, 0, 1]


def test_integers_beyond_int64(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"id": 2**64 - 1, "o": {"ids": [2**63]}}, {"id": 7, "o": {"ids": [1, 2]}}]
    path = write(tmp_path / "a.jsonl", rows)
    found = load(path)
    same(found["id"], pd.read_json(path, lines=True)["id"].to_numpy(np.uint64))
    assert [row.tolist() for row in found["o.ids"]] == [row["o"]["ids"] for row in rows]
    assert load(write(tmp_path / "b.jsonl", [{"id": 2**64 - 1}, {"id": -1}]))["id"].tolist() == [2.0**64, -1]


@pytest.mark.parametrize("time", ["2020-01-01", "2020-01-01 00:00:00", "2020-01-01T00:00:00.25"])
@pytest.mark.parametrize("text", ["n/a", "2020"])
def test_times_beside_texts_of_other_blocks_are_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, time: str, text: str
) -> None:
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 100)
    texts = [time] * 20 + [text] * 20 + [time] * 20
    found = load(write(tmp_path / "a.jsonl", [{"t": one, "o": {"l": [one]}} for one in texts]))
    assert found["t"].tolist() == [one.encode() for one in texts]
    assert [row.tolist() for row in found["o.l"]] == [[one.encode()] for one in texts]


def test_carriage_returns_within_lines(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"a":1,\r"b":2}\r\n\r\n{"a":3,"b":\r4}\n')
    found = load(tmp_path / "a.jsonl")
    assert (found["a"].tolist(), found["b"].tolist()) == ([1, 3], [2, 4])


def test_types_of_inner_members(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"jet": {"pt": 1, "n": 2, "l": [3]}}] * 2)
    found = load(path, dtype={"jet.pt": "float32", "*.l": "int8"})
    assert [found[f"jet.{name}"].dtype for name in ("pt", "n")] == [np.float32, np.int64]
    assert found["jet.l"][0].dtype == np.int8


def test_fractions_of_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 100)
    times = ["2020-01-01T00:00:00"] * 20 + ["2020-01-01T00:00:01.25Z", "2020-01-01 01:00:02.123456789+01:00"] * 9
    found = load(write(tmp_path / "a.jsonl", [{"t": time, "text": f"{time}?"} for time in times]))
    wanted = [pd.to_datetime(time, utc=True).value / 1e9 for time in times]
    np.testing.assert_allclose(found["t"], wanted, rtol=0, atol=1e-6)
    assert found["text"][0] == b"2020-01-01T00:00:00?"


def _texts(comm: MPI.Intracomm, path: str, name: str) -> Any:
    """Return the error of a text that is no time, and what is read of it as a text."""
    try:
        open_dataset(path, comm=comm, inputs=name).load()
        found = ""
    except DataError as error:
        found = str(error)
    rows = np.concatenate(comm.allgather(open_dataset(path, comm=comm, inputs=name, dtype={name: "str"}).load()[name]))
    return found, np.concatenate(rows).tolist() if isinstance(rows[0], np.ndarray) else rows.tolist()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("text", ["unknown", "n/a, or so"])
def test_a_text_among_times(tmp_path: Path, ranks: Any, size: int, text: str) -> None:
    """A text on a line that is not looked at is found, and the remedy of the error makes the times texts."""
    times = [f"2020-01-01T00:00:{i % 60:02}" if i != 6160 else text for i in range(12_000)]
    rows = [{"t": time, "o": {"l": [time], "n": 1}, "other": "x" * 4000} for time in times]
    path = write(tmp_path / "a.jsonl", rows)
    for name in ("t", "o.l"):
        for found, texts in ranks(size).run(_texts, path, name):
            assert (
                f"no time as those on the lines that were looked at (file {path!r}, field {name!r}, row 6160" in found
            )
            assert f"found: {text!r}" in found and f"dtype={{{name!r}: 'str'}}" in found
            assert texts == [time.encode() for time in times]
    assert load(path, inputs="o.n")["o.n"].sum() == 12_000  # a member beside it is read


def test_texts_are_requested(tmp_path: Path) -> None:
    rows = [{"t": "2020-01-01", "s": "a", "n": 1, "none": None}] * 2
    path = write(tmp_path / "a.jsonl", rows)
    found = load(path, dtype={"t": str, "s": "str", "none": "str"})
    assert [found[name].tolist() for name in ("t", "s", "none")] == [[b"2020-01-01"] * 2, [b"a"] * 2, [b""] * 2]
    with pytest.raises(FormatError, match=r"no such type.*'n'(.|\n)*'str' for a column of numbers"):
        load(path, dtype={"n": "str"})


MIXED: list[tuple[list[Any], str]] = [
    (["u", 5], "numbers, texts"),
    ([5, "u"], "numbers, texts"),
    ([{"k": 1}, [5]], "arrays, objects"),
    ([True, None, 1.5], "numbers, truth values"),
    ([[1, 2], [], ["a"]], "numbers, texts"),
    ([[[1]], [[{"k": 1}]]], "numbers, objects"),
    (["2020-01-01", {}], "objects, texts"),
]


def _mixed(comm: MPI.Intracomm, path: str) -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = open_dataset(path, comm=comm)
        rows = comm.allgather(data.load())
        chosen = open_dataset(path, comm=comm, inputs="x", targets="o.y").load()
    found = {name: np.concatenate([part[name] for part in rows]).tolist() for name in rows[0]}
    return [found, sorted(chosen), comm.allreduce([str(one.message) for one in caught])]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(("values", "kinds"), MIXED)
def test_members_of_different_types_are_left_out(
    tmp_path: Path, ranks: Any, values: list[Any], kinds: str, apart: bool
) -> None:
    """Leave them out whether the types differ between lines or between blocks; others beside them are read."""
    count = 200 if apart else 1
    rows = [{"x": 1, "m": one, "o": {"m": one, "y": 2.5}, "pad": "x" * 3000} for one in values for _ in range(count)]
    path = write(tmp_path / "a.jsonl", rows)
    for size in (1, 3):
        for found, chosen, warned in ranks(size).run(_mixed, path):
            assert {name: set(column) for name, column in found.items()} == {
                "x": {1},
                "o.y": {2.5},
                "pad": {b"x" * 3000},
            }
            assert len(found["x"]) == len(rows) and chosen == ["o.y", "x"]
            assert len(warned) == 1 and f"'m': values of different types: {kinds}" in warned[0] and "'o.m'" in warned[0]
    for name in ("m", "o.m"):
        with pytest.raises(FormatError, match=f"cannot be read.*{name!r}(.|\n)*different types: {kinds}"):
            load(path, inputs=["x", name])


def test_a_member_whose_types_differ_on_lines_that_are_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "BLOCK_BYTES", 100)
    monkeypatch.setattr(json_lines, "INFERRED", 2)
    path = write(tmp_path / "a.jsonl", [{"x": i, "o": {"m": i if i != 25 else "a", "n": 2}} for i in range(100)])
    assert load(path, inputs=["x", "o.n"])["x"].tolist() == [*range(100)]
    with pytest.raises(DataError, match=r"different types.*'o\.m', row 25(.|\n)*select others with inputs="):
        load(path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "no lines"),
        (b"\n\n", "no lines"),
        (b"[1, 2]\n", "no JSON objects"),
        (b'{"x": 1}\n{"x": "a"}\n', "'x': values of different types: numbers, texts"),
        (b'{"o": {"x": [1, "a"]}}\n', "'o.x': values of different types: numbers, texts"),
        (b'{"x": 1', "no JSON objects"),
        (b"\x80\x81\n", "no JSON objects"),
        (b'{"x": "a"}\n{"x": "\xe4"}\n', r"no JSON objects(.|\n)*UTF-8"),
        (b'{\n "x": 1\n}\n', r"not on a line of its own(.|\n)*3 objects on 3 lines(.|\n)*1 objects"),
        (b'{"x": 1} {"x": 2}\n', "not on a line of its own"),
    ],
)
def test_damaged_files(tmp_path: Path, content: bytes, problem: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(FormatError, match=problem):
        load(tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("lists", "expected"),
    [([[None, 1.5], [], [2, None]], [[np.nan, 1.5], [], [2.0, np.nan]]), ([["a"], [None, "b"]], [[b"a"], [b"", b"b"]])],
)
def test_missing_elements_in_front_of_a_list(tmp_path: Path, lists: list[Any], expected: list[Any]) -> None:
    """Also of the first list, where pyarrow, which does not know their type yet, loses them."""
    for first in (lists, lists[::-1]):
        (tmp_path / "a.jsonl").write_text("".join(json.dumps({"x": one}) + "\n" for one in first))
        read = open_dataset(tmp_path / "a.jsonl", inputs="x", comm=MPI.COMM_SELF)[:]
        assert repr([one.tolist() for one in read]) == repr(expected if first is lists else expected[::-1])
