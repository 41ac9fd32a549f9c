"""Records of texts full of quotes and newlines, split at every possible destination, against Python's csv."""

from __future__ import annotations

import csv
import io
import tracemalloc
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from matex_data.errors import DataError
from matex_data.readers.csv import blocks as csv_blocks
from matex_data.readers.csv.blocks import RecordScanner, scan_together
from matex_data.readers.csv.dialect import SPACES, Dialect
from matex_data.readers.csv.records import line_ends, positions, scan
from matex_data.readers.ranks import SingleRank
from tests.support.simulated import on_ranks

PIECES = ["a", "bc", ",", ",", '"', '"', '""', "\n", "\r\n", "\r", "é", '"\n', ',"', '",', '"\r\n"']
TEXTS = st.lists(st.sampled_from(PIECES), min_size=1, max_size=30).map("".join)
COMMA = Dialect()


def python_records(text: str, dialect: Dialect = COMMA) -> list[list[str]]:
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=dialect.sep,
        quotechar=dialect.quotechar,
        quoting=csv.QUOTE_MINIMAL if dialect.quotechar else csv.QUOTE_NONE,
        escapechar=dialect.escapechar,
    )
    return [record for record in reader if record]


def records_from(text: str, starts: Any) -> list[list[str]]:
    """Each record parsed alone, given where it begins; what follows it up to the next one is blank."""
    data = text.encode()
    found = []
    for begin, end in pairwise([*np.asarray(starts).tolist(), len(data)]):
        alone = python_records(data[begin:end].decode())
        assert len(alone) == 1
        found += alone
    return found


def as_bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)


@settings(max_examples=500, deadline=None)
@given(TEXTS)
@example('a,b"c\n"d\n')
@example('"a""b"c"\n"\r"\n')
def test_records_are_those_of_python(text: str) -> None:
    found = scan(as_bytes(text), False, COMMA)
    assert records_from(text, found.starts) == python_records(text)


@settings(max_examples=300, deadline=None)
@given(TEXTS)
def test_a_text_split_behind_any_line(text: str) -> None:
    data = as_bytes(text)
    whole = scan(as_bytes(text), False, COMMA)
    for end in line_ends(data).tolist():
        head = scan(data[:end], False, COMMA)
        tail = scan(data[end:], head.inside, COMMA)
        assert np.concatenate([head.starts, tail.starts + end]).tolist() == whole.starts.tolist()
        assert np.concatenate([head.ends, tail.ends + end]).tolist() == whole.ends.tolist()
        assert tail.inside == whole.inside


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.integers(1, 9), st.integers(1, 12), st.integers(1, 16))
def test_a_text_fed_in_chunks_of_any_size(text: str, chunk: int, piece: int, step: int) -> None:
    data = as_bytes(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_blocks, "PIECE_BYTES", piece)
        tally = RecordScanner(0, step, COMMA, inside=False)
        for at in range(0, len(data), chunk):
            tally.feed(data[at : at + chunk], last=at + chunk >= len(data))
    _check(text, tally, step)


def _check(text: str, tally: RecordScanner, step: int) -> None:
    """The blocks begin with the first record in every ``step`` bytes."""
    whole = scan(as_bytes(text), False, COMMA)
    assert tally.rows == len(whole.starts) == len(python_records(text))
    assert tally.lines == len(whole.ends)
    assert tally.inside == whole.inside
    assert not whole.inside or tally.opened == whole.opened
    assert tally.offset == len(text.encode())
    offset, first, line = tally.columns()
    starts = whole.starts.tolist()
    expected = [i for i, start in enumerate(starts) if i == 0 or start // step != starts[i - 1] // step]
    assert first.tolist() == expected
    assert offset.tolist() == [starts[i] for i in expected]
    assert line.tolist() == [int((whole.ends <= starts[i]).sum()) for i in expected]


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS, st.integers(1, 7), st.integers(1, 9), st.integers(2, 40))
@example('"\n,"\n"\n,"\n"\n,"\n"\n,"', 4, 3, 40)  # looks like fields of newlines, or like commas between quotes
def test_a_text_scanned_by_ranks(tmp_path: Path, text: str, size: int, read: int, probe: int) -> None:
    path = tmp_path / "text.csv"
    path.write_bytes(text.encode())
    total, step = len(text.encode()), 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_blocks, "READ_BYTES", read)
        patch.setattr(csv_blocks, "PROBE_BYTES", probe)
        patch.setattr(csv_blocks, "PIECE_BYTES", 5)
        patch.setattr(csv_blocks, "block_bytes", lambda size: step)
        tallies = on_ranks(size, lambda ranks: scan_together(str(path), 0, 0, total, COMMA, ranks))
    for tally in tallies:
        _check(text, tally, step)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([(b"\n", 1), (b"a", 1), (b"ab", 40), (b"\n", 9), (b"b", 7)]), max_size=40))
