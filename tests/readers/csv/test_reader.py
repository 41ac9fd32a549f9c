"""Text tables: conformance suite, types, dialects, many files, matrices, and error messages."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from mpi4py import MPI

from matex_data import DataError, DecodeError, FieldNotFound, open_dataset
from matex_data.index.model import Index
from matex_data.readers import detect
from matex_data.readers.csv import reader as csv_reader
from matex_data.readers.csv import records
from matex_data.readers.csv.options import MISSING
from matex_data.readers.csv.reader import index, index_collectively
from matex_data.readers.text import scan as text_scan
from tests.support.format_suite import Case, FormatSuite
from tests.support.ranks import Pools
from tests.support.serial import every_row, random_rows
from tests.support.simulated import on_ranks


def _frames() -> list[pd.DataFrame]:
    rng = np.random.default_rng(0)
    frames, first = [], 0
    for rows in (150, 37, 1, 110):
        ids = np.arange(first, first + rows)
        text = [f'"{i}", said\r\nshe' if i % 3 else f"plain {i}" for i in ids]
        frames.append(pd.DataFrame({"id": ids, "x": rng.normal(size=rows), "text": text, "good": ids % 2 == 0}))
        first += rows
    return frames


def _files(folder: Path) -> list[Path]:
    paths = [folder / f"part{number}.csv" for number in range(4)]
    for path, frame in zip(paths, _frames(), strict=True):
        frame.to_csv(path, index=False)
    return paths


class TestCsv(FormatSuite):
    def write(self, folder: Path) -> Case:
        _files(folder)
        tables = pd.concat(_frames())
        expected = {name: tables[name].to_numpy() for name in ("id", "x", "good")}
        expected["text"] = np.array([text.encode() for text in tables["text"]], object)
        return Case(str(folder / "*.csv"), expected, "id")

    def damage(self, folder: Path) -> Case:
        path = _files(folder)[0]
        content = path.read_text().replace("plain 93,", "plain 93,,")
        path.write_text(content)
        return Case(str(folder / "*.csv"), {}, "id")


def write(folder: Path, text: str | bytes, name: str = "table.csv") -> str:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def columns(path: str, **options: Any) -> dict[str, Any]:
    found = index(path, **options)
    return {name: every_row(found, name).tolist() for name in found.fields}


def test_types_of_columns(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "i,f,b,s,when,day,zoned,gap,flag,none\n"
        "1,1,true,a,2020-01-02 03:04:05.5,2020-01-02,2020-01-02T03:04:05+01:00,1,True,\n"
        "-2,2.5e3,False,,1960-01-01 00:00:00,1850-12-31,1970-01-01T00:00:00Z,NA,,NaN\n",
    )
    found = index(path)
    dtypes = {name: field.dtype.str for name, field in found.fields.items()}
    floats = dict.fromkeys(["f", "when", "day", "zoned", "gap", "flag", "none"], "<f8")
    assert dtypes == {"i": "<i8", "b": "|b1", "s": "|O", **floats}
    rows = columns(path)
    assert rows["i"] == [1, -2]
    assert rows["b"] == [True, False]
    assert rows["s"] == [b"a", b""]
    assert rows["when"] == [pd.Timestamp(t).timestamp() for t in ("2020-01-02 03:04:05.5", "1960-01-01")]
    assert rows["day"] == [pd.Timestamp(t).timestamp() for t in ("2020-01-02", "1850-12-31")]
    assert rows["zoned"] == [pd.Timestamp("2020-01-02T03:04:05+01:00").timestamp(), 0.0]
    np.testing.assert_array_equal(rows["gap"], [1, np.nan])
    np.testing.assert_array_equal(rows["flag"], [1, np.nan])
    np.testing.assert_array_equal(rows["none"], [np.nan, np.nan])
    assert found.fields["when"].attributes["units"].startswith("seconds since 1970-01-01")


@pytest.mark.parametrize("text", MISSING)
def test_texts_for_missing_values_in_every_column(tmp_path: Path, text: str) -> None:
    """Cover columns of numbers that begin like the text, and blocks before it without missing values."""
    lines = [f"{i},-1.{i},1.{i}e3,{i % 2 == 0},2020-01-02,n\n" for i in range(4000)]
    lines[3000] = ",".join([text] * 6) + "\n"
    path = write(tmp_path, "a,b,c,d,e,f\n" + "".join(lines))
    found = index(path, infer="full")
    expected = pd.read_csv(path)
    for name in "abc":
        np.testing.assert_array_equal(every_row(found, name), expected[name].to_numpy(float))
    for name in "de":
        assert np.flatnonzero(np.isnan(every_row(found, name))).tolist() == [3000]
    assert np.flatnonzero(every_row(found, "f") == b"").tolist() == [3000]


def test_requested_types(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b,c,d,e\n1,1,2,x,31.12.1999\n3,,5,y,01.02.2000\n3,9,5,x,01.02.2000\n")
    options: dict[str, Any] = {"a": "float32", "b": "str", "c": np.uint8, "d": "category", "e": "datetime"}
    found = index(path, dtype=options, date_format="%d.%m.%Y")
    assert [field.dtype for field in found.fields.values()] == [np.float32, object, np.uint8, np.int32, np.float64]
    assert every_row(found, "a").tolist() == [1, 3, 3]
    assert every_row(found, "b").tolist() == [b"1", b"", b"9"]
    assert every_row(found, "d").tolist() == [0, 1, 0]
    assert found.fields["d"].attributes["categories"] == ["x", "y"]
    assert every_row(found, "e")[0] == pd.Timestamp("1999-12-31").timestamp()
    found = index(path, dtype={"d": ["y", "z"]}, parse_dates=False)
    assert every_row(found, "d").tolist() == [-1, 0, -1]
    assert columns(path, dtype="str")["c"] == [b"2", b"5", b"5"]
    assert index(path, na_values=["x", 9]).fields["b"].dtype == np.float64
    path = write(tmp_path, "a,b,c\n1,true,1\n0,True,2\nFalse,false\n")
    assert columns(path, dtype={"a": "bool", "c": "str"}) == {"a": [1, 0, 0], "b": [1, 1, 0], "c": [b"1", b"2", b""]}
    with pytest.raises(DataError, match=r"line 3, column 3(.|\n)*bool(.|\n)*'2'"):
        every_row(index(path, dtype={"c": "bool"}), "c")


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, ["2020-01-01T00:00:00.123456789Z", "2020-01-01 00:00:01.5+02:00"]),
        ({"dtype": "datetime"}, ["2020-01-01T00:00:00Z", "2020-01-01 00:00:01.5+02:00"]),
        ({"dtype": {"t": "M8[ns]"}}, ["2020-01-01T00:00:00.123456789", "2020-01-01"]),
        ({"date_format": "%d/%m/%Y"}, ["2020-01-13", "2021-12-31"]),
        ({"date_format": "%d/%m/%Y"}, ["01/02/2020", "31/12/2021"]),
        ({"date_format": "%Y-%d-%m"}, ["2020-01-02", "2021-11-12"]),
    ],
    ids=repr,
)
def test_times(tmp_path: Path, options: dict[str, Any], texts: list[str]) -> None:
    path = write(tmp_path, "t\n" + "\n".join(texts) + "\n")
    style = options.get("date_format") if "-01-13" not in texts[0] else None
    moments = [pd.to_datetime(text, format=style, utc=True) for text in texts]
    assert columns(path, **options)["t"] == [moment.value / 1e9 for moment in moments]


def test_a_format_of_days_before_months_is_not_mixed_with_another(tmp_path: Path) -> None:
    path = write(tmp_path, "t,u\n2020-13-01,a\n2020-01-13,b\n")
    with pytest.raises(DataError, match="line 3, column 1"):
        columns(path, date_format="%Y-%d-%m", dtype={"t": "datetime"})


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("a;b\n1,5;2\n-,25;x\n", {"decimal": ","}, {"a": [1.5, -0.25], "b": [b"2", b"x"]}),
        ("a b  c\n  1   2 3 \n\t4 5\t6\n   \n", {}, {"a": [1, 4], "b": [2, 5], "c": [3, 6]}),
        ('a b\n"x  y" 1 \n  "\t""z  ""\n " \t2\n', {}, {"a": [b"x  y", b'\t"z  "\n '], "b": [1, 2]}),
        ('a b\n1  "x \t"\n3\n', {"sep": r"\s+", "dtype": "str"}, {"a": [b"1", b"3"], "b": [b"x \t", b""]}),
        ("# made by hand\n# x y\n1.5 2\n3 4\n", {}, {"x": [1.5, 3], "y": [2, 4]}),
        ("a|b\r1|x\r\n\r\n2|y\n", {}, {"a": [1, 2], "b": [b"x", b"y"]}),
        ("\ufeffa,b\n1,ü\n", {}, {"a": [1], "b": ["ü".encode()]}),
        ("1\t2\n3\t4\n", {"header": None}, {"0": [1, 3], "1": [2, 4]}),
        ("1,2\n3,4\n", {"names": ["u", "v"]}, {"u": [1, 3], "v": [2, 4]}),
        ("x,y\n1,2\n", {"names": ["u", "v"], "header": 0}, {"u": [1], "v": [2]}),
        ("a,a,,a.1\n1,2,3,4\n", {}, {"a": [1], "a.2": [2], "Unnamed: 2": [3], "a.1": [4]}),
        ("junk\nmore\na,b\n1,2\n", {"skiprows": 2}, {"a": [1], "b": [2]}),
        ("a,b\n'x,y',2\n", {"quotechar": "'"}, {"a": [b"x,y"], "b": [2]}),
        ('a,b\n5" pipe,2\n6" pipe,3\n', {}, {"a": [b'5" pipe', b'6" pipe'], "b": [2, 3]}),
        ('a,b\n"x \\" y",2\n"z, \\" w",3\n', {"escapechar": "\\"}, {"a": [b'x " y', b'z, " w'], "b": [2, 3]}),
        ("a,b\n1,2 # of many\n#3,4\n5,6\n", {"comment": "#"}, {"a": [1, 5], "b": [2, 6]}),
        ("# colours\nname,c\na,#f00\n # ,\n", {}, {"name": [b"a"], "c": [b"#f00"]}),
        ('#a "b\n#x,y\n1,2\n"3\n# 4",5\n', {}, {"x": [b"1", b"3\n# 4"], "y": [2, 5]}),
        ('a,b\n1,"x # y" # "z\n2,"w\n# v"\n', {"comment": "#"}, {"a": [1, 2], "b": [b"x # y", b"w\n# v"]}),
        ("a;b\n1,234;2\n", {}, {"a": [b"1,234"], "b": [2]}),
        ("x,1,2\n", {"header": None, "usecols": [0, 2]}, {"0": [b"x"], "2": [2]}),
        ("a,b\n1,2\n\n   \n3,4\n", {}, {"a": [1, 3], "b": [2, 4]}),
    ],
)
def test_dialects(tmp_path: Path, text: str, options: dict[str, Any], expected: dict[str, list[Any]]) -> None:
    assert columns(write(tmp_path, text), **options) == expected


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "utf-16", "utf-16-le", "utf-32"])
def test_texts_are_delivered_in_utf_8(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path, "größe,n\nmaß “x”\n,2\n".replace("“x”\n", "x").encode(encoding))
    told = {"encoding": encoding} if encoding == "utf-16-le" else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert columns(path, **told) == {"größe": ["maß x".encode()], "n": [2]}


@pytest.mark.parametrize("block", [64, 1 << 20])
@pytest.mark.parametrize(("encoding", "byte"), [("cp1252", "81"), ("gbk", "ff")])
def test_a_byte_that_the_encoding_lacks(tmp_path: Path, tiny: None, encoding: str, byte: str, block: int) -> None:
    lines = [f"{i},x\u00d7".encode(encoding) for i in range(100)]
    lines[70] = b"70," + bytes.fromhex(byte)
    path = write(tmp_path, b"n,text\n" + b"\n".join(lines) + b"\n")
    options: dict[str, Any] = {"encoding": encoding, "dtype": {"n": "int64", "text": "str"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "block_bytes", lambda size: block)
        with pytest.raises(DecodeError, match=rf"in line 72 (.|\n)*table\.csv(.|\n)*{encoding}(.|\n)*x{byte}'"):
            index(path, encoding=encoding)
        with pytest.raises(DecodeError, match="in line 72 "):
            every_row(index(path, **options), "n")
    with pytest.warns(UserWarning, match="in line 72 "):
        rows = open_dataset(path, **options, on_error="skip", comm=MPI.COMM_SELF).load()["n"]
    assert 70 not in rows and {0, 99} < set(rows.tolist())


LITERALS = [
    *("0x1F", "0X1f", "-0x1F", "0xFFFFFFFFFFFFFFFF", " 0x1F", '"0x1F"', "0x1.8p3", "0o17", "017", "0b1", "1_000"),
    *("1d5", "NAN", "Nan", "+nan", "nan(1)", " nan ", "nan", "-NaN", " inf ", "inf", "-Infinity", "INF", "infx"),
    *("1.#INF", "+1", ".5", "5.", "-0.0", "1e5", "1e", "1e400", "1e-400", "\uff11", "1.2.3", "--1", " 1 ", "1\t", "1L"),
    *("9007199254740993", "9223372036854775808", "18446744073709551615", "-9223372036854775809"),
    *("18446744073709551616", "123456789012345678901234567890", "9223372036854775808.5", "T", "yes"),
]
"""Texts that at least one parser takes for a number."""


@pytest.mark.parametrize("beside", [[], ["1", "2"], ["-1"], ["1.5"], [""], ["inf"], ["x"]], ids=str)
def test_numbers_are_those_of_pandas(tmp_path: Path, beside: list[str]) -> None:
    for literal in LITERALS:
        path = write(tmp_path, "c,d\n" + "".join(f"{text},y\n" for text in [*beside, literal]))
        found, expected = every_row(index(path), "c"), pd.read_csv(path)["c"]
        if expected.dtype.kind in "iufb":
            exact = {np.dtype(np.int64): np.int64, np.dtype(np.uint64): np.uint64}.get(expected.dtype, float)
            assert found.dtype.kind in "iufb", literal
            np.testing.assert_array_equal(found.astype(exact), expected.to_numpy(exact), literal)
            assert found.dtype.kind != "f" or expected.dtype.kind != "i" or abs(found).max() < 2**53, literal
        else:
            assert found.tolist() == [b"" if v != v else str(v).encode() for v in expected], literal


@pytest.mark.parametrize("late", ["0x1F", "NAN", "nan(1)", " inf"])
def test_a_late_value_that_is_no_number_in_pandas_is_refused(tmp_path: Path, tiny: None, late: str) -> None:
    kind = "int64" if "x" in late else "double"
    lines = [f"{i}.5," if kind == "double" else f"{i}," for i in range(3000)]
    lines[1501] = late + ","
    path = write(tmp_path, "n,c\n" + "\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matex_data.readers.csv.reader.SAMPLE_BLOCKS", 2)
        found = index(path)
    with pytest.raises(DataError, match=rf"line 1503, column 1, .*\n.*{kind}.*\n.*{re.escape(repr(late))}"):
        every_row(found, "n")
    with pytest.raises(DataError, match=re.escape(repr(late))):
        every_row(index(path, dtype={"n": "float64" if kind == "double" else "int32"}), "n")


def test_a_long_integer_with_a_plus_stays_a_text(tmp_path: Path) -> None:
    assert columns(write(tmp_path, "a,b\n+92233720368547758080,+1\n"))["a"] == [b"+92233720368547758080"]


def test_integers_with_a_plus(tmp_path: Path) -> None:
    path = write(tmp_path, "n,x,many,text\n" + "-2,2,7,a\n" * 50_000 + "+1,1e+05,+18446744073709551615,+49\n")
    wanted, found = pd.read_csv(path), index(path)
    for name in ("n", "x", "many"):
        np.testing.assert_array_equal(every_row(found, name), wanted[name].to_numpy(), strict=True)
    assert every_row(found, "text")[-1] == b"+49"


@pytest.mark.parametrize(
    "text",
    [
        "name\nJohn Smith\nJane Doe\n",
        "time\n2020-01-01 00:00:00\n2020-01-02 00:00:00\n",
        "size\n12 cm\n100\n13 cm\n",
        "a b\n1 2\n3 4\n",
    ],
    ids=["words", "times", "units", "numbers"],
)
def test_blanks_separate_numbers(tmp_path: Path, text: str) -> None:
    assert list(columns(write(tmp_path, text))) == text.split("\n")[0].split()


@pytest.mark.parametrize("name", ["k__Bacteria;p__Firmicutes;g__{}", "sp|P{}|HUMAN", "a {} b"])
def test_lines_longer_than_the_text_for_detection(tmp_path: Path, name: str) -> None:
    """Read names of species and of proteins, which contain other separators."""
    names = ["sample", *(name.format(i) for i in range(9))]
    lines = [",".join(names), *(f"s{i}," + ",".join(str(i * j) for j in range(9)) for i in range(4))]
    path = write(tmp_path, "# made by hand\n" * 3 + "\n".join(lines) + "\n")
    single = write(tmp_path, "m;a,n;b\n", "single.csv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "DETECT_BYTES", 40)
        found = columns(path)
        assert columns(single, header=None) == {"0": [b"m;a"], "1": [b"n;b"]}
    assert list(found) == names
    assert found[names[-1]] == [0, 8, 16, 24]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        (",".join(f"name {i}" for i in range(40)) + ("\n" + ",".join(map(str, range(40)))) * 20, {}),
        ((",".join(map(str, range(40))) + "\n") * 20, {"header": None}),
        ("old\n" * 30 + (",".join(map(str, range(3))) + "\n") * 20, {"skiprows": 30, "header": 0}),
        ('n,text\n1,"' + "line\n" * 40 + '"\n' + '2,"b"\n' * 30, {}),
    ],
    ids=["header", "no header", "skipped lines", "lines in quotes"],
)
def test_first_records_longer_than_the_head_of_a_large_file(
    tmp_path: Path, tiny: None, text: str, options: dict[str, Any]
) -> None:
    path = write(tmp_path, text)
    expected = pd.read_csv(path, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_reader, "HEAD_BYTES", 16)
        found = columns(path, **options)
        patch.setattr(csv_reader, "MOST_HEAD_BYTES", 32)
        with pytest.raises(DataError, match=r"first records are too long(.|\n)*table\.csv"):
            index(path, **options)
    assert list(found) == [str(name) for name in expected]
    for name in expected:
        assert found[str(name)] == [v.encode() if isinstance(v, str) else v for v in expected[name]]


def test_a_first_line_with_the_separator(tmp_path: Path) -> None:
    for encoding, sep in (("utf-8-sig", ";"), ("utf-16", "\t"), ("latin-1", ",")):
        path = tmp_path / "excel.csv"
        path.write_bytes(f"sep={sep}\r\nn{sep}name\r\n1{sep}é\r\n2{sep}b\r\n".encode(encoding))
        wanted = pd.read_csv(path, sep=sep, skiprows=1, encoding=encoding)
        assert columns(str(path)) == {"n": [1, 2], "name": [name.encode() for name in wanted["name"]]}
    path.write_text("sep=;\nn;m\n1;2\n3;4;5\n")
    with pytest.raises(DataError, match="line 4 has too many fields"):
        columns(str(path))


@pytest.mark.parametrize("header", [",Unnamed: 0,a", "a,a,a.1", "Unnamed: 1,,b,,Unnamed: 3.1"])
def test_columns_without_a_name_and_of_one_name(tmp_path: Path, header: str) -> None:
    path = write(tmp_path, header + "\n" + ",".join(str(i) for i in range(header.count(",") + 1)) + "\n")
    assert columns(path) == pd.read_csv(path).to_dict("list")


def test_comments_that_are_prose_are_no_names(tmp_path: Path) -> None:
    path = tmp_path / "moon.dat"
    np.savetxt(path, np.arange(6).reshape(3, 2) / 7, header="positions of the moon in steps of one hour")
    found = columns(str(path))
    assert list(found) == ["0", "1"]
    np.testing.assert_array_equal(np.transpose(list(found.values())), np.loadtxt(path))


def test_infinite_and_missing_numbers_in_every_block(tmp_path: Path, tiny: None) -> None:
    values = [["nan", "inf", "-Infinity", "1e999", "2.5", "NA", ""][i % 7] for i in range(700)]
    path = write(tmp_path, "n,c\n" + "".join(f"{value},x\n" for value in values))
    np.testing.assert_array_equal(every_row(index(path), "n"), pd.read_csv(path)["n"].to_numpy())
    assert every_row(index(path, keep_default_na=False), "n").tolist() == [value.encode() for value in values]


def test_long_integers_of_several_files_keep_their_digits(tmp_path: Path) -> None:
    ids = ["9223372036854775808", "7", "-7", ""]
    paths = [write(tmp_path, f"a,b\n{value},1\n", f"{i}.csv") for i, value in enumerate(ids)]
    (whole,) = on_ranks(1, lambda ranks: index_collectively(paths[:2], None, ranks))
    assert whole.fields["a"].dtype == np.uint64
    for others in (paths[:3], paths[1:] + paths[:1]):
        (found,) = on_ranks(1, lambda ranks, others=others: index_collectively(others, None, ranks))
        assert found.fields["a"].dtype == object


@pytest.mark.parametrize("missing", [-999, "-999", [-999.0], ["1e3"], "inf", [0, 5], ["-999", "x"]], ids=repr)
def test_a_missing_number_in_any_notation(tmp_path: Path, missing: Any) -> None:
    for beside in ("1", "1.5", "y", "x"):
        for text in ("-999", "-999.0", "-999.000", "-9.99e2", "1000", "1000.0", "inf", "0", "-0.0", "5", "5.0"):
            path = write(tmp_path, f"c,d\n{beside},1\n{text},2\n")
            found = every_row(index(path, na_values=missing), "c").tolist()
            expected = pd.read_csv(path, na_values=missing)["c"].tolist()
            if any(isinstance(value, str) for value in expected):
                assert found == [b"" if v != v else v.encode() for v in expected]
            else:
                np.testing.assert_array_equal(found, expected, f"{beside} {text}")
    typed = index(write(tmp_path, "c\n1.5\n-9.990e2\n"), na_values=-999, dtype={"c": "float32"})
    np.testing.assert_array_equal(every_row(typed, "c"), [1.5, np.nan])


COMPRESSORS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": lambda b: _zstd(b)}


def _zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("suffix", sorted(COMPRESSORS))
def test_compressed_files(tmp_path: Path, suffix: str) -> None:
    text = "a,b\n" + "".join(f'{i},"{i}\n"\n' for i in range(500))
    path = write(tmp_path, COMPRESSORS[suffix](text.encode()), f"t.csv{suffix}")
    assert detect(path, Path(path).read_bytes()[:100]) == "csv"
    with pytest.warns(UserWarning, match="no part can be read alone"):
        open_dataset(path, comm=MPI.COMM_SELF)
    found = index(path)
    rows, numbers = random_rows(found, "b", np.random.default_rng(1))
    assert rows.tolist() == [f"{i}\n".encode() for i in numbers]
    write(tmp_path, Path(path).read_bytes()[:40], f"t.csv{suffix}")
    with pytest.raises(DataError, match="does not unpack"):
        index(path)


@pytest.fixture
def tiny() -> Iterator[None]:
    """Make every file large, with many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_reader, "SMALL_BYTES", 1)
        patch.setattr(text_scan, "READ_BYTES", 50)
        patch.setattr(records, "block_bytes", lambda size: 64)
        yield


