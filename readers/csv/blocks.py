"""The sparse row index of a text: where blocks of whole records begin, found by all ranks together.

Each rank scans a stretch that begins behind some newline. Whether that newline is quoted, only the ranks before can
say: so it guesses, and where the guess turns out to be wrong it scans again. The result is the serial one, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from matex_data._types import Bytes, Integers
from matex_data.readers.collective import IndexingRanks
from matex_data.readers.csv.dialect import Dialect
from matex_data.readers.csv.records import NONE, line_ends, misplaced, scan

READ_BYTES = 4 << 20  # of one read
PIECE_BYTES = 512 << 10  # scanned at once: larger ones leave the cache of a core, smaller ones cost more Python
TAIL_BYTES = 4 << 10  # of a piece, in which its last newline is looked for first
PROBE_BYTES = 64 << 10  # in which a stretch looks for its first newline
MOST_BLOCKS = 1 << 16
_UNDEFINED = (0x81, 0x8D, 0x8F, 0x90, 0x9D)  # in Windows-1252


def block_bytes(size: int) -> int:
    """Bytes of a block, about: large ones are faster to parse, many are better to shuffle."""
    target = max(4 << 10, min(256 << 10, size // 64), size // MOST_BLOCKS)
    return 1 << (target - 1).bit_length()


@dataclass
class RecordScanner:
    """Counts the records of a stretch of a text, piece by piece.

    Parameters
    ----------
    offset : where it begins.
    step : the first record in every ``step`` bytes of the text begins a block.
    dialect : of the text.
    inside : whether it begins within quotes; None: to be guessed.
    """

    offset: int
    step: int
    dialect: Dialect
    inside: bool | None = None
    guess: bool = False
    rows: int = 0
    lines: int = 0
    opened: int = -1  # the last quote that opened a field
    nul: int = -1  # the first NUL byte
    utf8: bool = True
    defined: bool = True  # in Windows-1252
    _rest: Bytes = field(default_factory=lambda: np.empty(0, np.uint8))
    blocks: list[tuple[Integers, Integers, Integers]] = field(default_factory=list)
    cell: int = -1  # of the last record

    def feed(self, data: Bytes, last: bool) -> None:
        """The next bytes; ``last``: of the file, or ending with a line."""
        if self.inside is None:
            self.inside = self.guess = _guess(data, self.dialect)
        at = 0
        while at < len(data) or (last and len(self._rest)):
            stop = self._piece(data, at, last)
            if stop < 0:
                break
            piece = data[at:stop]
            self._take(np.concatenate([self._rest, piece]) if len(self._rest) else piece)
            self._rest, at = data[:0], stop
        self._rest = np.concatenate([self._rest, data[at:]])

    def _piece(self, data: Bytes, at: int, last: bool) -> int:
        """Where the piece that begins at ``at`` ends: behind a line, or at the end of the file; -1: nowhere yet."""
        size = PIECE_BYTES
        while True:
            stop = min(at + size, len(data))
            if stop == len(data) and last:
                return stop
            newline = last_newline(data[max(at, stop - TAIL_BYTES) : stop])
            if newline >= 0:
                return max(at, stop - TAIL_BYTES) + newline + 1
            newline = last_newline(data[at:stop])
            if newline >= 0 or stop == len(data):
                return at + newline + 1 if newline >= 0 else -1
            size *= 2

    def _take(self, data: Bytes) -> None:
        if self.nul < 0 and not data.min():
            self.nul = self.offset + int(np.argmin(data))
        self.look_at_bytes(data)
        found = scan(data, bool(self.inside), self.dialect)
        if len(found.starts):
            starts = found.starts + self.offset
            cells = starts // self.step
            fresh = np.flatnonzero(np.concatenate([cells[:1] != self.cell, cells[1:] != cells[:-1]]))
            before = np.searchsorted(found.ends, found.starts[fresh], side="right")
            self.blocks.append((starts[fresh], fresh + self.rows, before + self.lines))
            self.cell = int(cells[-1])
        self.inside = found.inside
        self.opened = found.opened + self.offset if found.opened >= 0 else self.opened
        self.rows += len(found.starts)
        self.lines += len(found.ends)
        self.offset += len(data)

    def look_at_bytes(self, data: Bytes) -> None:
        """Note which encodings some lines of the file cannot be in."""
        if data.max(initial=0) >= 128:
            text = data.tobytes()
            try:
                text.decode()
            except UnicodeDecodeError:
                self.utf8 = False
                self.defined = self.defined and not any(code in text for code in _UNDEFINED)

    def columns(self) -> tuple[Integers, Integers, Integers]:
        """Offset, first record, and lines before each block; int64[n]."""
        if not self.blocks:
            return (NONE, NONE, NONE)
        offset, first, line = (np.concatenate(column) for column in zip(*self.blocks, strict=True))
        return offset, first, line


def last_newline(data: Bytes) -> int:
    """Position of the last newline that is known to end a line; -1 if there is none."""
    text = data.tobytes()
    line_feed, carriage = text.rfind(b"\n"), text.rfind(b"\r", 0, len(text) - 1)
    if carriage > line_feed:
        return carriage  # no LF comes after it
    return line_feed


def _guess(data: Bytes, dialect: Dialect) -> bool:
    """Whether bytes behind a newline look as if they began within quotes."""
    if dialect.quotechar is None:
        return False
    first = int(np.argmax(data == ord(dialect.quotechar)))
    some = data[: first + PROBE_BYTES]
    return misplaced(some, True, dialect) < misplaced(some, False, dialect)


def scan_alone(text: Bytes, offset: int, line: int, step: int, dialect: Dialect) -> RecordScanner:
    """The records of a text in memory, from byte ``offset`` on, where ``line`` lines are before it."""
    tally = RecordScanner(offset, step, dialect, inside=False, lines=line)
    tally.feed(text[offset:], last=True)
    return tally


def scan_together(
    path: str, offset: int, line: int, size: int, dialect: Dialect, ranks: IndexingRanks
) -> RecordScanner:
    """The records of a large file, of which every rank scans a part. *Collective*."""
    borders = _borders(path, offset, size, ranks)
    tallies: list[RecordScanner | None] = [None] * ranks.size
    states: list[bool | None] = [False] + [None] * (ranks.size - 1)  # at the beginning of each stretch
    while None in tallies:
        missing = [rank for rank, tally in enumerate(tallies) if tally is None]
        tally = RecordScanner(borders[ranks.rank], block_bytes(size), dialect, states[ranks.rank])
        tally.guess = bool(states[ranks.rank])
        _scan_part(path, borders, tally, missing, ranks)
        gathered = ranks.allgather(tally if ranks.rank in missing else None)
        tallies = [new or old for new, old in zip(gathered, tallies, strict=True)]
        states = _chain(tallies)
        if None in states:
            tallies[states.index(None) - 1] = None
            states = [*states[: states.index(None)], *[None] * (ranks.size - states.index(None))]
    return _joined([tally for tally in tallies if tally is not None], line)


def _borders(path: str, offset: int, size: int, ranks: IndexingRanks) -> list[int]:
    """Where the stretches begin, behind a newline, and where the last one ends. *Collective*."""
    start = offset + (size - offset) * ranks.rank // ranks.size
    memory = np.empty(min(PROBE_BYTES, size - start) if ranks.rank else 0, np.uint8)
    error: Exception | None = None
    try:
        ranks.read(path, start, memory)
    except Exception as failure:  # whatever it is, every rank has to raise it
        error = failure
    ranks.agree(error)
    newline = last_newline(memory)
    first = int(line_ends(memory[: newline + 1])[0]) if newline >= 0 else -1
    found = ranks.allgather(start + first if ranks.rank and first >= 0 else offset)
    borders = [offset]
    for border in found[1:]:
        borders.append(max(border, borders[-1]))
    return [*borders, size]


def _scan_part(
    path: str, borders: Sequence[int], tally: RecordScanner, missing: Sequence[int], ranks: IndexingRanks
) -> None:
    """Those whose stretch is missing read it, all others stand by. *Collective*."""
    rounds = -(-max(borders[rank + 1] - borders[rank] for rank in missing) // READ_BYTES)
    at = borders[ranks.rank]
    stop = borders[ranks.rank + 1] if ranks.rank in missing else at
    error: Exception | None = None
    for coming in _ahead(path, at, stop, rounds, ranks):
        try:
            data = coming.result()
            at += len(data)
            if len(data) and error is None:
                tally.feed(data, last=at == stop)
        except Exception as failure:  # as above; the other ranks count on this one for the rest of the reads
            error = error or failure
    ranks.agree(error)


def _ahead(path: str, start: int, stop: int, rounds: int, ranks: IndexingRanks) -> Iterator[Future[Bytes]]:
    """The bytes of a stretch in turn, and nothing behind it; while some are looked at, the next are read. *Collective*.

    Each of them is good until the next one is asked for.
    """
    memories = [np.empty(READ_BYTES, np.uint8) for _ in range(2)]

    def read(number: int) -> Bytes:
        begin = start + number * READ_BYTES
        memory = memories[number % 2][: max(0, min(READ_BYTES, stop - begin))]
        ranks.read(path, begin, memory)
        return memory

    with ThreadPoolExecutor(1, "matex-scan") as reader:
        reads = (reader.submit(read, number) for number in range(rounds))
        coming = next(reads, None)
        while coming is not None:
            came, coming = coming, next(reads, None)
            yield came


def _chain(tallies: Sequence[RecordScanner | None]) -> list[bool | None]:
    """Whether each stretch, and what comes after the last one, begins within quotes; None: not known yet."""
    states: list[bool | None] = [False]
    for tally in tallies:
        state = states[-1]
        if tally is None or state is None:
            states.append(None)
        elif tally.inside is None:  # an empty stretch
            states.append(state)
        else:
            states.append(tally.inside if tally.guess == state else None)
    return states


def _joined(tallies: Sequence[RecordScanner], line: int) -> RecordScanner:
    """One tally of neighbouring stretches."""
    whole = tallies[0]
    whole.lines += line
    whole.blocks = [(offset, first, before + line) for offset, first, before in whole.blocks]
    for tally in tallies[1:]:
        for offset, first, before in tally.blocks:
            fresh = offset // whole.step != whole.cell
            whole.blocks.append((offset[fresh], first[fresh] + whole.rows, before[fresh] + whole.lines))
            whole.cell = int(offset[-1] // whole.step) if len(offset) else whole.cell
        whole.offset = tally.offset
        whole.rows += tally.rows
        whole.lines += tally.lines
        whole.inside = whole.inside if tally.inside is None else tally.inside
        whole.opened = max(whole.opened, tally.opened)
        whole.nul = whole.nul if whole.nul >= 0 else tally.nul
        whole.utf8 = whole.utf8 and tally.utf8
        whole.defined = whole.defined and tally.defined
    return whole