def test_positions_of_a_byte(pieces: list[tuple[bytes, int]]) -> None:
    data = np.frombuffer(b"".join(piece * count for piece, count in pieces), np.uint8)
    assert positions(data, ord("\n")).tolist() == np.flatnonzero(data == ord("\n")).tolist()


def test_no_memory_of_the_size_of_a_piece_is_asked_for_again() -> None:
    data = np.frombuffer((b"1.25," * 60 + b"\n") * 2000, np.uint8)
    scan(data, False, COMMA)
    tracemalloc.start()
    try:
        scan(data, False, COMMA)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(data) / 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("failing", [1, 3, 6])
def test_a_read_that_fails_while_others_are_looked_at(tmp_path: Path, size: int, failing: int) -> None:
    path = tmp_path / "text.csv"
    path.write_bytes(b"1,2\n" * 100)
    reads = [0] * size

    def scanned(ranks: Any) -> str:
        read = ranks.read

        def failing_read(*what: Any) -> None:
            read(*what)
            reads[ranks.rank] += 1
            if reads[ranks.rank] == failing and ranks.rank == size - 1:
                raise DataError("the disk is broken")

        ranks.read = failing_read
        with pytest.raises(DataError) as raised:
            scan_together(str(path), 0, 0, 400, COMMA, ranks)
        return str(raised.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(csv_blocks, "READ_BYTES", 10)
        assert set(on_ranks(size, scanned)) == {"the disk is broken"}
    assert len(set(reads)) == 1


def test_a_file_that_has_become_shorter(tmp_path: Path) -> None:
    path = tmp_path / "text.csv"
    path.write_bytes(b"1,2\n" * 10)
    with pytest.raises(DataError, match="shorter") as raised:
        scan_together(str(path), 0, 0, 44, COMMA, SingleRank())
    assert raised.value.byte == 40


FIELDS = st.lists(st.sampled_from(["a", ",", '"', "\\", "\n", "\r\n", "é"]), max_size=6).map("".join)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(FIELDS, min_size=2, max_size=3), min_size=1, max_size=8))
def test_escaped_quotes(rows: list[list[str]]) -> None:
    dialect = Dialect(escapechar="\\")
    file = io.StringIO(newline="")
    csv.writer(file, quoting=csv.QUOTE_ALL, escapechar="\\", doublequote=False).writerows(rows)
    found = scan(as_bytes(file.getvalue()), False, dialect)
    assert len(found.starts) == len(rows)
    assert not found.inside


def test_comments_and_blank_lines_are_no_records() -> None:
    text = '# a "comment\n1,2\n   \n\t\n3,4 # "five\n#\n  # six\n"# 7\n",8\n'
    found = scan(as_bytes(text), False, Dialect(comment="#"))
    assert [text[start] for start in found.starts] == ["1", "3", '"']
    assert not found.inside


def test_blanks_that_separate_begin_a_record_only_with_something_behind_them() -> None:
    text = "  1 2\n   \n\t3\t4\n"
    found = scan(as_bytes(text), False, Dialect(sep=SPACES))
    assert found.starts.tolist() == [0, 10]
    found = scan(as_bytes(text), False, Dialect(sep="\t"))
    assert found.starts.tolist() == [0, 10]


def test_without_quotes_every_line_is_a_record() -> None:
    text = 'a"b\n"c\nd"\n'
    found = scan(as_bytes(text), False, Dialect(quotechar=None))
    assert found.starts.tolist() == [0, 4, 7]
    assert not found.inside
