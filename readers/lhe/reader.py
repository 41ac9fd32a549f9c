"""Les Houches event files (LHE), plain or compressed. A sample is an event, and pylhe parses its text.

Format: https://arxiv.org/abs/hep-ph/0609017 (version 1.0) and https://arxiv.org/abs/1405.1067 (version 3.0). The
fields have the names of pylhe's ``LHEEventInfo`` and ``LHEParticle``.
"""

from __future__ import annotations

import io
import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO, Any
from xml.parsers import expat
from xml.sax.saxutils import quoteattr

import numpy as np
import pylhe

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import DecodeError, FormatError
from matex_data.fields import Field
from matex_data.index.model import Index
from matex_data.readers.collective import IndexingRanks, SingleRank
from matex_data.readers.text.events import (
    HEADER_BYTES,
    READ_BYTES,
    SHOWN_BYTES,
    EventColumns,
    EventParser,
    header_error,
    index_files,
    split_rows,
)
from matex_data.readers.text.events import REAL as REAL_FORM
from matex_data.readers.text.scan import Events, EventSyntax, event_starts

INTEGER, REAL = np.dtype(np.int64), np.dtype(np.float64)
EVENT_FIELDS: dict[str, np.dtype[Any]] = {
    "nparticles": INTEGER,
    "pid": INTEGER,
    **dict.fromkeys(("weight", "scale", "aqed", "aqcd"), REAL),
}
PARTICLE_FIELDS: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("id", "status", "mother1", "mother2", "color1", "color2"), INTEGER),
    **dict.fromkeys(("px", "py", "pz", "e", "m", "lifetime", "spin"), REAL),
}
WEIGHTS = "weights"
UNITS = {**dict.fromkeys(("scale", "px", "py", "pz", "e", "m"), "GeV"), "lifetime": "mm"}
CLOSE = b"</LesHouchesEvents>"
SYNTAX = EventSyntax(
    rb"<(?:(?P<event>event(?=[\s>/]))|(?P<end>/LesHouchesEvents\s{0,20}>)|(?P<begin>!--|!\[CDATA\[)"
    rb"|(?P<extra>(?:rwgt|weights)(?=[\s>])))"
)
_INTEGER = rb"[-+]?\d{1,15}(?:\.0*)?(?=\s)"  # some programs write 2.0
_REAL = REAL_FORM + rb"(?=\s)"
_BLANK, _END = rb"[ \t]+", rb"[ \t\r]*+\n"
_HEAD = _BLANK.join([_INTEGER] * 2 + [_REAL] * 4)
_PARTICLE = _BLANK.join([_INTEGER] * 6 + [_REAL] * 7)
_LINE = rb"[ \t]*+(?:" + _PARTICLE + rb"|#[^\n]*+)?+" + _END
_EVENT = re.compile(rb"<event[^>]*+>\s*+" + _HEAD + _END + rb"(?:" + _LINE + rb")*+\s*+<")
_ONE_LINE = re.compile(_LINE)
_INIT = b"<init>\n0 0 0 0 0 0 0 0 0 0\n</init>"  # no value of an event depends on it
_GROUP = re.compile(rb"</?eventgroup(?:\s[^<>]*)?>")
_PYLHE_ERRORS = (ValueError, IndexError, KeyError, AttributeError, TypeError, OverflowError)


def index(path: str, names: Sequence[str] | None = None) -> Index:
    """Index the events of an LHE file; see ``index_collectively``."""
    return index_collectively([path], names, SingleRank())


def index_collectively(paths: Sequence[str], names: Sequence[str] | None, ranks: IndexingRanks) -> Index:
    """Index the events of LHE files. *Collective*.

    Parameters
    ----------
    names : fields; None: all. The fields are those of ``EVENT_FIELDS``, and of ``PARTICLE_FIELDS``, which have one
        element for each particle of an event. Of events with further weights, the field "weights" has one number for
        each weight that the header declares, NaN where an event lacks it; the attribute ``ids`` names them.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : a file is truncated or no LHE file, or the files differ in their weights.
    """
    return index_files(SYNTAX, read_header, paths, names, ranks)


