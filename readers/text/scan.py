"""Positions of the events in a text, found by one rank, or by all ranks of which each scans a segment.

Unlike the lines of a CSV file, an event begins with bytes that occur nowhere else but in comments. So a rank scans its
segment as if no comment were open where it begins; where one was, it scans the segment again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from matex_data._types import Bytes, Integers
from matex_data.readers.collective import IndexingRanks

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


class Scanner:
    """Scanner of consecutive bytes of a text.

    Parameters
    ----------
    offset : byte of the text where the segment begins.
    stop : byte where it ends; a mark belongs to the segment in which it begins.
    comment : bytes that close the comment in which the segment begins; b"" outside of comments.

    Attributes
    ----------
    starts : bytes where events begin, by call.
    end : byte of the first mark of the end; -1 if there is none.
    extra : positions of the ``extra`` marks.
    """

    def __init__(self, syntax: EventSyntax, offset: int, stop: int, comment: bytes = b"") -> None:
        self.comment = comment
        self.end = -1
        self.starts: list[int] = []
        self.extra: list[int] = []
        self._syntax = syntax
        self._pattern = re.compile(syntax.pattern)
        self._offset = offset
        self._stop = stop
        self._kept = b""

    def feed(self, data: bytes, last: bool) -> None:
        """Scan the next bytes; ``last``: no further bytes follow."""
        text = self._kept + data
        limit = len(text) if last else max(0, len(text) - MARK_BYTES)
        limit = min(limit, self._stop - self._offset)
        done = 0
        while done < limit:
            if self.comment:
                at = text.find(self.comment, done, limit + len(self.comment) - 1)
                if at < 0:
                    break
                done, self.comment = at + len(self.comment), b""
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
            self.comment = _COMMENTS[mark]
        elif kind == "event":
            self.starts.append(at + self._syntax.lead)
        elif kind == "extra":
            self.extra.append(at)
        elif self.end < 0:
            self.end = at


def event_starts(syntax: EventSyntax, text: bytes) -> list[int]:
    """Return the bytes where the events of a whole text begin."""
    scanner = Scanner(syntax, 0, len(text))
    scanner.feed(text, last=True)
    return scanner.starts


def block_bytes(size: int) -> int:
    """Return the bytes of a block, for a text of ``size`` bytes: large blocks parse faster, many shuffle better."""
    target = max(4 << 10, min(256 << 10, size // 64), size // MAX_BLOCKS)
    return 1 << (target - 1).bit_length()


def scan_text(text: Bytes, offset: int, syntax: EventSyntax) -> Events:
    """Find the events of a text in memory from byte ``offset`` on."""
    scanner = Scanner(syntax, offset, len(text))
    for begin in range(offset, len(text), READ_BYTES):
        scanner.feed(text[begin : begin + READ_BYTES].tobytes(), last=begin + READ_BYTES >= len(text))
    return _join([_Segment.of(scanner, scanner.end, block_bytes(len(text)))], scanner.end, offset, len(text))


def scan_file(path: str, offset: int, size: int, syntax: EventSyntax, ranks: IndexingRanks) -> Events:
    """Find the events of a large file, of which each rank scans one segment. *Collective*.

    Parameters
    ----------
    offset : byte before which there are no events.
    size : of the file, in bytes.
    """
    borders = [offset + (size - offset) * rank // ranks.size for rank in range(ranks.size + 1)]
    comments = [b""] * ranks.size
    while True:
        scanner = Scanner(syntax, borders[ranks.rank], borders[ranks.rank + 1], comments[ranks.rank])
        _scan_segment(scanner, path, borders, size, ranks)
        found = [b"", *ranks.allgather(scanner.comment)[:-1]]
        if found == comments:
            break
        comments = found
    end = min((end for end in ranks.allgather(scanner.end) if end >= 0), default=-1)
    return _join(ranks.allgather(_Segment.of(scanner, end, block_bytes(size))), end, offset, size)


def _scan_segment(scanner: Scanner, path: str, borders: Sequence[int], size: int, ranks: IndexingRanks) -> None:
    """Scan this rank's segment, and the bytes behind it that its last mark may have. *Collective*."""
    begin, end = borders[ranks.rank], min(borders[ranks.rank + 1] + MARK_BYTES, size)
    longest = max(b - a for a, b in pairwise(borders)) + MARK_BYTES
    memory = np.empty(READ_BYTES, np.uint8)
    error: Exception | None = None
    for _ in range(-(-longest // READ_BYTES)):
        data = memory[: min(READ_BYTES, end - begin)]
        try:
            ranks.read(path, begin, data)
            begin += len(data)
            if len(data) and error is None:
                scanner.feed(data.tobytes(), last=begin == end)
        except Exception as raised:  # the other ranks need this one for the rest of the reads
            error = error or raised
    ranks.agree(error)


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
    def of(cls, scanner: Scanner, end: int, step: int) -> _Segment:
        """Return the events before byte ``end`` in blocks of ``step`` bytes; -1: all events."""
        starts = np.array(scanner.starts, np.int64)
        extra = len(scanner.extra)
        counted = starts[starts < end] if end >= 0 else starts
        block = _first_of_each(counted // step)
        return cls(counted[block], block, len(counted), extra, step, len(starts) - len(counted))


def _join(segments: Sequence[_Segment], end: int, begin: int, size: int) -> Events:
    """Join neighbouring segments of a text that ends at byte ``end``, or at ``size`` without the mark of its end.

    The first block begins at byte ``begin``: what stands before the first event is read and checked with it.
    """
    before = np.cumsum([0, *(segment.count for segment in segments)])
    offset = np.concatenate([segment.offset for segment in segments])
    first = np.concatenate([segment.first + before[i] for i, segment in enumerate(segments)])
    block = _first_of_each(offset // segments[0].step)
    offset[:1] = begin
    return Events(
        np.append(offset[block], end if end >= 0 else size).astype(np.int64),
        np.append(first[block], before[-1]).astype(np.int64),
        end >= 0,
        sum(segment.extra for segment in segments),
        sum(segment.behind for segment in segments),
    )


def _first_of_each(values: Integers) -> Integers:
    """Return the positions where ascending values begin to repeat, int64[n]."""
    return np.flatnonzero(np.diff(values, prepend=-1))