def test_any_rows_in_any_order(tmp_path: Path, tiny: None) -> None:
    frame = _frames()[0]
    path = str(tmp_path / "t.csv")
    frame.to_csv(path, index=False)
    found = index(path)
    random = np.random.default_rng(2)
    for _ in range(30):
        for name in ("id", "x", "text"):
            rows, numbers = random_rows(found, name, random)
            expected = frame[name].to_numpy()[numbers].tolist()
            assert rows.tolist() == ([text.encode() for text in expected] if name == "text" else expected)


@pytest.mark.parametrize("size", (1, 2, 3, 5))
def test_ranks_agree_on_categories_and_full_inference(tmp_path: Path, tiny: None, size: int) -> None:
    lines = [f"{i},{'abc'[i % 3]}" for i in range(400)]
    lines[333] = "3.5,d"
    path = write(tmp_path, "n,c\n" + "\n".join(lines) + "\n")
    indexes = on_ranks(size, lambda ranks: index_collectively([path], None, ranks, dtype={"c": "category"}))
    assert all(i.fields["n"].dtype == np.float64 for i in indexes)  # categories need all values
    assert all(i.fields["c"].attributes["categories"] == ["a", "b", "c", "d"] for i in indexes)
    assert every_row(indexes[0], "c")[331:335].tolist() == [1, 2, 3, 1]
    indexes = on_ranks(size, lambda ranks: index_collectively([path], ["n"], ranks, infer="full"))
    assert every_row(indexes[-1], "n")[333] == 3.5


