"""Where records begin: the newlines that are not quoted. Pure functions of bytes, and a tally over a stretch of a file.

A quote opens only at the start of a field, and a doubled one stands for itself, as in RFC 4180, Python's csv, pandas
and Arrow. So within quotes or not is all there is to know at the start of a line.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Bytes, Integers
from matex_data.readers.csv.dialect import SPACES, Dialect

LF, CR, SPACE, TAB = 10, 13, 32, 9
NONE: Integers = np.empty(0, np.int64)
MOST_SCRATCH = 8 << 20  # bytes that a thread keeps
_KEPT = threading.local()


@dataclass(frozen=True)
class Found:
    """What a stretch of whole lines holds.

    Parameters
    ----------
    starts : int64[k], where a record begins. Blank lines and comments are none.
    ends : int64[n], first byte behind each line, within quotes or not.
    inside : whether it ends within quotes.
    opened : where it ends within quotes, the one that opens them; -1 if that comes before.
    """

    starts: Integers
    ends: Integers
    inside: bool
    opened: int


def positions(data: Bytes, code: int) -> Integers:
    """int64[n], where a byte stands.

    Eight bytes at a time are looked at first: twice as fast for a byte as rare as the end of a line.
    """
    same = np.equal(data, code, out=_scratch(len(data)))
    if not same.any():
        return NONE
    words = same[: len(data) // 8 * 8].view("<u8")
    found = np.flatnonzero(words != 0)
    if len(found) * 8 > len(words):
        return np.flatnonzero(same)
    left, result = words[found], [np.flatnonzero(same[len(words) * 8 :]) + len(words) * 8]
    while len(left):
        result.append(found * 8 + (np.bitwise_count((left & -left) - np.uint64(1)) >> 3))
        left &= left - np.uint64(1)
        several = np.flatnonzero(left)
        found, left = found[several], left[several]
    return np.sort(np.concatenate(result)) if len(result) > 2 else np.concatenate(result[::-1])


def _scratch(size: int) -> NDArray[np.bool_]:
    """Memory that this thread uses again: what the system gives anew costs twice what is done in it."""
    memory: NDArray[np.bool_] | None = getattr(_KEPT, "memory", None)
    if memory is None or len(memory) < size:
        memory = np.empty(size, bool)
        if size <= MOST_SCRATCH:
            _KEPT.memory = memory
    return memory[:size]


def line_ends(data: Bytes) -> Integers:
    """int64[n], first byte behind every line: LF, CR LF, or CR alone."""
    ends, returns = positions(data, LF), positions(data, CR)
    if len(returns):
        follows = np.append(data, np.uint8(0))[returns + 1] if returns[-1] + 1 == len(data) else data[returns + 1]
        alone = returns[follows != LF]
        if len(alone):
            ends = np.sort(np.concatenate([ends, alone]))
    return ends + 1


def scan(data: Bytes, inside: bool, dialect: Dialect) -> Found:
    """Records of a text that begins at the start of a line, in or out of quotes, and ends with a line or the file."""
    ends, toggles = line_ends(data), _quotes(data, inside, dialect)
    outside = ends
    if len(toggles) or inside:
        outside = ends[(np.searchsorted(toggles, ends) + inside) % 2 == 0]
    first = NONE if inside else np.zeros(1, np.int64)
    starts = np.concatenate([first, outside])
    if len(starts) and starts[-1] == len(data):
        starts = starts[:-1]
    starts = _filled(data, starts, dialect)
    ends_inside = bool((len(toggles) + inside) % 2)
    return Found(starts, ends, ends_inside, _opened(toggles) if ends_inside else -1)


def _opened(toggles: Integers) -> int:
    """The quote that opens what is not closed; -1 if that is none of these. A pair of neighbours is one quote."""
    last = len(toggles) - 1
    while last > 0 and toggles[last] == toggles[last - 1] + 1:
        last -= 2
    return int(toggles[last]) if last >= 0 else -1


def misplaced(data: Bytes, inside: bool, dialect: Dialect) -> int:
    """How many quotes would stand where none belongs, if the bytes began in or out of quotes."""
    if dialect.quotechar is None:
        return int(inside)
    quotes = positions(data, ord(dialect.quotechar))
    opening, closing = quotes[int(inside) :: 2], quotes[1 - int(inside) :: 2]
    allowed = _field_ends(dialect)
    wrong = ~allowed[data[opening[opening > 0] - 1]]
    return int(wrong.sum() + (~allowed[data[closing[closing + 1 < len(data)] + 1]]).sum())


def _field_ends(dialect: Dialect) -> NDArray[np.bool_]:
    """bool[256]: the bytes that may stand beside a quote on its outer side."""
    return _table([*dialect.separators, LF, CR, ord(dialect.quotechar or "\n")])


def _quotes(data: Bytes, inside: bool, dialect: Dialect) -> Integers:
    """Positions of the quotes that open and close fields, in turn."""
    quotes = NONE if dialect.quotechar is None else positions(data, ord(dialect.quotechar))
    if not len(quotes):
        return NONE
    opening = quotes[int(inside) :: 2]
    before = data[opening[opening > 0] - 1]
    plain = dialect.escapechar is None and dialect.comment is None
    if plain and bool(_field_ends(dialect)[before].all()):
        return quotes
    return _in_turn(data.tobytes(), inside, dialect)[0]


def uncommented(text: bytes, dialect: Dialect) -> bytes:
    """The same lines, which begin out of quotes, without the comments in them."""
    if dialect.comment is None or dialect.comment.encode() not in text:
        return text
    if dialect.quotechar is None or dialect.quotechar.encode() not in text:
        before = rb"((?:^|[\r\n])[ \t]*)" if dialect.comment_lines else rb"()[ \t]*"
        return re.sub(before + re.escape(dialect.comment.encode()) + rb"[^\r\n]*", rb"\1", text)
    pieces, at = [], 0
    for begin, end in _in_turn(text, False, dialect)[1]:
        pieces.append(text[at:begin].rstrip(b" \t"))
        at = end
    return b"".join([*pieces, text[at:]])


def _in_turn(text: bytes, inside: bool, dialect: Dialect) -> tuple[Integers, list[tuple[int, int]]]:
    """The same for texts with quotes within unquoted fields or comments, or escaped ones; and where comments are."""
    quote, escape, comment = (ord(c) if c else -1 for c in (dialect.quotechar, dialect.escapechar, dialect.comment))
    data = np.frombuffer(text, np.uint8)
    events = np.flatnonzero((data == quote) | (data == comment)) if comment >= 0 else np.flatnonzero(data == quote)
    before = {*dialect.separators, LF, CR}
    result, comments, skip = [], [], 0  # nothing before ``skip`` counts
    for at in events.tolist():
        if at < skip:
            continue
        if text[at] == comment:
            if not inside and (not dialect.comment_lines or _begins_line(text, at)):
                skip = _line_end(text, at)
                comments.append((at, skip))
        elif escape >= 0 and _escaped(text, at, escape):
            continue
        elif not inside:
            if at == 0 or text[at - 1] in before:
                inside = True
                result.append(at)
        elif at + 1 < len(text) and text[at + 1] == quote:
            skip = at + 2
        else:
            inside = False
            result.append(at)
    return np.array(result, np.int64), comments


def _begins_line(text: bytes, at: int) -> bool:
    begin = max(text.rfind(b"\n", 0, at), text.rfind(b"\r", 0, at)) + 1
    return not text[begin:at].strip(b" \t")


def _line_end(text: bytes, at: int) -> int:
    found = [i for i in (text.find(b"\n", at), text.find(b"\r", at)) if i >= 0]
    return min(found, default=len(text))


def _escaped(text: bytes, at: int, escape: int) -> bool:
    count = 0
    while at - count > 0 and text[at - count - 1] == escape:
        count += 1
    return count % 2 == 1


def _filled(data: Bytes, starts: Integers, dialect: Dialect) -> Integers:
    """Those lines that hold a record: neither blank nor a comment."""
    blank, empty = _line_starts(dialect)
    first = data[starts]
    keep = ~empty[first]
    begins = np.flatnonzero(blank[first])
    if len(begins):
        at = _first_of(data, starts[begins], blank)
        there = at < len(data)
        keep[begins] = there & ~empty[data[np.where(there, at, 0)]]
    return starts if bool(keep.all()) else starts[keep]


@lru_cache
def _line_starts(dialect: Dialect) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """bool[256]: the bytes that may come before a record on its line, and those that make the line hold none."""
    blank = _table(b for b in (SPACE, TAB) if dialect.sep == SPACES or b not in dialect.separators)
    return blank, _table([LF, CR, *([ord(dialect.comment)] if dialect.comment else [])])


def _table(codes: Iterable[int]) -> NDArray[np.bool_]:
    """bool[256]: which bytes are among these."""
    table = np.zeros(256, bool)
    table[list(codes)] = True
    return table


def _first_of(data: Bytes, at: Integers, blank: NDArray[np.bool_]) -> Integers:
    """For every position, that of the next byte that is no blank; the length of the data if there is none."""
    at = at.copy()
    moving = np.arange(len(at))
    while len(moving):
        at[moving] += 1
        moving = moving[at[moving] < len(data)]
        moving = moving[blank[data[at[moving]]]]
    return at
