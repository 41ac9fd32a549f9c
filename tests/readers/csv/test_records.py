"""Records of texts full of quotes and newlines, split at every possible byte, against Python's csv."""

from __future__ import annotations

import csv
import io
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from matex_data.errors import DataError
from matex_data.readers.collective import SingleRank
from matex_data.readers.csv import records
from matex_data.readers.csv.dialect import SPACES, Dialect
from matex_data.readers.csv.records import Records, RecordScanner, join_segments, line_ends, record_starts, scan_file
from matex_data.readers.text import scan as text_scan
from tests.support.simulated import on_ranks

TOKENS = ["a", "bc", ",", ",", '"', '"', '""', "\n", "\r\n", "\r", "é", '"\n', ',"', '",', '"\r\n"']
TEXTS = st.lists(st.sampled_from(TOKENS), min_size=1, max_size=30).map("".join)
COMMA = Dialect()


def python_records(text: str) -> list[list[str]]:
    return [record for record in csv.reader(io.StringIO(text, newline="")) if record]


def records_from(text: str, starts: Any) -> list[list[str]]:
    """Parse each record alone, with the blank lines between it and the next one."""
    data = text.encode()
    found = []
    for begin, end in pairwise([*np.asarray(starts).tolist(), len(data)]):
        alone = python_records(data[begin:end].decode())
        assert len(alone) == 1
        found += alone
    return found


def as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


def scan(text: str | np.ndarray, inside: bool = False, dialect: Dialect = COMMA) -> tuple[np.ndarray, bool, int]:
    data = as_bytes(text) if isinstance(text, str) else text
    return record_starts(data, line_ends(data), inside, dialect)


@given(TEXTS)
@example('a,b"c\n"d\n')
@example('"a""b"c"\n"\r"\n')
def test_records_are_those_of_python(text: str) -> None:
    assert records_from(text, scan(text)[0]) == python_records(text)


@given(TEXTS)
def test_a_text_split_behind_any_line(text: str) -> None:
    data = as_bytes(text)
    starts, inside, _ = scan(text)
    for end in line_ends(data).tolist():
        head_starts, head_inside, _ = scan(data[:end])
        tail_starts, tail_inside, _ = scan(data[end:], head_inside)
        assert np.concatenate([head_starts, tail_starts + end]).tolist() == starts.tolist()
        assert np.concatenate([line_ends(data[:end]), line_ends(data[end:]) + end]).tolist() == line_ends(data).tolist()
        assert tail_inside == inside


@given(TEXTS, st.integers(1, 12), st.integers(1, 16))
def test_a_text_scanned_in_reads_of_any_size(text: str, size: int, step: int) -> None:
    data = as_bytes(text)
    scanner = RecordScanner(0, step, COMMA)
    for at in range(0, len(data), size):
        scanner.feed(data[at : at + size], last=at + size >= len(data))
    _check(text, join_segments([scanner], 0), step)
    assert scanner.lines == len(line_ends(data))


def _check(text: str, found: Records, step: int) -> None:
    """Blocks begin with the first record in every ``step`` bytes."""
    starts, inside, open_quote = scan(text)
    assert found.count == len(starts) == len(python_records(text))
    assert found.open_quote == open_quote
    assert inside or open_quote == -1
    assert found.offset[-1] == len(text.encode())
    expected = [i for i, start in enumerate(starts) if i == 0 or start // step != starts[i - 1] // step]
    assert found.first.tolist() == [*expected, len(starts)]
    assert found.offset[:-1].tolist() == starts[expected].tolist()
    assert found.line.tolist() == [int((line_ends(as_bytes(text)) <= starts[i]).sum()) for i in expected]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.integers(1, 7), st.integers(1, 9), st.integers(2, 40))
@example('"\n,"\n"\n,"\n"\n,"\n"\n,"', 4, 3, 40)  # looks like fields of newlines, or like commas between quotes
def test_a_text_scanned_by_ranks(tmp_path: Path, text: str, size: int, read: int, probe: int) -> None:
    path = tmp_path / "text.csv"
    path.write_bytes(text.encode())
    total, step = len(text.encode()), 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_scan, "READ_BYTES", read)
        patch.setattr(records, "PROBE_BYTES", probe)
        patch.setattr(records, "block_bytes", lambda size: step)
        by_rank = on_ranks(size, lambda ranks: scan_file(str(path), 0, 0, total, COMMA, ranks))
    for found in by_rank:
        _check(text, found, step)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("failing", [1, 3, 6])
def test_a_read_that_fails_on_one_rank(tmp_path: Path, size: int, failing: int) -> None:
    path = tmp_path / "text.csv"
    path.write_bytes(b"1,2\n" * 100)
    reads = [0] * size

    def scanned(ranks: Any) -> str:
        read = ranks.read

        def failing_read(*arguments: Any) -> None:
            read(*arguments)
            reads[ranks.rank] += 1
            if reads[ranks.rank] == failing and ranks.rank == size - 1:
                raise DataError("the disk is broken")

        ranks.read = failing_read
        with pytest.raises(DataError) as raised:
            scan_file(str(path), 0, 0, 400, COMMA, ranks)
        return str(raised.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_scan, "READ_BYTES", 10)
        assert set(on_ranks(size, scanned)) == {"the disk is broken"}
    assert len(set(reads)) == 1


def test_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    path = tmp_path / "text.csv"
    path.write_bytes(b"1,2\n" * 10)
    with pytest.raises(DataError, match="shorter") as raised:
        scan_file(str(path), 0, 0, 44, COMMA, SingleRank())
    assert raised.value.byte == 40


FIELDS = st.lists(st.sampled_from(["a", ",", '"', "\\", "\n", "\r\n", "é"]), max_size=6).map("".join)


@given(st.lists(st.lists(FIELDS, min_size=2, max_size=3), min_size=1, max_size=8))
def test_escaped_quotes(rows: list[list[str]]) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL, escapechar="\\", doublequote=False).writerows(rows)
    starts, inside, _ = scan(file.getvalue(), dialect=Dialect(escapechar="\\"))
    assert len(starts) == len(rows)
    assert not inside


def test_comments_and_blank_lines_are_no_records() -> None:
    text = '# a "comment\n1,2\n   \n\t\n3,4 # "five\n#\n  # six\n"# 7\n",8\n'
    starts, inside, _ = scan(text, dialect=Dialect(comment="#"))
    assert [text[start] for start in starts] == ["1", "3", '"']
    assert not inside


def test_separating_blanks_begin_a_record_only_before_a_field() -> None:
    text = "  1 2\n   \n\t3\t4\n"
    assert scan(text, dialect=Dialect(sep=SPACES))[0].tolist() == [0, 10]
    assert scan(text, dialect=Dialect(sep="\t"))[0].tolist() == [0, 10]


def test_without_quotes_every_line_is_a_record() -> None:
    starts, inside, _ = scan('a"b\n"c\nd"\n', dialect=Dialect(quotechar=None))
    assert starts.tolist() == [0, 4, 7]
    assert not inside
