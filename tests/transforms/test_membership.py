"""Values in lists, ``field in [...]``, compared with one comparison for each value of the list."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from matex_data import DataError, FormatError, open_dataset
from matex_data.fields import Field
from matex_data.io.counters import process_profile
from matex_data.transforms.evaluation import FEW_TEXTS, Values, evaluate
from matex_data.transforms.expressions import parse

INTEGERS = st.sampled_from([0, 1, 2, -1, 255, 2**24 + 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, 10**30])
NUMBERS = st.one_of(
    *(INTEGERS, st.integers(-3, 3), st.booleans(), st.sampled_from([0.1, 0.5, 1e300, 2.0**53, 2.0**63, -0.0])),
    st.sampled_from(["nan", "-1", "-0.5", "1 + 1", "x", "-True"]),
)
TEXTS = st.text(st.sampled_from("ab\0é"), max_size=3)
DTYPES = ("?", "i1", "u2", "i8", "u8", "f2", "f4", "f8")


def each(field: str, values: list[str], negative: bool) -> str:
    """Return the expression that compares a field with each value."""
    tests = " | ".join(f"({field} == {value})" for value in values)
    return f"~({tests})" if negative else tests


def check(field: str, values: list[str], negative: bool, fields: dict[str, Values]) -> None:
    """Compare a test of membership with the comparisons."""
    whole = parse(f"{field} {'not ' * negative}in [{', '.join(values)}]")
    found = evaluate(whole, fields)
    expected = evaluate(parse(each(field, values, negative)), fields)
    np.testing.assert_array_equal(found.content, expected.content)
    assert found.content.dtype == bool and found.shape == expected.shape


@given(st.lists(NUMBERS, min_size=1, max_size=30), st.sampled_from(DTYPES), st.booleans(), st.booleans())
def test_numbers(numbers: list[Any], dtype: str, negative: bool, is_part: bool) -> None:
    held = [*range(4), 0.1, 0.5, -1, 2**24 + 1, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), np.nan, np.inf]
    kind = np.dtype(dtype)
    if kind.kind == "f":
        with np.errstate(over="ignore"):
            content = np.array(held, "f8").astype(dtype)
    else:
        low, high = (0, 1) if kind.kind == "b" else (np.iinfo(kind).min, min(np.iinfo(kind).max, 2**63 - 1))
        content = np.array([n for n in held if isinstance(n, int) and low <= n <= high], kind)
    numbers = [n for n in numbers if kind.kind != "b" or not isinstance(n, int) or abs(n) < 2**63] or [1]
    fields = {"x": Values(content), "y": Values(np.zeros(len(content), "f4"))}
    check("x + y" if is_part else "x", [str(number) for number in numbers], negative, fields)


@given(st.lists(TEXTS, min_size=1, max_size=3 * FEW_TEXTS), st.sampled_from("OSUc"), st.booleans())
def test_texts(texts: list[str], kind: str, negative: bool) -> None:
    held = ["", "a", "b", "ab", "aab", "é", "bé"]
    field = None
    if kind == "c":
        field = Field("x", (), np.dtype("i1"), attributes={"categories": held[1:]})
        content: Any = np.arange(-2, 6, dtype="i1")
    else:
        content = np.array(held if kind == "U" else [text.encode() for text in held], kind)
    check("x", [repr(text) for text in texts], negative, {"x": Values(content, field=field)})


@pytest.mark.parametrize("where", ["x in ['a', 1]", "x in ['a', nan]", "x < ['a']", "1 in ['a']", "x in [None]"])
def test_lists_that_fit_no_field(where: str) -> None:
    with pytest.raises(FormatError):
        evaluate(parse(where), {"x": Values(np.array([b"a", b"b"], object))})


def test_lists_of_several_numbers_and_elements() -> None:
    fields = {"pt": Values(np.array([1.0, 2.0, 3.0, np.nan]), np.array([1, 0, 3])), "n": Values(np.arange(3))}
    for name in ("pt", "sum(pt)", "pt[pt not in [2, 7]]", "max(pt) + n", "pt[0]"):
        found, expected = (
            evaluate(parse(text), fields)
            for text in (f"{name} in [1, 3, 5.5, n]", each(name, ["1", "3", "5.5", "n"], False))
        )
        np.testing.assert_array_equal(found.content, expected.content)
        np.testing.assert_array_equal(found.lengths, expected.lengths)


def _selected(comm: MPI.Intracomm, path: str, where: str) -> tuple[list[int], int]:
    """Return the selected rows of all ranks, and how many bytes all ranks have read to select them."""
    before = process_profile().bytes
    data = open_dataset(path, inputs="n", where=where, comm=comm)
    read = comm.allreduce(process_profile().bytes - before)
    return np.concatenate(comm.allgather(data.load()["n"])).tolist(), read


def test_lists_rule_out_row_groups(tmp_path: Path, ranks: Any) -> None:
    rows = np.arange(40_000)
    table = {"n": rows, "x": pa.array(rows / 2, pa.float32(), mask=rows % 7 == 0), "s": [f"u{n % 9}" for n in rows]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet", row_group_size=1000, compression=None)
    for size in (1, 3):
        run = ranks(size).run
        by_bounds, whole = (
            run(_selected, str(tmp_path / "a.parquet"), where)[0]
            for where in ("(n in [5, 2001, 39999, 70000]) & (x in [2.5, 1000.5])", "~(n not in [5, 2001])")
        )
        assert by_bounds[0] == whole[0] == [5, 2001] and by_bounds[1] < whole[1] / 4


@pytest.mark.parametrize("kind", [int, str])
def test_long_lists_are_one_test(kind: type) -> None:
    """4,000 comparisons of a million texts take 30 s."""
    tree = parse(f"x in {[*map(kind, range(4000))]}").tree
    assert sum(isinstance(node, ast.Compare | ast.BinOp) for node in ast.walk(tree)) == 1


def test_lists_are_no_texts(tmp_path: Path) -> None:
    pq.write_table(pa.table({"l": [["a"], ["b", "c"]], "m": [[["a"]], [["b"], []]]}), tmp_path / "a.parquet")
    for name in ("l", "m"):
        with pytest.raises(DataError, match=f"cannot be evaluated(?s:.)*'{name}'"):
            open_dataset(tmp_path / "a.parquet", where=f"{name} in {[*'abcdefghijk']}", comm=MPI.COMM_SELF)