@pytest.mark.parametrize(
    ("texts", "wanted"),
    [(["10", "1", "2", "-3"], ["-3", "1", "2", "10"]), (["10", "1", "2", "x"], ["1", "10", "2", "x"])],
)
def test_categories_of_integers_are_in_the_order_of_their_values(
    tmp_path: Path, texts: list[str], wanted: list[str]
) -> None:
    path = write(tmp_path, "n,c\n" + "".join(f"{n},{text}\n" for n, text in enumerate(texts)) + "9,\n")
    found = index(path, ["c"], dtype={"c": "category"})
    assert found.fields["c"].attributes["categories"] == wanted
    column = pd.read_csv(path, dtype={"c": "Int64" if wanted[0] == "-3" else str})["c"].astype("category")
    assert every_row(found, "c").tolist() == column.cat.codes.tolist()


@pytest.mark.parametrize("size", (1, 2, 3))
def test_a_late_value_of_another_type_names_its_line(tmp_path: Path, tiny: None, size: int) -> None:
    lines = [f"{i},x" for i in range(3000)]
    lines[1501] = "oops,x"
    path = write(tmp_path, "n,c\n" + "\n".join(lines) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("matex_data.readers.csv.reader.SAMPLE_BLOCKS", 2)
        found = on_ranks(size, lambda ranks: index_collectively([path], None, ranks))[0]
    assert found.fields["n"].dtype == np.int64
    with pytest.raises(DataError, match=r"line 1503, column 1, .*\n.*int64.*\n.*'oops'"):
        every_row(found, "n")


def test_columns_that_a_file_lacks(tmp_path: Path) -> None:
    texts = ["a,b\n1,2\n", "c,a\nx,3\n", "b,a\n5,4\n"]
    paths = [write(tmp_path, text, f"{i}.csv") for i, text in enumerate(texts)]
    expected = pd.concat([pd.read_csv(path) for path in paths])
    for size in (1, 2, 4):
        (found, *_) = on_ranks(size, lambda ranks: index_collectively(paths, None, ranks))
        rows = {name: [] for name in found.fields}
        for file in found.files:
            of_file = Index(found.fields, [file])
            rows = {name: [*before, *every_row(of_file, name)] for name, before in rows.items()}
        for name in "ab":
            np.testing.assert_array_equal(rows[name], expected[name])
        assert rows["c"] == [b"", b"x", b""]
        assert (found.fields["a"].dtype, found.fields["b"].dtype) == (np.int64, np.float64)
    other = write(tmp_path, "u,v\n1,2\n", "3.csv")
    for size in (1, 2):
        with pytest.raises(DataError, match=r"same fields(.|\n)*3\.csv(.|\n)*a, b(.|\n)*0\.csv(.|\n)*u, v"):
            on_ranks(size, lambda ranks: index_collectively([*paths, other], None, ranks))


@pytest.mark.parametrize("header", [None, ["user", "title", "kinds"]])
def test_separators_of_characters(tmp_path: Path, header: list[str] | None) -> None:
    """Read the files of MovieLens: two colons, quotes without meaning, Latin-1."""
    lines = [f'{i}::"Film: {i}é (19{i}::a|b' for i in range(10, 60)]
    text = "\n".join(["user::title::kinds"][: header is None] + lines) + "\n"
    path = write(tmp_path, text.encode("latin-1"))
    options: dict[str, Any] = {"sep": "::", **({"names": header} if header else {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the other engine
        expected = pd.read_csv(path, engine="python", encoding="latin-1", quoting=3, **options)
    found = columns(path, **options)
    assert found["user"] == expected["user"].tolist()
    for name in ("title", "kinds"):
        assert [text.decode() for text in found[name]] == expected[name].tolist()
    with pytest.raises(DataError, match="control character"):
        columns(write(tmp_path, "a::b\n1::\x1f\n"), sep="::")


def test_thousands(tmp_path: Path) -> None:
    rows = [f'"{1234567 + i:,}","{i * 1500.25:,}",{i},"1,{i}","x,{i}"' for i in range(50)]
    path = write(tmp_path, "\n".join(["whole,number,small,mixed,text", *rows, ',"-1,000","2,000",word,']) + "\n")
    found, expected = columns(path, thousands=","), pd.read_csv(path, thousands=",")
    for name in ("whole", "number", "small"):
        np.testing.assert_array_equal(found[name], expected[name].to_numpy(float))
    assert [text.decode() for text in found["mixed"]] == expected["mixed"].tolist()
    assert [text.decode() for text in found["text"]] == expected["text"].fillna("").tolist()
    for texts in (["1,234.5", ".5", "-.5e1"], ["1,000", "inf", "-Infinity"], ["1,000", ",5"], ["1,000", "x.5"]):
        path = write(tmp_path, "a;b\n" + "".join(f"{text};1\n" for text in texts))
        expected = pd.read_csv(path, thousands=",", sep=";")["a"].tolist()
        assert columns(path, thousands=",")["a"] == [v.encode() if isinstance(v, str) else v for v in expected]
    path = write(tmp_path, "a;b\n1.234;1\n2.000;5\n;1.000,5\n")
    options: dict[str, Any] = {"sep": ";", "decimal": ",", "thousands": ".", "dtype": {"b": "float32"}}
    found, expected = columns(path, **options), pd.read_csv(path, **options)
    np.testing.assert_array_equal(found["a"], expected["a"])
    np.testing.assert_array_equal(found["b"], expected["b"])


def test_files_agree_on_types(tmp_path: Path) -> None:
    paths = [write(tmp_path, f"a,b\n{value},1\n", f"{i}.csv") for i, value in enumerate(["1", "2.5", ""])]
    for size in (1, 2, 4):
        (found, *_) = on_ranks(size, lambda ranks: index_collectively(paths, None, ranks))
        assert found.fields["a"].dtype == np.float64
        assert found.fields["b"].dtype == np.int64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n3,4,5\n", r"line 3 has too many fields, column 3(.|\n)*table\.csv"),
        ("a,b,c\n1,2,,4\n,5\n0,6,7\n", "line 2 has too many fields, column 4"),  # not all have row labels
        ('a,b\n1,"2\n3,4\n', r"quote in line 2, column 2, is not closed(.|\n)*table\.csv"),
        ("a,b\n1,2\n3,\0\n", r"NUL byte in line 3, column 2(.|\n)*table\.csv"),
        ("", r"empty(.|\n)*table\.csv(.|\n)*line 1, column 1(.|\n)*remedy: leave the file out"),
        ("\n\n", r"empty(.|\n)*table\.csv"),
        ("a,b\n", r"header and no records(.|\n)*line 2, column 1(.|\n)*table\.csv"),
    ],
)
def test_errors_name_line_and_column(ranks: Pools, tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    for size in (1, 3):
        outcomes = ranks(size).outcomes(_load, path)
        assert len({str(error) for error in outcomes}) == 1
        with pytest.raises(DataError, match=message):
            raise outcomes[-1]


def _load(comm: MPI.Intracomm, path: str, **options: Any) -> Any:
    return open_dataset(path, comm=comm, **options).load()


def test_missing_fields_of_short_records_are_missing_values(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b,c\n1,2,3\n4\n5,6\n")
    with pytest.warns(UserWarning, match="line 3: 1 of 3"):
        rows = columns(path)
    np.testing.assert_array_equal(rows["b"], [2, np.nan, 6])


def test_missing_values_of_all_types(tmp_path: Path) -> None:
    path = write(tmp_path, "i,f,d,b,s\n1,,2020-01-01,true,\n,2.5,,,x\n3,4,2020-01-01,false,y\n")
    new_year = pd.Timestamp("2020-01-01").timestamp()
    found = open_dataset(path, comm=MPI.COMM_SELF, missing=-9).load()
    assert {name: array.tolist() for name, array in found.items()} == {
        "i": [1, -9, 3],
        "f": [-9, 2.5, 4],
        "d": [new_year, -9, new_year],
        "b": [1, -9, 0],
        "s": [b"", b"x", b"y"],
    }
    assert open_dataset(path, comm=MPI.COMM_SELF, missing="drop").load()["i"].tolist() == [3]
    masked = open_dataset(path, comm=MPI.COMM_SELF, inputs=["f", "f_mask"], missing="mask").load()
    assert masked["f_mask"].tolist() == [False, True, True]


def test_text_where_a_number_was_requested(tmp_path: Path) -> None:
    path = write(tmp_path, 'a,b\n1,2\n3,"x\ny"\n5,z\n')
    found = index(path, dtype={"b": "float64"})
    with pytest.raises(DataError, match=r"line 3, column 2(.|\n)*'b'(.|\n)*double"):
        every_row(found, "b")
    found = index(write(tmp_path, "a,b\n1,2\n3,\n"), dtype={"b": "int32"})
    with pytest.raises(DataError, match="record 2, column 2"):
        every_row(found, "b")


def test_options_are_checked(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b\n1,2\n")
    with pytest.raises(DataError, match=r"no option 'seperator'(.|\n)*'sep"):
        index(path, seperator=";")
    refused: list[dict[str, Any]] = [
        {"sep": "\\d+"},
        {"thousands": "."},
        {"infer": "all"},
        {"skiprows": -1},
        {"header": "yes"},
        {"header": -1},
    ]
    encodings = ("klingon", "hex", "cp037", "utf-7", "iso2022_jp", "hz", "shift_jisx0213")
    refused += [{"encoding": name} for name in encodings] + [{"names": ["a", "a"]}, {"date_format": "%H:%M:%S.%f"}]
    for options in refused:
        with pytest.raises(DataError, match=f"{next(iter(options))}= has no such value"):
            index(path, **options)
    with pytest.raises(DataError, match="no record with the names"):
        index(path, header=2)
    with pytest.raises(DataError, match="no such type"):
        index(path, dtype={"a": "complex128"})
    assert columns(path, usecols=np.array([1]), na_values=np.float32(2), skiprows=np.int64(0), encoding="utf_8_sig")
    for options in ({"usecols": ["c"]}, {"dtype": {"c": "str"}}):
        with pytest.raises(FieldNotFound, match="'c'"):
            index(path, **options)


def _stacked(comm: MPI.Intracomm, path: str) -> tuple[Any, Any]:
    data = open_dataset(path, comm=comm, inputs=["x", "id"], targets="good", stack=True)
    batches = list(data.batches(12, shuffle=True, seed=1))
    assert data.schema["inputs"].attributes["columns"] == ["x", "id"]
    return [np.concatenate(side) for side in zip(*batches, strict=True)]


@pytest.mark.parametrize("size", (1, 2, 3))
def test_columns_as_one_matrix(ranks: Pools, tmp_path: Path, size: int) -> None:
    _files(tmp_path)
    table = pd.concat(_frames())
    for x, y in ranks(size).run(_stacked, str(tmp_path / "*.csv")):
        assert x.dtype == np.float64
        numbers = x[:, 1].astype(int)
        np.testing.assert_array_equal(x[:, 0], table["x"].to_numpy()[numbers])
        np.testing.assert_array_equal(y, numbers % 2 == 0)
    with pytest.raises(DataError, match=r"does not fit into a matrix(.|\n)*'text'"):
        open_dataset(str(tmp_path / "*.csv"), comm=MPI.COMM_SELF, inputs=["x", "text"], stack=True)


def test_a_byte_order_mark_inside_a_text_is_text(tmp_path: Path) -> None:
    path = tmp_path / "marks.csv"
    path.write_bytes(b"a,b\n" + "".join(f"\ufeffx{i},{i}\n" for i in range(40)).encode())
    expected = pd.read_csv(path)["a"].tolist()
    assert [text.decode() for text in open_dataset(str(path)).load()["a"]] == expected


@pytest.mark.parametrize(
    "text", ['""', '""\n', '# prose\n""', '""\n""\n', 'x\n" "\ny\n \n', '" "\nx\n"a\n "\n', '1\n""\n\t\n2']
)
def test_a_quoted_field_alone_is_a_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    found = open_dataset(path, header=None, names=["x"], comm=MPI.COMM_SELF).load()["x"]
    wanted = pd.read_csv(path, header=None, names=["x"], comment="#")["x"]
    if found.dtype == object:
        found, wanted = [value.decode() for value in found], wanted.fillna("")
    np.testing.assert_array_equal(found, wanted.to_numpy())


@pytest.mark.parametrize("text", ["a,b\nx,2\n\f\n3,4\n", "a\nx\n\f\ny\n", "a\n\x1c\n\f\n"])
def test_a_line_of_other_space_is_a_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(text)
    found = open_dataset(path, comm=MPI.COMM_SELF).load()
    assert [value.decode() for value in found["a"]] == pd.read_csv(path)["a"].tolist()