@dataclass(frozen=True)
class LheHeader:
    """Header of an LHE file.

    Parameters
    ----------
    begin : byte behind the ``<init>`` block.
    prologue : begin of a document in which pylhe reads events of this file.
    ids : of the weights that the header declares, or of those of the first event.
    """

    begin: int
    prologue: bytes
    ids: tuple[str, ...]

    def schema(self, path: str, events: Events) -> tuple[Mapping[str, Field], Mapping[str, str]]:
        """Return the fields of an event, and the ids of the weights as a fact."""
        if not events.ended:
            raise FormatError(
                "the file is truncated",
                file=path,
                byte=int(events.offset[-1]),
                expected=f"{CLOSE.decode()} behind the events",
                found=f"the end of the file, behind the begin of {events.count} events",
                remedy=f"copy it again from its source; if its events are complete, append {CLOSE.decode()}",
            )
        if events.behind:
            raise FormatError(
                "the file joins lists of events",
                file=path,
                byte=int(events.offset[-1]),
                expected=f"one {CLOSE.decode()}, behind all events",
                found=f"{events.behind} events behind it",
                remedy="split the file behind each list: the parts can be opened together",
            )
        fields = {name: _field(name, dtype, False) for name, dtype in EVENT_FIELDS.items()}
        fields |= {name: _field(name, dtype, True) for name, dtype in PARTICLE_FIELDS.items()}
        facts = {}
        if self.ids and (events.extra or not events.count):
            fields[WEIGHTS] = Field(WEIGHTS, (len(self.ids),), REAL, attributes={"ids": list(self.ids)})
            facts[WEIGHTS] = f"the weights {', '.join(self.ids)}"
        return fields, facts

    def parser(self, names: Sequence[str]) -> EventParser:
        """Return the parser of events of this file."""
        return LheParser(self.prologue, self.ids if WEIGHTS in names else ())


def _field(name: str, dtype: np.dtype[Any], ragged: bool) -> Field:
    return Field(name, (), dtype, ragged, {"units": UNITS[name]} if name in UNITS else {})


def read_header(path: str, text: IO[bytes]) -> LheHeader:
    """Read the header of an LHE file, and the ids of the weights.

    Raises
    ------
    FormatError : the text is no XML, or has no ``<init>`` block that pylhe reads.
    """
    preamble, rest = _preamble(path, text)
    try:
        opened = pylhe.LHEFile.frombuffer(io.BytesIO(preamble + CLOSE))
    except _PYLHE_ERRORS as error:
        raise header_error(path, "the header of the events cannot be read", byte=0, found=error) from error
    ids = opened.header.initrwgt.list_weights_ids() if opened.header is not None else []
    declaration = re.match(rb"\s*<\?xml[^>]*\?>", preamble)
    prologue = (declaration[0].lstrip() if declaration else b"") + b'<LesHouchesEvents version="3.0">\n'
    if ids:
        weights = "".join(f"<weight id={quoteattr(name)}/>" for name in ids)
        prologue += f"<header><initrwgt>{weights}</initrwgt></header>\n".encode("ascii", "xmlcharrefreplace")
    prologue += _INIT
    return LheHeader(len(preamble), prologue, tuple(dict.fromkeys(ids or _first_ids(prologue, rest, text))))


def _preamble(path: str, text: IO[bytes]) -> tuple[bytes, bytes]:
    """Return the bytes up to the end of the ``<init>`` block, and those that have been read behind them; raise
    ``FormatError`` if the bytes are no XML, or there is no such block.
    """
    parser, open_elements, data = expat.ParserCreate(), list[str](), bytearray()
    found: list[int] = []

    def end(name: str) -> None:
        open_elements.pop()
        if name == "init" and len(open_elements) == 1 and not found:
            found.append(parser.CurrentByteIndex)

    parser.StartElementHandler = lambda name, _: open_elements.append(name)
    parser.EndElementHandler = end
    expected = "<LesHouchesEvents> with an <init> block"
    while not found and len(data) < HEADER_BYTES:
        part = text.read(READ_BYTES)
        data += part
        try:
            parser.Parse(part, not part)
        except expat.ExpatError as error:
            if not found:  # the events are checked when they are read
                byte = parser.ErrorByteIndex
                problem = "the header of the events is no XML" if part else "the file is truncated"
                raise header_error(path, problem, byte=byte, expected=expected, found=error) from error
        if not part:
            break
    stop = data.find(b">", found[0]) + 1 if found else 0
    if not stop:
        raise header_error(path, "the file has no events of Les Houches", expected=expected, found="no such block")
    return bytes(data[:stop]), bytes(data[stop:])


def _first_ids(prologue: bytes, read: bytes, text: IO[bytes]) -> list[str]:
    """Return the ids of the weights of the first event; none if it is damaged, which reading it will tell."""
    while b"</event" not in read and len(read) < HEADER_BYTES and (part := text.read(READ_BYTES)):
        read += part
    stop = read.find(b">", read.find(b"</event")) + 1
    try:
        events = LheParser(prologue, ("",)).events(_GROUP.sub(b"", read[:stop]))
    except DecodeError:
        return []
    return list(events[0].weights) if events else []


