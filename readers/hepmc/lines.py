"""Lines of HepMC events, checked before HepMC parses them.

Format: https://arxiv.org/abs/1912.08005 (version 3) and https://cds.cern.ch/record/684090 (version 2). HepMC finds
entries by single spaces, reads each as far as it is a number, and follows references without a check: a vertex of
version 2 with fewer particles than it announces, or an id in a list of particles beyond the last one, ends the
process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from matex_data._types import Integers
from matex_data.readers.text.lines import INT32, MOST_DIGITS, REAL, Flags, Lines

INTEGER = rb"[-+]?\d+"
_I, _R = b" (" + INTEGER + b")", b" " + REAL
_PARTONS = _I * 2 + _R * 5 + b"(?:" + _I * 2 + b")"
OTHERS: Mapping[str, Mapping[bytes, tuple[re.Pattern[bytes], str]]] = {
    "hepmc3": {
        b"E": (re.compile(b"E" + _I * 3 + b"(?: @" + _R * 4 + b")?"), "three integers, perhaps @ and four numbers"),
        b"U": (re.compile(rb"U (?:GEV|MEV) (?:MM|CM)"), "GEV or MEV, and MM or CM"),
        b"W": (re.compile(b"W(?:" + _R + b")*"), "numbers"),
        b"A": (re.compile(rb"A (?!0 GenPdfInfo ).*|A 0 GenPdfInfo" + _PARTONS, re.DOTALL), "nine numbers of partons"),
        b"T": (re.compile(rb".*", re.DOTALL), ""),
    },
    "hepmc2": {
        b"E": (re.compile(b"E" + _I * 2 + _R * 3 + _I * 6 + b"(?:" + _R + b")*"), "eleven numbers, and two lists"),
        b"U": (re.compile(rb"U (?:GEV|MEV) (?:MM|CM)"), "GEV or MEV, and MM or CM"),
        b"F": (re.compile(b"F" + _PARTONS + b"?"), "nine numbers of partons"),
        b"C": (re.compile(b"C(?:" + _R + b")*"), "numbers"),
        b"H": (re.compile(b"H(?:" + _R + b")*"), "numbers"),
        b"N": (re.compile(rb".*", re.DOTALL), ""),
    },
}
"""Lines of an event, but for its particles and vertices, by the version and the letter: their form, and it in words."""
_LIST = re.compile(rb"\[\d+(?:,\d+)*\]")
VERTEX, PARTICLE, EVENT, BLANK, LISTING, OPEN, CLOSE = b"VPE\nH[]"
LISTING_LINE = b"HepMC::"


def check_lines(text: bytes, kind: str) -> None:
    """Check the lines of whole events.

    Parameters
    ----------
    kind : "hepmc3" or "hepmc2".

    Raises
    ------
    DecodeError : a line has another form, or vertices and particles do not follow each other as they announce. Its
        ``byte`` is where the line begins.
    """
    lines = Lines.of(text)
    rows = _Rows.of(lines, kind)
    events = _check_others(lines, rows.others, kind)
    (_check_version_3 if kind == "hepmc3" else _check_version_2)(lines, rows, events)


@dataclass(frozen=True)
class _Rows:
    """Lines of a text by their kind, each int64[n]: numbers of lines.

    Parameters
    ----------
    events, vertices, particles : lines that begin with E, V and P.
    others : lines of events that are no vertices or particles, E included.
    """

    events: Integers
    vertices: Integers
    particles: Integers
    others: Integers

    @classmethod
    def of(cls, lines: Lines, kind: str) -> _Rows:
        """Return the rows of a text, without the headers of joined files."""
        letter, number = lines.letter, np.arange(len(lines.begin))
        listing = np.flatnonzero(letter == LISTING)
        listing = listing[[lines.line(i).startswith(LISTING_LINE) for i in listing.tolist()]]
        is_event = letter == EVENT
        last_event = np.maximum.accumulate(np.where(is_event, number, -1))
        mark = np.full(len(number), -1)
        mark[listing] = listing
        inside = last_event > np.maximum.accumulate(mark)
        vertices, particles = (np.flatnonzero(letter == code) for code in (VERTEX, PARTICLE))
        for found in (vertices, particles):
            lines.check(found, ~inside[found], "a line of an event behind its line E", "a line outside of an event")
        is_other = inside & (letter != VERTEX) & (letter != PARTICLE) & (letter != BLANK)
        return cls(np.flatnonzero(is_event), vertices, particles, np.flatnonzero(is_other))

    def event_of(self, lines: Integers) -> Integers:
        """Return the number of the event that each line belongs to, int64[lines]."""
        return np.searchsorted(self.events, lines, side="right") - 1


def _check_others(lines: Lines, numbers: Integers, kind: str) -> Integers:
    """Check the lines of events that are no vertices or particles; return the integers of lines E, int64[events, n]."""
    known, events = OTHERS[kind], []
    for number in numbers.tolist():
        line = lines.line(number)
        form, expected = known.get(line[:1], (None, ""))
        if form is None or line[1:2] not in (b" ", b""):
            raise lines.error(number, f"a line that begins with {_letters(known)}", "an unknown line")
        match = form.fullmatch(line)
        if match is None:
            raise lines.error(number, f"{line[:1].decode()} and {expected}")
        integers = [int(entry) for entry in match.groups() if entry is not None]
        if any(abs(entry) > INT32.max for entry in integers):
            raise lines.error(number, f"integers of up to {INT32.max}")
        if line.startswith(b"E"):
            if kind == "hepmc2":
                _check_lists(lines, number, line.split()[11:])
            events.append(integers)
    return np.array(events, np.int64).reshape(len(events), -1)


def _letters(known: Mapping[bytes, object]) -> str:
    return ", ".join([*(letter.decode() for letter in known), "V or P"])


def _check_lists(lines: Lines, number: int, entries: list[bytes]) -> None:
    """Raise unless the end of a line E is a number of random states, these, a number of weights, and these."""
    states = int(entries[0])
    weights = entries[1 + states : 2 + states] if states >= 0 else []
    if not weights or not weights[0].isdigit() or len(entries) != 2 + states + int(weights[0]):
        raise lines.error(number, "as many random states and weights as the line announces")


def _check_version_3(lines: Lines, rows: _Rows, events: Integers) -> None:
    particles, vertices = rows.particles, rows.vertices
    lines.check(particles, lines.count[particles] != 10, "P and nine entries")
    count = lines.count[vertices]
    lines.check(vertices, (count != 4) & (count != 9), "V, two integers, a list, and @ with four numbers or none")
    lines.check_blanks(np.concatenate([particles, vertices]))
    ids, mothers = lines.integers(particles, 1), lines.integers(particles, 2)
    for position in (3, 9):
        lines.integers(particles, position)
    lines.check_reals(particles, range(4, 9))
    of_vertices, of_particles = events[rows.event_of(particles), 1:3].T
    wrong = (ids < 1) | (ids > of_particles) | (mothers >= ids) | (mothers < -of_vertices)
    lines.check(particles, wrong, "ids of this particle and of an earlier particle or a vertex of the event")
    ids = lines.integers(vertices, 1)
    lines.integers(vertices, 2)
    placed = vertices[count == 9]
    begin, end = lines.entries(placed, 4)
    lines.check(placed, (end - begin != 1) | (lines.data[begin] != ord("@")), "@ as entry 4")
    lines.check_reals(placed, range(5, 9))
    of_vertices, of_particles = events[rows.event_of(vertices), 1:3].T
    lines.check(vertices, (ids > -1) | (ids < -of_vertices), "the id of a vertex of the event")
    lines.check(vertices, _wrong_lists(lines, vertices, of_particles), "a list of particles of the event as entry 3")


def _wrong_lists(lines: Lines, vertices: Integers, largest: Integers) -> Flags:
    """Return which vertices have no list of ids from 1 to ``largest``, bool[vertices]."""
    begin, end = lines.entries(vertices, 3)
    is_list = (lines.data[begin] == OPEN) & (lines.data[end - 1] == CLOSE)
    single = is_list & (lines.others(vertices, 3) == 2) & (end - begin > 2) & (end - begin < MOST_DIGITS)
    wrong = np.zeros(len(vertices), bool)
    ids = lines.values(begin[single] + 1, end[single] - begin[single] - 2)
    wrong[single] = (ids < 1) | (ids > largest[single])
    for i in np.flatnonzero(~single).tolist():
        text = lines.text[begin[i] : end[i]]
        several = list(map(int, text[1:-1].split(b","))) if _LIST.fullmatch(text) else [0]
        wrong[i] = min(several) < 1 or max(several) > largest[i]
    return wrong


def _check_version_2(lines: Lines, rows: _Rows, events: Integers) -> None:
    particles, vertices = rows.particles, rows.vertices
    lines.check(particles, lines.count[particles] < 13, "P and at least twelve entries")
    lines.check(vertices, lines.count[vertices] < 10, "V and at least nine entries")
    lines.check_blanks(np.concatenate([particles, vertices]))
    ids, ends = lines.integers(particles, 1), lines.integers(particles, 11)
    for position in (2, 8):
        lines.integers(particles, position)
    flows = lines.integers(particles, 12)
    lines.check_reals(particles, (*range(3, 8), 9, 10))
    lines.check(particles, lines.count[particles] != 13 + 2 * flows, "two entries more for each colour flow")
    codes = lines.integers(vertices, 1)
    lines.integers(vertices, 2)
    lines.check_reals(vertices, range(3, 7))
    incoming, outgoing, weights = (lines.integers(vertices, position) for position in (7, 8, 9))
    lines.check(vertices, lines.count[vertices] != 10 + weights, "an entry more for each weight")
    _check_order(lines, rows, incoming + outgoing)
    of_particles, of_vertices = rows.event_of(particles), rows.event_of(vertices)
    lines.check(particles, _repeated(of_particles, ids), "a particle with an id of its own")
    lines.check(vertices, (codes >= 0) | _repeated(of_vertices, codes), "a vertex with a negative id of its own")
    known = np.isin(_in_event(of_particles, ends), _in_event(of_vertices, codes))
    lines.check(particles, (ends != 0) & ~known, "0 or the id of a vertex of the event as entry 11")
    announced = events[:, 4]
    found = np.bincount(rows.event_of(vertices), minlength=len(announced))
    expected = "as many vertices as the event announces"
    lines.check(rows.events, announced != found, expected, "a wrong number of vertices")


def _in_event(events: Integers, ids: Integers) -> Integers:
    """Return numbers that tell ids of 32 bits of all events apart, int64[n]."""
    return (events << 33) + ids


def _repeated(events: Integers, ids: Integers) -> Flags:
    """Return which ids another line of the event has as well, bool[n]."""
    _, inverse, count = np.unique(_in_event(events, ids), return_inverse=True, return_counts=True)
    wrong: Flags = count[inverse] > 1
    return wrong


def _check_order(lines: Lines, rows: _Rows, announced: Integers) -> None:
    """Raise unless behind each vertex are as many particles as it announces, and no others are in an event."""
    heads = np.sort(np.concatenate([rows.events, rows.vertices]))
    behind = np.bincount(np.searchsorted(heads, rows.particles, side="right") - 1, minlength=len(heads))
    expected = np.zeros(len(heads), np.int64)
    expected[np.searchsorted(heads, rows.vertices)] = announced
    wrong = np.flatnonzero(behind != expected)
    if len(wrong):
        head = int(wrong[0])
        problem = "particles without their vertex, or a vertex without its particles"
        raise lines.error(int(heads[head]), f"{expected[head]} particles behind this line, not {behind[head]}", problem)
