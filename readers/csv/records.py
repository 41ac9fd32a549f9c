"""Record boundaries: the newlines outside quotes, found in a text in memory or in a large file by all ranks.

A quote opens only at the start of a field, and a doubled quote stands for itself, as in RFC 4180, Python's csv, pandas
and Arrow. So the state of a scanner at the start of a line is one bit: inside quotes or not. Ranks scan segments of a
file at once, each for the probable case; where the segment before ends in the other one, it is scanned again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from matex_data._types import Bytes, Integers
from matex_data.readers.collective import IndexingRanks, read_own_ranges
from matex_data.readers.csv.dialect import CR, LF, Dialect, byte_set
from matex_data.readers.text.scan import block_bytes, parts_of, run_starts, scan_segment

PROBE_BYTES = 64 << 10  # in which a segment looks for its first line
DETECT_BYTES = 64 << 10  # from which the dialect is detected
DETECT_LINES = 10  # from which it is detected if they are longer
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


def first_lines(data: Bytes, ends: Integers) -> Bytes:
    """Return the lines at the beginning of a text from which its dialect is detected; ``ends``: ``line_ends(data)``."""
    beginning = data[: max(DETECT_BYTES, int(ends[:DETECT_LINES].max(initial=0)))]
    return beginning if len(beginning) == len(data) else beginning[: last_line_end(beginning) or None]


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
    quotes = dialect.field_quotes(data, inside)
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


def _without_blank_lines(data: Bytes, starts: Integers, dialect: Dialect) -> Integers:
    """Drop the starts of lines that are blank or comments."""
    blank = byte_set(dialect.blanks)
    empty = byte_set([LF, CR, *(dialect.comment or "").encode()])
    at = starts.copy()
    moving = np.flatnonzero(blank[data[at]])
    while len(moving):
        at[moving] += 1
        moving = moving[at[moving] < len(data)]
        moving = moving[blank[data[at[moving]]]]
    keep = at < len(data)
    keep &= ~empty[data[np.where(keep, at, 0)]]
    return starts[keep]


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


class RecordScanner:
    """Scanner of consecutive bytes of a text.

    Parameters
    ----------
    offset : byte of the text where the segment begins.
    step : bytes; the first record in every ``step`` bytes of the text begins a block.
    inside : the segment begins inside quotes; None: as is probable by its first bytes.

    Attributes
    ----------
    began, state : the segment begins, and the next line does, inside quotes; None: nothing is known of them.
    open_quote : position of the last quote that was open at the end of a line; -1 if there is none.
    count, lines : number of records, and of lines.
    blocks : of the records, by call.
    """

    def __init__(self, offset: int, step: int, dialect: Dialect, inside: bool | None = False) -> None:
        self.offset, self.step, self.dialect = offset, step, dialect
        self.began = self.state = inside
        self.open_quote = self.nul = -1
        self.count = self.lines = 0
        self.blocks: list[BlockColumns] = []
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
        if self.state is None:
            quotes = self.dialect.quotes(data)
            fits = [self.dialect.all_fit(data, quotes, inside) for inside in (False, True)]
            self.began = self.state = fits == [False, True]
        starts, self.state, open_quote = record_starts(data, ends, self.state, self.dialect)
        block = run_starts((starts + self.offset) // self.step)
        lines = np.searchsorted(ends, starts[block], side="right") + self.lines
        self.blocks.append((starts[block] + self.offset, block + self.count, lines))
        self.count += len(starts)
        self.open_quote = open_quote + self.offset if open_quote >= 0 else self.open_quote
        if self.nul < 0 and not data.min():
            self.nul = self.offset + int(np.argmin(data))
        self.encodings &= encodings_of(data)
        self.lines += len(ends)
        self.offset += len(data)


def join_segments(segments: Sequence[RecordScanner], line: int) -> Records:
    """Join neighbouring segments of a text, of which the first begins behind ``line`` lines."""
    count, open_quote = 0, -1
    columns: list[BlockColumns] = [(_EMPTY, _EMPTY, _EMPTY)]
    for segment in segments:
        columns += [(offset, first + count, before + line) for offset, first, before in segment.blocks]
        count, line = count + segment.count, line + segment.lines
        open_quote = max(open_quote, segment.open_quote)
    offset, first, before = (np.concatenate(column) for column in zip(*columns, strict=True))
    block = run_starts(offset // segments[0].step)
    return Records(
        np.append(offset[block], segments[-1].offset),
        np.append(first[block], count),
        before[block],
        open_quote if segments[-1].state else -1,
        next((segment.nul for segment in segments if segment.nul >= 0), -1),
        frozenset.intersection(*(segment.encodings for segment in segments)),
    )


def scan_text(text: Bytes, offset: int, line: int, step: int, dialect: Dialect) -> Records:
    """Find the records of a text in memory from byte ``offset`` on, which ``line`` lines precede."""
    scanner = RecordScanner(offset, step, dialect)
    scanner.feed(text[offset:], last=True)
    return join_segments([scanner], line)


def scan_file(path: str, offset: int, line: int, size: int, dialect: Dialect, ranks: IndexingRanks) -> Records:
    """Find the records of a large file, of which each rank scans one segment. *Collective*.

    Parameters
    ----------
    offset : byte where the first record begins.
    line : lines before it.
    size : of the file, in bytes.
    """
    begin, end = _segment_borders(path, offset, size, ranks)[ranks.rank : ranks.rank + 2]
    first = None if ranks.rank and dialect.quotechar is not None else False

    def scanner(inside: bool | None) -> RecordScanner:
        return RecordScanner(begin, block_bytes(size), dialect, first if inside is None else inside)

    return join_segments(ranks.allgather(scan_segment(path, begin, end, scanner, ranks)), line)


def _segment_borders(path: str, offset: int, size: int, ranks: IndexingRanks) -> list[int]:
    """Return the bytes where the segments of all ranks begin, each with a line, and the size. *Collective*."""
    start = offset + (size - offset) * ranks.rank // ranks.size
    borders = [offset]

    def take(_: int, data: Bytes) -> None:
        borders.extend(start + end for end in line_ends(data[: last_line_end(data)])[:1].tolist())

    read_own_ranges(ranks, path, parts_of(start, min(size, start + PROBE_BYTES * (ranks.rank > 0)), PROBE_BYTES), take)
    found = ranks.allgather(borders[-1])
    return [*np.maximum.accumulate(found).tolist(), size]