@declared
@dataclass(frozen=True)
class LheParser:
    """Parser of the text of whole events.

    Parameters
    ----------
    prologue : begin of the document in which pylhe reads them.
    ids : of the weights to read; none: pylhe leaves out the weights.
    """

    prologue: bytes
    ids: tuple[str, ...]

    def parse(self, text: bytes, names: Sequence[str]) -> EventColumns:
        """Return fields of all events; see ``EventParser``."""
        events = self.events(text)
        particles = [particle for event in events for particle in event.particles]
        counts = [len(event.particles) for event in events]
        columns: dict[str, Array] = {}
        for name in names:
            if name == WEIGHTS:
                columns[name] = self._weights(events)
            elif name in EVENT_FIELDS:
                columns[name] = _numbers([event.eventinfo for event in events], name, EVENT_FIELDS[name])
            else:
                columns[name] = split_rows(_numbers(particles, name, PARTICLE_FIELDS[name]), counts)
        return columns

    def events(self, text: bytes) -> list[pylhe.LHEEvent]:
        """Return all events of a text, with as many particles as each announces.

        Raises
        ------
        DecodeError : the text is no XML, an event cannot be read, or it has another number of particles.
        """
        text = _GROUP.sub(lambda group: b" " * len(group[0]), text)  # the text may begin or end within a group
        starts = event_starts(SYNTAX, text)
        document = self.prologue + text + CLOSE
        _check_xml(document, len(self.prologue), starts)
        _check_numbers(text, starts)
        found: list[pylhe.LHEEvent] = []
        try:
            for event in pylhe.LHEFile.frombuffer(io.BytesIO(document), with_attributes=bool(self.ids)).events:
                found.append(event)
                if event.eventinfo.nparticles != len(event.particles):
                    expected = f"{event.eventinfo.nparticles} particles, as its first line says"
                    count = f"{len(event.particles)} particles"
                    raise _event_error(starts, len(found) - 1, "wrong number of particles", expected, count)
        except _PYLHE_ERRORS as error:
            expected = "6 numbers of the event, 13 of each particle, and weights with an id"
            raise _event_error(starts, len(found), "text that is not of LHE", expected, error) from error
        if len(found) != len(starts):
            raise _event_error(starts, 0, "events within events", f"{len(starts)} events", f"{len(found)} events")
        return found

    def _weights(self, events: Sequence[pylhe.LHEEvent]) -> Array:
        weights = np.full((len(events), len(self.ids)), np.nan)
        column = {name: i for i, name in enumerate(self.ids)}
        for i, event in enumerate(events):
            for name, weight in event.weights.items():
                if name not in column:
                    raise DecodeError(
                        "unknown weight",
                        field=WEIGHTS,
                        row=i,
                        expected=f"a weight of the header or of the first event: {', '.join(self.ids[:8])}, ...",
                        found=repr(name),
                        remedy="select the other fields with inputs= and targets=",
                    )
                weights[i, column[name]] = weight
        return weights


def _numbers(objects: Sequence[Any], name: str, dtype: np.dtype[Any]) -> Array:
    try:
        return np.array([getattr(item, name) for item in objects], dtype)
    except OverflowError as error:
        raise DecodeError("a number is too large", field=name, expected=str(dtype), found=error) from error


def _check_xml(document: bytes, begin: int, starts: Sequence[int]) -> None:
    """Raise ``DecodeError`` unless a document is XML; pylhe would stop there with a warning."""
    parser = expat.ParserCreate()
    try:
        parser.Parse(document, True)
    except expat.ExpatError as error:
        byte = parser.ErrorByteIndex - begin
        row = max(0, bisect_right(starts, byte) - 1)
        for i, (start, stop) in enumerate(pairwise(starts)):
            if i < row and b"</event" not in document[begin + start : begin + stop]:
                row, byte = i, start
        raise DecodeError("text that is no XML", row=row, byte=byte, expected="XML", found=error) from error


def _event_error(starts: Sequence[int], row: int, problem: str, expected: object, found: object) -> DecodeError:
    byte = starts[min(row, len(starts) - 1)] if starts else 0
    return DecodeError(problem, row=row, byte=byte, expected=expected, found=found)


def _check_numbers(text: bytes, starts: Sequence[int]) -> None:
    """Check the lines of events, which begin at the bytes ``starts``: pylhe takes 1.9 for 1, and skips entries. Raise
    ``DecodeError`` if a line has another number of entries, or an entry is no number, or no integer where it has to be.
    """
    for row, start in enumerate(starts):
        if _EVENT.match(text, start) is None:
            begin = text.find(b">", start) + 1
            lines = text[begin : text.find(b"<", begin)].strip().splitlines() or [b""]
            wrong = [line for line in lines[1:] if not _ONE_LINE.fullmatch(line.rstrip() + b"\n")]
            raise DecodeError(
                "text that is not of LHE",
                row=row,
                byte=start,
                expected="6 numbers of the event, 2 of them integers, and 13 of each particle, 6 of them integers",
                found=repr((wrong or lines)[0].strip()[:SHOWN_BYTES].decode("latin-1")),
            )
