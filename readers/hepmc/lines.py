"""Lines of HepMC events, checked before HepMC parses them: each by a regular expression, and events by their ids.

Format: https://arxiv.org/abs/1912.08005 (version 3) and https://cds.cern.ch/record/684090 (version 2). HepMC finds
entries by single spaces, reads a word as 0, wraps large integers, and follows references without a check: a vertex of
version 2 with fewer particles than it announces, an id in a list of particles beyond the last one, or a line of version
3 that ends with the backslash of an escaped character ends the process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from matex_data.errors import DecodeError
from matex_data.readers.text.events import REAL, SHOWN_BYTES

LARGEST = 2**31 - 1
LISTING_LINE = b"HepMC::"
_I, _R = rb" ([-+]?\d++)", b" " + REAL
_PARTONS = _I * 2 + _R * 5 + b"(?:" + _I * 2 + b")"
_SPACES = "with single spaces between the entries"
_PARTICLE_3, _VERTEX_3 = _I * 3 + _R * 5 + _I, _I * 2 + rb" \[(\d++(?:,\d++)*+)\](?: @" + _R * 4 + b")?"
_PARTICLE_2, _VERTEX_2 = _I * 2 + _R * 5 + _I + _R * 2 + _I * 2 + rb"((?: \S++)*+)", _I * 2 + _R * 4 + _I * 3
_ANY, _ESCAPED = rb".*", rb"(?:[^\\]|\\.)*+"
CUT_ESCAPE = re.compile(rb"(?<!\\)(?:\\\\)*+\\\n")
"""End of a line of version 3 that cuts an escaped character off."""
_FORMS = {
    "hepmc3": {
        b"E": (_I * 3 + b"(?: @" + _R * 4 + b")?", "three integers, perhaps @ and four numbers"),
        b"P": (_PARTICLE_3, f"nine entries: three integers, five numbers and an integer, {_SPACES}"),
        b"V": (_VERTEX_3, f"two integers, a list of particles, and @ with four numbers or none, {_SPACES}"),
        b"U": (rb" (?:GEV|MEV) (?:MM|CM)", "GEV or MEV, and MM or CM"),
        b"W": (b"(?:" + _R + b")*+", "numbers"),
        b"A": (rb" (?!0 GenPdfInfo )" + _ESCAPED + b"| 0 GenPdfInfo" + _PARTONS, "a text, or nine numbers of partons"),
        b"T": (_ESCAPED, "a text whose last backslash is no other than the first of two characters"),
    },
    "hepmc2": {
        b"E": (_I * 2 + _R * 3 + _I * 6 + b"((?:" + _R + b")*+)", "eleven numbers, and two lists"),
        b"P": (_PARTICLE_2, f"at least twelve entries: integers but for entries 3 to 7, 9 and 10, {_SPACES}"),
        b"V": (_VERTEX_2 + rb"((?: \S++)*+)", f"at least nine entries: integers but for entries 3 to 6, {_SPACES}"),
        b"U": (rb" (?:GEV|MEV) (?:MM|CM)", "GEV or MEV, and MM or CM"),
        b"F": (_PARTONS + b"?", "nine numbers of partons"),
        b"C": (b"(?:" + _R + b")*+", "numbers"),
        b"H": (b"(?:" + _R + b")*+", "numbers"),
        b"N": (_ANY, ""),
    },
}
Forms = Mapping[bytes, tuple[re.Pattern[bytes], str]]
FORMS: Mapping[str, Forms] = {
    kind: {key: (re.compile(key + b"(?:" + form + rb")\s*", re.DOTALL), text) for key, (form, text) in forms.items()}
    for kind, forms in _FORMS.items()
}
"""Lines of an event, by the version and the letter: the form, whose groups are integers and lists, and it in words."""


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
    forms, event, at = FORMS[kind], None, 0
    for line in text.split(b"\n"):
        letter = line[:1]
        if line.startswith(LISTING_LINE) or letter == b"E":
            if event is not None:
                event.close()
            event = None
        if letter == b"E":
            event = _EVENTS[kind](at, line, _groups(at, line, forms))
        elif event is None and letter in (b"P", b"V"):
            raise _error(at, line, "a line of an event behind its line E", "a line outside of an event")
        elif event is not None and letter not in (b"", b"\r"):
            groups = _groups(at, line, forms)
            if letter in (b"P", b"V"):
                (event.particle if letter == b"P" else event.vertex)(at, line, groups)
        at += len(line) + 1
    if event is not None:
        event.close()


def _groups(at: int, line: bytes, forms: Forms) -> Sequence[bytes]:
    """Return the integers and lists of a line; raise ``DecodeError`` if it has another form."""
    form, expected = forms.get(line[:1], (None, ""))
    if form is None or line[1:2] not in (b" ", b"", b"\r"):
        letters = ", ".join(letter.decode() for letter in forms)
        raise _error(at, line, f"a line that begins with {letters}", "an unknown line")
    match = form.fullmatch(line)
    if match is None:
        raise _error(at, line, f"{line[:1].decode()} and {expected}")
    groups: Sequence[bytes] = [group for group in match.groups() if group is not None]
    if any(len(group) > 9 and group.strip(b"+-").isdigit() and abs(int(group)) > LARGEST for group in groups):
        raise _error(at, line, f"integers of up to {LARGEST}")
    return groups


def _error(at: int, line: bytes, expected: object, problem: str = "a line is damaged") -> DecodeError:
    found = repr(line.rstrip()[:SHOWN_BYTES].decode("latin-1"))
    return DecodeError(problem, byte=at, expected=expected, found=found)


class _Event3:
    """Event of version 3: ids are those that its first line announces."""

    def __init__(self, at: int, line: bytes, groups: Sequence[bytes]) -> None:
        _, self._vertices, self._particles = map(int, groups[:3])

    def particle(self, at: int, line: bytes, groups: Sequence[bytes]) -> None:
        """Check the ids of a particle, and of the particle or vertex that it comes from."""
        own, mother = int(groups[0]), int(groups[1])
        if not 1 <= own <= self._particles or not -self._vertices <= mother < own:
            raise _error(at, line, "ids of this particle and of an earlier particle or a vertex of the event")

    def vertex(self, at: int, line: bytes, groups: Sequence[bytes]) -> None:
        """Check the ids of a vertex, and of the particles that enter it."""
        if not -self._vertices <= int(groups[0]) <= -1:
            raise _error(at, line, "the id of a vertex of the event")
        if not all(1 <= int(entry) <= self._particles for entry in groups[2].split(b",")):
            raise _error(at, line, "a list of particles of the event as entry 3")

    def close(self) -> None:
        """Check nothing more: HepMC counts particles and vertices itself."""


class _Event2:
    """Event of version 2: behind each vertex are as many particles as it announces."""

    def __init__(self, at: int, line: bytes, groups: Sequence[bytes]) -> None:
        self._begin = self._head = at, line
        self._announced, self._left, self._behind = int(groups[4]), 0, 0
        self._ids, self._codes = set[int](), set[int]()
        self._ends: dict[int, tuple[int, bytes]] = {}
        states, entries = int(groups[7]), groups[8].split()
        weights = entries[states : states + 1] if states >= 0 else []
        if not weights or not weights[0].isdigit() or len(entries) != states + 1 + int(weights[0]):
            raise _error(at, line, "as many random states and weights as the line announces")

    def particle(self, at: int, line: bytes, groups: Sequence[bytes]) -> None:
        """Count a particle behind its vertex."""
        own, end, flows = int(groups[0]), int(groups[3]), int(groups[4])
        if len(groups[5].split()) != 2 * flows:
            raise _error(at, line, "two entries more for each colour flow")
        if own in self._ids:
            raise _error(at, line, "a particle with an id of its own")
        self._ids.add(own)
        self._behind += 1
        if end:
            self._ends.setdefault(end, (at, line))

    def vertex(self, at: int, line: bytes, groups: Sequence[bytes]) -> None:
        """Begin with the particles of a vertex."""
        code, incoming, outgoing, weights = (int(groups[i]) for i in (0, 2, 3, 4))
        if len(groups[5].split()) != weights:
            raise _error(at, line, "an entry more for each weight")
        if code >= 0 or code in self._codes:
            raise _error(at, line, "a vertex with a negative id of its own")
        self._end_vertex()
        self._codes.add(code)
        self._head, self._left, self._behind = (at, line), incoming + outgoing, 0

    def _end_vertex(self) -> None:
        if self._behind != self._left:
            problem = "particles without their vertex, or a vertex without its particles"
            raise _error(*self._head, f"{self._left} particles behind this line, not {self._behind}", problem)

    def close(self) -> None:
        """Check the last vertex, the number of vertices, and those at which particles end."""
        self._end_vertex()
        if self._announced != len(self._codes):
            expected = "as many vertices as the event announces"
            raise _error(*self._begin, expected, "a wrong number of vertices")
        for end, where in self._ends.items():
            if end not in self._codes:
                raise _error(*where, "0 or the id of a vertex of the event as entry 11")


_EVENTS: Mapping[str, type[_Event3 | _Event2]] = {"hepmc3": _Event3, "hepmc2": _Event2}
