"""HepMC event files, version 2 (``IO_GenEvent``) and 3 (``Asciiv3``), plain or compressed; pyhepmc parses the events.

Format: https://arxiv.org/abs/1912.08005 (version 3) and https://cds.cern.ch/record/684090 (version 2). The fields have
the names of pyhepmc's ``GenEvent`` and of its NumPy views of particles and vertices.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import pyhepmc

from matex_data._types import Array
from matex_data.declared import declared
from matex_data.errors import DecodeError
from matex_data.fields import Field
from matex_data.index.model import Index
from matex_data.readers.collective import IndexingRanks, SingleRank
from matex_data.readers.formats import no_text
from matex_data.readers.hepmc.lines import CUT_ESCAPE, check_lines
from matex_data.readers.text.events import (
    HEADER_BYTES,
    READ_BYTES,
    EventColumns,
    EventParser,
    damaged_event,
    header_error,
    index_files,
    split_rows,
)
from matex_data.readers.text.scan import Events, EventSyntax, event_starts

INTEGER, SHORT, REAL = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float64)
EVENT_FIELDS = dict.fromkeys(("event_number", "nparticles", "nvertices"), INTEGER)
PARTICLE_FIELDS: dict[str, np.dtype[Any]] = {
    **dict.fromkeys(("id", "pid", "status"), SHORT),
    **dict.fromkeys(("px", "py", "pz", "e", "generated_mass"), REAL),
}
LINK_FIELDS = dict.fromkeys(("production_vertex", "end_vertex"), SHORT)
VERTEX_FIELDS: dict[str, np.dtype[Any]] = {**dict.fromkeys(("id", "status"), SHORT), **dict.fromkeys("xyzt", REAL)}
PDF_FIELDS = ("parton_id1", "parton_id2", "x1", "x2", "scale", "xf1", "xf2", "pdf_id1", "pdf_id2")
VERTICES, PDF, WEIGHTS = "vertices/", "pdf_info/", "weights"
ENERGIES, LENGTHS = ("px", "py", "pz", "e", "generated_mass"), tuple(VERTICES + axis for axis in "xyzt")
KINDS = {b"Asciiv3": "hepmc3", b"IO_GenEvent": "hepmc2"}
"""Names of the formats in a file and in pyhepmc."""
SYNTAX = EventSyntax(rb"\n(?P<event>E[ \t])", lead=1)
_LISTING = re.compile(rb"\s*(?:HepMC::Version[^\n]*\n)?HepMC::(\w+)-START_EVENT_LISTING[ \t\r]*(?=\n)")
_FURTHER_LISTING = re.compile(rb"\nHepMC::\w+-START_EVENT_LISTING[ \t\r]*((?:\n(?!E[ \t])[^\n]*)*)")
_OF_EVENTS = re.compile(rb"\n[PV]\s")
_PYHEPMC_ERRORS = (RuntimeError, ValueError, OSError, IndexError, TypeError, MemoryError, OverflowError)


def index(path: str, names: Sequence[str] | None = None) -> Index:
    """Index the events of a HepMC file; see ``index_collectively``."""
    return index_collectively([path], names, SingleRank())


def index_collectively(paths: Sequence[str], names: Sequence[str] | None, ranks: IndexingRanks) -> Index:
    """Index the events of HepMC files. *Collective*.

    Parameters
    ----------
    names : fields; None: all. Of the event: ``event_number``, ``nparticles``, ``nvertices``, ``weights`` and
        ``pdf_info/...`` if the first event has them (NaN, and the parton id 0, where a later one lacks them). Of each
        particle: ``PARTICLE_FIELDS`` and the ids of its vertices, 0 for none. Of each vertex: ``vertices/...``.

    Raises
    ------
    FieldNotFound : there is no such field.
    FormatError : a file is no HepMC file, or the files differ in their units or weights.
    DecodeError : the first event of a file is damaged.
    """
    return index_files(SYNTAX, read_header, paths, names, ranks)


@dataclass(frozen=True)
class HepmcHeader:
    """Header of a HepMC file, and facts about its first event.

    Parameters
    ----------
    begin : byte of the line end before the first event.
    run : parser of events behind this header.
    weights : names of the weights of an event, or their numbers.
    has_pdf : the first event has information on its partons.
    """

    begin: int
    run: HepmcParser
    weights: tuple[str, ...]
    has_pdf: bool

    def schema(self, path: str, events: Events) -> tuple[Mapping[str, Field], Mapping[str, str]]:
        """Return the fields of an event, and the weights as a fact."""
        fields = {name: Field(name, (), dtype) for name, dtype in EVENT_FIELDS.items()}
        if self.weights:
            fields[WEIGHTS] = Field(WEIGHTS, (len(self.weights),), REAL, attributes={"names": list(self.weights)})
        if self.has_pdf:
            kinds = {PDF + name: INTEGER if "_id" in name else REAL for name in PDF_FIELDS}
            fields |= {name: Field(name, (), dtype) for name, dtype in kinds.items()}
        ragged: dict[str, np.dtype[Any]] = {**PARTICLE_FIELDS, **LINK_FIELDS}
        ragged |= {VERTICES + name: dtype for name, dtype in VERTEX_FIELDS.items()}
        fields |= {name: Field(name, (), dtype, True, self._units(name)) for name, dtype in ragged.items()}
        return fields, {WEIGHTS: f"the weights {', '.join(self.weights)}"}

    def _units(self, name: str) -> dict[str, str]:
        units = {**dict.fromkeys(ENERGIES, self.run.energy), **dict.fromkeys(LENGTHS, self.run.length)}
        return {"units": units[name]} if units.get(name) else {}

    def parser(self, names: Sequence[str]) -> EventParser:
        """Return the parser of events of this file."""
        return self.run


def read_header(path: str, text: IO[bytes]) -> HepmcHeader:
    """Read the header of a HepMC file and its first event.

    Raises
    ------
    FormatError : the text is no HepMC of version 2 or 3.
    DecodeError : the first event is damaged.
    """
    data = bytearray()
    starts: list[int] = []
    while len(starts) < 2 and len(data) < HEADER_BYTES and (part := text.read(READ_BYTES)):
        data += part
        starts = event_starts(SYNTAX, bytes(data))
    listing = _LISTING.match(data)
    if listing is None or bytes(listing[1]) not in KINDS:
        found = bytes(data[:60]).lstrip().split(b"\n")[0]
        expected = f"one of {[f'HepMC::{kind.decode()}-START_EVENT_LISTING' for kind in KINDS]}"
        raise header_error(path, "the file is no list of HepMC events", byte=0, expected=expected, found=found)
    begin = starts[0] - 1 if starts else len(data)
    header = bytes(data[: begin + 1])
    stray = _OF_EVENTS.search(header)
    if stray is not None:
        line = _first_line(header[stray.start() + 1 :])
        raise header_error(path, "a line of an event before the first event", byte=stray.start() + 1, found=line)
    cut = CUT_ESCAPE.search(header) if listing[1] == b"Asciiv3" else None
    if cut is not None:
        found = header[header.rfind(b"\n", 0, cut.start()) + 1 : cut.end() - 1]
        raise header_error(path, "a line ends within an escaped character", byte=cut.start(), found=found)
    run = HepmcParser(header, KINDS[bytes(listing[1])], "", "")
    if not starts:
        if b"-END_EVENT_LISTING" not in data:
            expected = "an event, or the line that ends the list of events"
            raise header_error(path, "the file is truncated", byte=len(data), expected=expected, found="none")
        return HepmcHeader(begin, run, (), False)
    try:
        (first,) = run.events(bytes(data[starts[0] : starts[1] if len(starts) > 1 else len(data)]))
    except DecodeError as error:
        raise damaged_event(error.at_row(0), path, 0, starts[0]) from error
    try:
        names = _weight_names(first)
    except UnicodeDecodeError as error:
        raise no_text(path, error) from error
    run = HepmcParser(header, run.kind, first.momentum_unit.name, first.length_unit.name, len(names))
    return HepmcHeader(begin, run, names, first.pdf_info is not None)


def _weight_names(event: pyhepmc.GenEvent) -> tuple[str, ...]:
    """Return the names of the weights; their numbers if the file has no names."""
    numbers = tuple(map(str, range(len(event.weights))))
    try:
        names = tuple(map(str, event.weight_names))
    except RuntimeError:
        return numbers
    return names if len(names) == len(numbers) else numbers


@declared
@dataclass(frozen=True)
class HepmcParser:
    """Parser of the text of whole events.

    Parameters
    ----------
    header : of the file, with the line end before its first event.
    kind : "hepmc2" or "hepmc3".
    energy, length : units of all events, as in pyhepmc; "": of the first one.
    weights : number of weights of each event; None: of the first one.
    """

    header: bytes
    kind: str
    energy: str
    length: str
    weights: int | None = None

    def parse(self, text: bytes, names: Sequence[str]) -> EventColumns:
        """Return fields of all events; see ``EventParser``."""
        events = self.events(text)
        columns: dict[str, Array] = {}
        for name in names:
            if name in EVENT_FIELDS:
                columns[name] = np.array([_count(event, name) for event in events], INTEGER)
            elif name == WEIGHTS:
                columns[name] = _weights(events, self.weights)
            elif name.startswith(PDF):
                columns[name] = _partons(events, name.removeprefix(PDF))
            elif name in LINK_FIELDS:
                links = [_vertex_id(getattr(particle, name)) for event in events for particle in event.particles]
                columns[name] = split_rows(np.array(links, SHORT), [len(event.particles) for event in events])
            else:
                columns[name] = _views(events, name)
        return columns

    def events(self, text: bytes) -> list[pyhepmc.GenEvent]:
        """Return all events of a text; raise ``DecodeError`` if an event is damaged, or has other units."""
        starts = event_starts(SYNTAX, b"\n" + text)
        starts = [start - 1 for start in starts]
        self._check_text(text, starts)
        found: list[pyhepmc.GenEvent] = []
        error: object = None
        try:
            with pyhepmc.open(io.BytesIO(self.header + text), format=self.kind) as file:
                for event in file:
                    found.append(event)
                    self._check_units(event, starts, len(found) - 1)
        except _PYHEPMC_ERRORS as raised:
            error = raised
        if len(found) != len(starts):
            row = min(len(found), len(starts) - 1)
            raise DecodeError(
                "damaged text",
                row=row,
                byte=starts[row],
                expected="as many particles and vertices as the event announces, at least one particle",
                found=error or f"text that pyhepmc does not read: {_first_line(text[starts[row] :])}",
            )
        return found

    def _check_text(self, text: bytes, starts: Sequence[int]) -> None:
        """Raise if a line is none of an event, or if another header follows."""
        try:
            check_lines(text, self.kind)
        except DecodeError as error:
            row = max(0, int(np.searchsorted(starts, error.byte or 0, side="right")) - 1)
            raise error.at_row(row) from None
        first = _FURTHER_LISTING.search(b"\n" + self.header.rstrip())
        for further in _FURTHER_LISTING.finditer(text):
            if first is None or further[1].split() != first[1].split():
                raise DecodeError(
                    "the file joins lists of events with different headers",
                    byte=further.start(),
                    expected="" if first is None else repr(first[1].strip()[:100]),
                    found=repr(further[1].strip()[:100]),
                    remedy="split the file: each part can be read alone, and they can be opened together",
                )

    def _check_units(self, event: pyhepmc.GenEvent, starts: Sequence[int], row: int) -> None:
        units = event.momentum_unit.name, event.length_unit.name
        if self.energy and units != (self.energy, self.length):
            raise DecodeError(
                "other units than those of the first event",
                row=row,
                byte=starts[row],
                expected=f"{self.energy} {self.length}",
                found=" ".join(units),
                remedy="convert the file to one choice of units",
            )


def _first_line(text: bytes) -> str:
    return repr(text[:100].split(b"\n")[0].decode("latin-1"))


def _count(event: pyhepmc.GenEvent, name: str) -> int:
    if name == "event_number":
        return int(event.event_number)
    return len(event.particles if name == "nparticles" else event.vertices)


def _vertex_id(vertex: Any) -> int:
    return 0 if vertex is None else int(vertex.id)


def _weights(events: Sequence[pyhepmc.GenEvent], count: int | None) -> Array:
    rows = [np.array(event.weights, REAL) for event in events]
    wanted = len(rows[0]) if count is None and rows else count
    for row, weights in enumerate(rows):
        if len(weights) != wanted:
            raise DecodeError(
                "another number of weights",
                field=WEIGHTS,
                row=row,
                expected=f"{wanted} weights, as in other events",
                found=f"{len(weights)} weights",
                remedy="select the other fields with inputs= and targets=",
            )
    return np.array(rows, REAL).reshape(len(rows), -1)


def _partons(events: Sequence[pyhepmc.GenEvent], name: str) -> Array:
    dtype, missing = (INTEGER, 0) if "_id" in name else (REAL, np.nan)
    partons = [event.pdf_info for event in events]
    return np.array([missing if parton is None else getattr(parton, name) for parton in partons], dtype)


def _views(events: Sequence[pyhepmc.GenEvent], name: str) -> Array:
    """Return a field of particles or vertices from the NumPy views of pyhepmc."""
    kind, attribute = ("vertices", name.removeprefix(VERTICES)) if name.startswith(VERTICES) else ("particles", name)
    dtype = (VERTEX_FIELDS if kind == "vertices" else PARTICLE_FIELDS)[attribute]
    values = [np.asarray(getattr(getattr(event.numpy, kind), attribute), dtype) for event in events]
    joined = np.concatenate(values) if values else np.empty(0, dtype)
    return split_rows(joined, [len(value) for value in values])
