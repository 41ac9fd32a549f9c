"""Record boundaries: the newlines outside quotes, found in a text in memory or in a large file by all ranks.

A quote opens only at the start of a field, and a doubled quote stands for itself, as in RFC 4180, Python's csv, pandas
and Arrow. So the state of a scanner at the start of a line is one bit: inside quotes or not. Ranks scan segments of a
file at once, each for both cases, or for the probable one; the end of each then decides which case holds for the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Bytes, Integers
from matex_data.readers.collective import IndexingRanks
from matex_data.readers.csv.dialect import Dialect

LF, CR = 10, 13
READ_BYTES = 4 << 20  # read and scanned by one call
PROBE_BYTES = 64 << 10  # in which a segment looks for its first line
MAX_BLOCKS = 1 << 16
ENCODINGS = ("utf-8", "cp1252", "iso8859-1")
_UNDEFINED_IN_CP1252 = (0x81, 0x8D, 0x8F, 0x90, 0x9D)
_EMPTY: Integers = np.empty(0, np.int64)

BlockColumns = tuple[Integers, Integers, Integers]
"""Offset, first record, and lines before it, of each block; int64[n]."""


def line_ends(data: Bytes) -> Integers:
    """Return the first byte behind every line, int64[n]; a line ends with LF, CR LF, or CR alone."""
    ends, returns = np.flatnonzero(data == LF), np.flatnonzero(data == CR)
    if len(returns):
        alone = returns[np.append(data, np.uint8(0))[returns + 1] != LF]
        if len(alone):
            ends = np.sort(np.concatenate([ends, alone]))
    return ends + 1


def last_line_end(data: Bytes) -> int:
    """Return the first byte behind the last line that certainly ends, or 0; a CR at the end may precede LF."""
    for start in (max(0, len(data) - PROBE_BYTES), 0):
        tail = data[start:].tobytes()
        end = max(tail.rfind(b"\n"), tail.rfind(b"\r", 0, max(0, len(tail) - 1))) + 1
        if end:
            return start + end
    return 0


def encodings_of(data: Bytes) -> frozenset[str]:
    """Return those of ``ENCODINGS`` that whole lines may be in."""
    if data.max(initial=0) < 128:
        return frozenset(ENCODINGS)
    text, found = data.tobytes(), {"iso8859-1"}
    if not any(code in text for code in _UNDEFINED_IN_CP1252):
        found.add("cp1252")
    try:
        text.decode()
        found.add("utf-8")
    except UnicodeDecodeError:
        pass
    return frozenset(found)


def record_starts(data: Bytes, ends: Integers, inside: bool, dialect: Dialect) -> tuple[Integers, bool, int]:
    """Find the records of a text that begins with a line, and ends with a line or the file.

    Parameters
    ----------
    ends : ``line_ends(data)``.
    inside : the text begins inside quotes.

    Returns
    -------
    starts : int64[n], first byte of each record. Blank lines and comments are no records.
    inside : the text ends inside quotes.
    open_quote : position of the quote that is open at the end; -1 if none is, or if it stands before the text.
    """
    quotes = _field_quotes(data, inside, dialect)
    if len(quotes) or inside:
        ends = ends[(np.searchsorted(quotes, ends) + inside) % 2 == 0]
    starts = ends if inside else np.concatenate([np.zeros(1, np.int64), ends])
    starts = _without_blank_lines(data, starts[starts < len(data)], dialect)
    if (len(quotes) + inside) % 2 == 0:
        return starts, False, -1
    last = len(quotes) - 1
    while last > 0 and quotes[last] == quotes[last - 1] + 1:  # two neighbours are one quote inside quotes
        last -= 2
    return starts, True, int(quotes[last]) if last >= 0 else -1


def _field_quotes(data: Bytes, inside: bool, dialect: Dialect) -> Integers:
    """Return the positions of the quotes that alternately open and close fields, int64[n]."""
    quotes = _quotes(data, dialect)
    if not len(quotes) or _all_fit(data, quotes, inside, dialect):
        return quotes
    return np.array(dialect.quotes_and_comments(data.tobytes(), inside)[0], np.int64)


def _quotes(data: Bytes, dialect: Dialect) -> Integers:
    return _EMPTY if dialect.quotechar is None else np.flatnonzero(data == ord(dialect.quotechar))


def _all_fit(data: Bytes, quotes: Integers, inside: bool, dialect: Dialect) -> bool:
    """Return whether every quote that opens a field, if each opens or closes one, stands behind a separator."""
    if dialect.escapechar is not None or dialect.comment is not None:
        return False
    opening = quotes[int(inside) :: 2]
    neighbours = _byte_set([*dialect.separators, LF, CR, *(dialect.quotechar or "").encode()])
    return bool(neighbours[data[opening[opening > 0] - 1]].all())


def _without_blank_lines(data: Bytes, starts: Integers, dialect: Dialect) -> Integers:
    """Drop the starts of lines that are blank or comments."""
    blank = _byte_set(dialect.blanks)
    empty = _byte_set([LF, CR, *(dialect.comment or "").encode()])
    at = starts.copy()
    moving = np.flatnonzero(blank[data[at]])
    while len(moving):
        at[moving] += 1
        moving = moving[at[moving] < len(data)]
        moving = moving[blank[data[at[moving]]]]
    keep = at < len(data)
    keep &= ~empty[data[np.where(keep, at, 0)]]
    return starts[keep]


def _byte_set(codes: Iterable[int]) -> NDArray[np.bool_]:
    table = np.zeros(256, bool)
    table[list(codes)] = True
    return table


@dataclass(frozen=True)
class Records:
    """Records of a text in blocks.

    Parameters
    ----------
    offset : int64[n + 1], byte where each block begins, and where the text ends.
    first : int64[n + 1], first record of each block, and the number of records.
    line : int64[n], lines before each block.
    open_quote : byte of a quote that is not closed; -1 if there is none.
    nul : first NUL byte; -1 if there is none.
    encodings : that the text may be in.
    """

    offset: Integers
    first: Integers
    line: Integers
    open_quote: int
    nul: int
    encodings: frozenset[str]

    @property
    def count(self) -> int:
        """Return the number of records."""
        return int(self.first[-1])


@dataclass
class _Case:
    """Records of a segment, given whether it begins inside quotes.

    Parameters
    ----------
    began_inside : the segment begins inside quotes.
    inside : the next line does.
    open_quote : position of the last quote that was open at the end of a line; -1 if there is none.
    count : number of records.
    """

    began_inside: bool
    inside: bool
    open_quote: int = -1
    count: int = 0
    blocks: list[BlockColumns] = field(default_factory=list)


class Scanner:
    """Scanner of consecutive bytes of a text.

    Parameters
    ----------
    offset : byte of the text where the segment begins.
    step : bytes; the first record in every ``step`` bytes of the text begins a block.
    any_line : the segment may begin inside quotes; otherwise it begins outside.
    thorough : keep the improbable one of the two cases, which takes five times as long in a text full of quotes.
    """

    def __init__(
        self, offset: int, step: int, dialect: Dialect, any_line: bool = False, thorough: bool = False
    ) -> None:
        self.offset = offset
        self.step = step
        self.dialect = dialect
        self.thorough = thorough
        self.cases = [_Case(False, False), _Case(True, True)] if any_line else [_Case(False, False)]
        self.lines = 0
        self.nul = -1
        self.encodings = frozenset(ENCODINGS)
        self._buffer: Bytes = np.empty(0, np.uint8)  # used again: fresh memory would take twice the time
        self._kept = 0  # bytes of an unfinished line

    def feed(self, data: Bytes, last: bool) -> None:
        """Scan the next bytes; ``last``: they end with a line or the file."""
        size = self._kept + len(data)
        if size > len(self._buffer):
            self._buffer = np.concatenate([self._buffer[: self._kept], np.empty(2 * len(data), np.uint8)])
        self._buffer[self._kept : size] = data
        text = self._buffer[:size]
        stop = size if last else last_line_end(text)
        if stop:
            self._scan(text[:stop])
        self._kept = size - stop
        self._buffer[: self._kept] = text[stop:].copy()
        if last:
            self._buffer = np.empty(0, np.uint8)  # is not sent to other ranks

    def _scan(self, data: Bytes) -> None:
        ends = line_ends(data)
        if len(self.cases) > 1 and not self.thorough:
            quotes = _quotes(data, self.dialect)
            fitting = [case for case in self.cases if _all_fit(data, quotes, case.inside, self.dialect)]
            self.cases = fitting if len(fitting) == 1 else self.cases
        for case in self.cases:
            starts, case.inside, open_quote = record_starts(data, ends, case.inside, self.dialect)
            block = _first_of_each((starts + self.offset) // self.step)
            lines = np.searchsorted(ends, starts[block], side="right") + self.lines
            case.blocks.append((starts[block] + self.offset, block + case.count, lines))
            case.count += len(starts)
            case.open_quote = open_quote + self.offset if open_quote >= 0 else case.open_quote
        if self.nul < 0 and not data.min():
            self.nul = self.offset + int(np.argmin(data))
        self.encodings &= encodings_of(data)
        self.lines += len(ends)
        self.offset += len(data)


def _first_of_each(values: Integers) -> Integers:
    """Return the positions where ascending values begin to repeat, int64[n]."""
    return np.flatnonzero(np.diff(values, prepend=-1))


def matching_cases(segments: Sequence[Scanner]) -> list[_Case] | None:
    """Return the case that holds for each of neighbouring segments; None if a scanner has dropped one of them."""
    cases: list[_Case] = []
    for segment in segments:
        inside = cases[-1].inside if cases else False
        case = next((case for case in segment.cases if case.began_inside == inside), None)
        if case is None:
            return None
        cases.append(case)
    return cases


def join(segments: Sequence[Scanner], cases: Sequence[_Case], line: int) -> Records:
    """Join neighbouring segments of a text, of which the first begins behind ``line`` lines."""
    count, open_quote = 0, -1
    columns: list[BlockColumns] = [(_EMPTY, _EMPTY, _EMPTY)]
    for segment, case in zip(segments, cases, strict=True):
        columns += [(offset, first + count, before + line) for offset, first, before in case.blocks]
        count, line = count + case.count, line + segment.lines
        open_quote = max(open_quote, case.open_quote)
    offset, first, before = (np.concatenate(column) for column in zip(*columns, strict=True))
    block = _first_of_each(offset // segments[0].step)
    return Records(
        np.append(offset[block], segments[-1].offset),
        np.append(first[block], count),
        before[block],
        open_quote if cases[-1].inside else -1,
        next((segment.nul for segment in segments if segment.nul >= 0), -1),
        frozenset.intersection(*(segment.encodings for segment in segments)),
    )


def block_bytes(size: int) -> int:
    """Return the bytes of a block, for a text of ``size`` bytes: large blocks parse faster, many shuffle better."""
    target = max(4 << 10, min(256 << 10, size // 64), size // MAX_BLOCKS)
    return 1 << (target - 1).bit_length()


def scan_text(text: Bytes, offset: int, line: int, step: int, dialect: Dialect) -> Records:
    """Find the records of a text in memory from byte ``offset`` on, which ``line`` lines precede."""
    scanner = Scanner(offset, step, dialect)
    scanner.feed(text[offset:], last=True)
    return join([scanner], scanner.cases, line)


def scan_file(
    path: str, offset: int, line: int, size: int, dialect: Dialect, ranks: IndexingRanks, thorough: bool = False
) -> Records:
    """Find the records of a large file, of which each rank scans one segment. *Collective*.

    Parameters
    ----------
    offset : byte where the first record begins.
    line : lines before it.
    size : of the file, in bytes.
    thorough : scan each segment for both cases, however improbable one is.
    """
    borders = _segment_borders(path, offset, size, ranks)
    begin, end = borders[ranks.rank : ranks.rank + 2]
    any_line = ranks.rank > 0 and dialect.quotechar is not None
    scanner = Scanner(begin, block_bytes(size), dialect, any_line, thorough)
    memory = np.empty(READ_BYTES, np.uint8)
    error: Exception | None = None
    for _ in range(-(-int(np.diff(borders).max()) // READ_BYTES)):
        data = memory[: min(READ_BYTES, end - begin)]
        try:
            ranks.read(path, begin, data)
            begin += len(data)
            if len(data) and error is None:
                scanner.feed(data, last=begin == end)
        except Exception as raised:  # the other ranks need this one for the rest of the reads
            error = error or raised
    ranks.agree(error)
    segments = ranks.allgather(scanner)
    cases = matching_cases(segments)
    if cases is None:  # only in a text that looks quoted where it is not, or the reverse
        return scan_file(path, offset, line, size, dialect, ranks, thorough=True)
    return join(segments, cases, line)


def _segment_borders(path: str, offset: int, size: int, ranks: IndexingRanks) -> list[int]:
    """Return the bytes where the segments of all ranks begin, each with a line, and the size. *Collective*."""
    start = offset + (size - offset) * ranks.rank // ranks.size
    memory = np.empty(min(PROBE_BYTES, size - start) if ranks.rank else 0, np.uint8)
    error: Exception | None = None
    try:
        ranks.read(path, start, memory)
    except Exception as raised:  # every rank has to raise it
        error = raised
    ranks.agree(error)
    ends = line_ends(memory[: last_line_end(memory)])
    found = ranks.allgather(start + int(ends[0]) if len(ends) else offset)
    return [*np.maximum.accumulate(found).tolist(), size]
