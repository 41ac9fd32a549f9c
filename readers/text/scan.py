"""Blocks of whole records of a text, and positions of events, found by one rank or by all, each in a segment.

Unlike the lines of a CSV file, an event begins with bytes that occur nowhere else but in comments. So a rank scans its
segment as if no comment were open where it begins; where one was, it scans the segment again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np

from matex_data._types import Bytes, Integers
from matex_data.readers.collective import IndexingRanks, read_own_ranges


class Borders:
    """Blocks of whole records, as a format finds these one after the other.

    Parameters
    ----------
    least : bytes of a block, or more; the last one may have fewer.

    Attributes
    ----------
    rows : number of records so far.

    Examples
    --------
    >>> borders = Borders(10)
    >>> for end in (6, 12, 18, 24, 30):
    ...     borders.add(end)
    >>> borders.close(31)
    >>> [column.tolist() for column in borders.blocks()]
    [[0, 12, 24], [12, 12, 7], [0, 2, 4, 5]]
    """

    def __init__(self, least: int) -> None:
        self.rows = 0
        self._least = least
        self._begin = 0
        self._ranges: list[tuple[int, int]] = []
        self._edges = [0]

    def add(self, end: int, rows: int = 1) -> None:
        """Add records, of which the last one ends at a byte, where a block ends if it is long enough."""
        self.rows += rows
        if end - self._begin >= self._least:
            self.close(end)

    def close(self, end: int) -> None:
        """End the block at a byte; without records there is none."""
        if self.rows > self._edges[-1]:
            self._ranges.append((self._begin, end - self._begin))
            self._edges.append(self.rows)
        self._begin = end

    def blocks(self) -> tuple[Integers, Integers, Integers]:
        """Return offset and length in bytes of each block, int64[blocks], and the first row of each, and the rows."""
        offset, nbytes = np.array(self._ranges, np.int64).reshape(-1, 2).T.copy()
        return offset, nbytes, np.array(self._edges, np.int64)


READ_BYTES = 4 << 20  # read and scanned by one call
MARK_BYTES = 64  # longest mark
MAX_BLOCKS = 1 << 16
_COMMENTS = {b"<!--": b"-->", b"<![CDATA[": b"]]>"}


@dataclass(frozen=True)
class EventSyntax:
    """Marks in a text by which it is cut into events.

    Parameters
    ----------
    pattern : regular expression with the groups ``event`` (begins an event), ``end`` (of all events), ``begin`` (of a
        comment), ``extra`` (counted). A match has at most ``MARK_BYTES`` bytes. It begins with one certain character,
        by which Python searches ten times as fast.
    lead : bytes of an ``event`` mark before the event itself.
    """

    pattern: bytes
    lead: int = 0


@dataclass(frozen=True)
class Events:
    """Events of a text in blocks.

    Parameters
    ----------
    offset : int64[n + 1], byte where each block begins, and where the last one ends.
    first : int64[n + 1], first event of each block, and the number of events.
    ended : the text has the mark of its end.
    extra : number of ``extra`` marks.
    behind : number of events behind the mark of the end.
    """

    offset: Integers
    first: Integers
    ended: bool
    extra: int
    behind: int = 0

    @property
    def count(self) -> int:
        """Return the number of events."""
        return int(self.first[-1])


class EventScanner:
    """Scanner of consecutive bytes of a text.

    Parameters
    ----------
    offset : byte of the text where the segment begins.
    stop : byte where it ends; a mark belongs to the segment in which it begins.
    comment : bytes that close the comment in which the segment begins; b"" outside of comments.

    Attributes
    ----------
    began, state : ``comment``, and the one that is open behind the last bytes.
    starts : bytes where events begin, by call.
    end : byte of the first mark of the end; -1 if there is none.
    extra : positions of the ``extra`` marks.
    """

    def __init__(self, syntax: EventSyntax, offset: int, stop: int, comment: bytes = b"") -> None:
        self.began = self.state = comment
        self.end = -1
        self.starts: list[int] = []
        self.extra: list[int] = []
        self._syntax = syntax
        self._pattern = re.compile(syntax.pattern)
        self._offset = offset
        self._stop = stop
        self._kept = b""

    def feed(self, data: bytes | Bytes, last: bool) -> None:
        """Scan the next bytes; ``last``: no further bytes follow."""
        text = self._kept + bytes(data)
        limit = len(text) if last else max(0, len(text) - MARK_BYTES)
        limit = min(limit, self._stop - self._offset)
        done = 0
        while done < limit:
            if self.state:
                at = text.find(self.state, done, limit + len(self.state) - 1)
                if at < 0:
                    break
                done, self.state = at + len(self.state), b""
                continue
            match = self._pattern.search(text, done)
            if match is None or match.start() >= limit:
                break
            self._take(match[0], match.lastgroup, self._offset + match.start())
            done = match.end()
        done = max(done, limit)
        self._kept = text[done:]
        self._offset += done

    def _take(self, mark: bytes, kind: str | None, at: int) -> None:
        if kind == "begin":
            self.state = _COMMENTS[mark]
        elif kind == "event":
            self.starts.append(at + self._syntax.lead)
        elif kind == "extra":
            self.extra.append(at)
        elif self.end < 0:
            self.end = at


def event_starts(syntax: EventSyntax, text: bytes) -> list[int]:
    """Return the bytes where the events of a whole text begin."""
    scanner = EventScanner(syntax, 0, len(text))
    scanner.feed(text, last=True)
    return scanner.starts


def block_bytes(size: int) -> int:
    """Return the bytes of a block, for a text of ``size`` bytes: large blocks parse faster, many shuffle better."""
    target = max(4 << 10, min(256 << 10, size // 64), size // MAX_BLOCKS)
    return 1 << (target - 1).bit_length()


def scan_text(text: Bytes, offset: int, syntax: EventSyntax) -> Events:
    """Find the events of a text in memory from byte ``offset`` on."""
    scanner = EventScanner(syntax, offset, len(text))
    for begin in range(offset, len(text), READ_BYTES):
        scanner.feed(text[begin : begin + READ_BYTES], last=begin + READ_BYTES >= len(text))
    return _join([_Segment.of(scanner, scanner.end, block_bytes(len(text)))], scanner.end, offset, len(text))


def scan_file(path: str, offset: int, size: int, syntax: EventSyntax, ranks: IndexingRanks) -> Events:
    """Find the events of a large file, of which each rank scans one segment. *Collective*.

    Parameters
    ----------
    offset : byte before which there are no events.
    size : of the file, in bytes.
    """
    borders = [offset + (size - offset) * rank // ranks.size for rank in range(ranks.size + 1)]
    begin, end = borders[ranks.rank : ranks.rank + 2]
    behind = min(end + MARK_BYTES, size)  # where the last mark may end
    scanner = scan_segment(path, begin, behind, lambda comment: EventScanner(syntax, begin, end, comment or b""), ranks)
    last = min((end for end in ranks.allgather(scanner.end) if end >= 0), default=-1)
    return _join(ranks.allgather(_Segment.of(scanner, last, block_bytes(size))), last, offset, size)


class Scanner(Protocol):
    """Scanner of consecutive bytes of a text: its state where they begin, and behind the last ones."""

    began: Any
    state: Any

    def feed(self, data: Bytes, last: bool) -> None:
        """Scan the next bytes; ``last``: no further bytes follow."""


Scanning = TypeVar("Scanning", bound=Scanner)


def scan_segment(path: str, begin: int, end: int, scanner: Callable[[Any], Scanning], ranks: IndexingRanks) -> Scanning:
    """Return the scanner of this rank's segment of a file, whose state follows from all segments before. *Collective*.

    A rank scans its segment again if it began with another state than that in which the one before ended: one rank more
    is right each time.

    Parameters
    ----------
    begin, end : byte range of the segment.
    scanner : returns a scanner that begins with a state; None: with the probable one.
    """
    ranges = parts_of(begin, end, READ_BYTES)
    found, to_read = scanner(None), ranges
    while True:
        read_own_ranges(ranks, path, to_read, partial(_feed, found, len(ranges)))
        began, ended = zip(*ranks.allgather((found.began, found.state)), strict=True)
        actual = (began[0], *ended[:-1])
        if actual == began:
            return found
        is_other = actual[ranks.rank] != began[ranks.rank]
        found, to_read = (scanner(actual[ranks.rank]), ranges) if is_other else (found, [])


def _feed(scanner: Scanner, count: int, i: int, data: Bytes) -> None:
    """Scan the part ``i`` of ``count`` of a segment."""
    scanner.feed(data, last=i + 1 == count)


def parts_of(begin: int, end: int, most: int) -> list[tuple[int, int]]:
    """Return offset and length of consecutive parts of a byte range, each of ``most`` bytes but for the last one."""
    return [(offset, min(most, end - offset)) for offset in range(begin, end, most)]


@dataclass(frozen=True)
class _Segment:
    """Events of a segment: where its blocks begin, the events before them in the segment, and their number."""

    offset: Integers
    first: Integers
    count: int
    extra: int
    step: int
    behind: int

    @classmethod
    def of(cls, scanner: EventScanner, end: int, step: int) -> _Segment:
        """Return the events before byte ``end`` in blocks of ``step`` bytes; -1: all events."""
        starts = np.array(scanner.starts, np.int64)
        extra = len(scanner.extra)
        counted = starts[starts < end] if end >= 0 else starts
        block = run_starts(counted // step)
        return cls(counted[block], block, len(counted), extra, step, len(starts) - len(counted))


def _join(segments: Sequence[_Segment], end: int, begin: int, size: int) -> Events:
    """Join neighbouring segments of a text that ends at byte ``end``, or at ``size`` without the mark of its end.

    The first block begins at byte ``begin``: what stands before the first event is read and checked with it.
    """
    before = np.cumsum([0, *(segment.count for segment in segments)])
    offset = np.concatenate([segment.offset for segment in segments])
    first = np.concatenate([segment.first + before[i] for i, segment in enumerate(segments)])
    block = run_starts(offset // segments[0].step)
    offset[:1] = begin
    return Events(
        np.append(offset[block], end if end >= 0 else size).astype(np.int64),
        np.append(first[block], before[-1]).astype(np.int64),
        end >= 0,
        sum(segment.extra for segment in segments),
        sum(segment.behind for segment in segments),
    )


def run_starts(values: Integers) -> Integers:
    """Return the positions where ascending values begin to repeat, int64[n]."""
    return np.flatnonzero(np.diff(values, prepend=-1))
