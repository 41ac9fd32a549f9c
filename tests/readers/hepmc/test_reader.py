"""HepMC files of version 2 and 3: conformance suite, corpus, and errors; expected values by pyhepmc."""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyhepmc
import pytest
from mpi4py import MPI

from matex_data import DataError, FieldNotFound, FormatError, open_dataset
from matex_data.readers import detect
from matex_data.readers.hepmc.reader import PARTICLE_FIELDS, PDF_FIELDS, VERTEX_FIELDS, index, index_collectively
from matex_data.readers.text import events as reader
from matex_data.readers.text import scan
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.format_suite import Arrays, Case, FormatSuite, same
from tests.support.ranks import Pools
from tests.support.serial import every_row
from tests.support.simulated import on_ranks

KINDS = ("hepmc3", "hepmc2")


def event(number: int, run: pyhepmc.GenRunInfo, rng: np.random.Generator, partons: bool = True) -> pyhepmc.GenEvent:
    """Return an event of a few particles, with two vertices."""
    found = pyhepmc.GenEvent()
    found.run_info = run
    found.event_number = number
    particles = [pyhepmc.GenParticle(rng.normal(size=4), int(pid), 1) for pid in rng.integers(-30, 30, number % 4 + 2)]
    for particle, mass in zip(particles, rng.random(len(particles)), strict=True):
        particle.generated_mass = float(mass)
    first, second = pyhepmc.GenVertex(rng.normal(size=4)), pyhepmc.GenVertex(rng.normal(size=4))
    first.add_particle_in(particles[0])
    for particle in particles[1:]:
        first.add_particle_out(particle)
    second.add_particle_in(particles[-1])
    second.add_particle_out(pyhepmc.GenParticle(rng.normal(size=4), 22, 1))
    for vertex in (first, second):
        found.add_vertex(vertex)
    if run.weight_names:
        found.weights = rng.normal(size=len(run.weight_names))
    if partons:
        found.pdf_info = info = pyhepmc.GenPdfInfo()
        info.parton_id1, info.parton_id2, info.x1, info.x2, info.scale = 21, -2, 0.25, 0.5, 91.0
    return found


def written(
    first: int, count: int, kind: str = "hepmc3", weights: Sequence[str] = ("nominal", "up"), **options: Any
) -> bytes:
    run, rng, memory = pyhepmc.GenRunInfo(), np.random.default_rng(first), io.BytesIO()
    run.weight_names = list(weights)
    with pyhepmc.open(memory, "w", format=kind) as file:
        for number in range(first, first + count):
            file.write(event(number, run, rng, **options))
    return memory.getvalue()


def events_of(path: Path | str) -> Iterator[pyhepmc.GenEvent]:
    with pyhepmc.open(str(path)) as file:
        yield from file


def expected(paths: Sequence[Path | str]) -> Arrays:
    """Return all fields of the events of files as pyhepmc reads them."""
    rows: dict[str, list[Any]] = {}
    for found in (found for path in paths for found in events_of(path)):
        particles, vertices = found.numpy.particles, found.numpy.vertices
        values: dict[str, Any] = {name: np.array(getattr(particles, name)) for name in PARTICLE_FIELDS}
        values |= {f"vertices/{name}": np.array(getattr(vertices, name)) for name in VERTEX_FIELDS}
        for name in ("production_vertex", "end_vertex"):
            linked = [getattr(particle, name) for particle in found.particles]
            values[name] = np.array([0 if vertex is None else vertex.id for vertex in linked], np.int32)
        values |= {"event_number": found.event_number, "nparticles": len(found.particles)}
        values["nvertices"] = len(found.vertices)
        if len(found.weights):
            values["weights"] = np.array(found.weights)
        if found.pdf_info is not None:
            values |= {f"pdf_info/{name}": getattr(found.pdf_info, name) for name in PDF_FIELDS}
        for name, value in values.items():
            rows.setdefault(name, []).append(value)
    fields: Arrays = {}
    for name, column in rows.items():
        is_ragged = isinstance(column[0], np.ndarray) and name != "weights"
        fields[name] = np.empty(len(column), object) if is_ragged else np.array(column)
        if is_ragged:
            fields[name][:] = column
    return fields


class TestHepmc3(FormatSuite):
    kind = "hepmc3"

    def write(self, folder: Path) -> Case:
        paths = [folder / f"{part}.hepmc" for part in "abc"]
        for path, first, count in zip(paths, (0, 140, 141), (140, 1, 40), strict=True):
            path.write_bytes(written(first, count, self.kind))
        return Case([str(path) for path in paths], expected(paths), "event_number")

    def damage(self, folder: Path) -> Case:
        path = folder / "a.hepmc"
        lines = written(0, 100, self.kind).split(b"\n")
        (at,) = [i for i, line in enumerate(lines) if line.startswith(b"E 60 ")]
        del lines[next(i for i in range(at, len(lines)) if lines[i].startswith(b"P"))]
        path.write_bytes(b"\n".join(lines))
        return Case(str(path), {}, "event_number")


def rows_of(path: Path | str, **options: Any) -> Arrays:
    found = index(str(path), **options)
    return {name: every_row(found, name) for name in found.fields}


def check(found: Arrays, wanted: Arrays) -> None:
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        same(found[name], values)


def test_version_2(tmp_path: Path) -> None:
    path = tmp_path / "events.dat"
    path.write_bytes(b"\n" + written(0, 150, "hepmc2"))
    assert detect(str(path), path.read_bytes()) == "hepmc"
    check(rows_of(path), expected([path]))
    wanted = expected([path])
    path.write_bytes(gzip.compress(path.read_bytes()))
    check(rows_of(path), wanted)


def _load_each(comm: MPI.Intracomm, paths: list[str], small: bool) -> list[Any]:
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(reader, "SMALL_BYTES", 1)
            patch.setattr(scan, "READ_BYTES", 20_000)
        for path in paths:
            try:
                found.append(open_dataset(path, comm=comm).load())
            except DataError as error:
                found.append(str(error))
    return found


@needs_corpus
@pytest.mark.parametrize(("size", "small"), [(1, False), (3, True)])
def test_every_file_of_the_corpus_against_pyhepmc(ranks: Pools, size: int, small: bool) -> None:
    paths = [str(path) for path in sorted((CORPUS / "particle/hepmc").iterdir())]
    assert paths
    by_rank = ranks(size).run(_load_each, paths, small, timeout=120)
    for path, shares in zip(paths, zip(*by_rank, strict=True), strict=True):
        if Path(path).name == "broken.dat":  # pyhepmc yields no event, and no error
            assert all(share == shares[0] and "damaged in event 1" in share and path in share for share in shares)
        else:
            check({name: np.concatenate([share[name] for share in shares]) for name in shares[0]}, expected([path]))


@pytest.mark.parametrize("size", (1, 2, 5))
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_file_is_scanned_by_all_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, kind: str
) -> None:
    path = tmp_path / "events.hepmc"
    path.write_bytes(written(0, 120, kind))
    whole = index(str(path)).files[0].layouts["pid"].table
    monkeypatch.setattr(reader, "SMALL_BYTES", 1)
    monkeypatch.setattr(scan, "READ_BYTES", 1000)
    for found in on_ranks(size, lambda ranks: index_collectively([str(path)], None, ranks)):
        rows = found.files[0].layouts["pid"].table
        assert rows.offset.tolist() == whole.offset.tolist()
        assert rows.edges.tolist() == whole.edges.tolist()
    check({name: every_row(found, name) for name in found.fields}, expected([path]))


def test_units_and_weights(tmp_path: Path) -> None:
    path, other = tmp_path / "a.hepmc", tmp_path / "b.hepmc"
    path.write_bytes(written(0, 20))
    fields = index(str(path)).fields
    assert fields["px"].attributes["units"] == "GEV"
    assert fields["vertices/x"].attributes["units"] == "MM"
    assert fields["weights"].attributes["names"] == ["nominal", "up"]
    other.write_bytes(written(20, 20).replace(b"U GEV MM", b"U MEV CM"))
    with pytest.raises(FormatError, match=r"do not agree on 'units' of '(px|py|e)'(.|\n)*GEV(.|\n)*MEV"):
        open_dataset(str(tmp_path), comm=MPI.COMM_SELF)
    assert len(open_dataset(str(tmp_path), inputs="pid", comm=MPI.COMM_SELF)) == 40
    other.write_bytes(written(20, 20, weights=("nominal", "down")))
    with pytest.raises(FormatError, match=r"do not agree on weights(.|\n)*down"):
        open_dataset(str(tmp_path), comm=MPI.COMM_SELF)
    with pytest.raises(FieldNotFound, match="'pid'"):
        index(str(path), ["pidd"])
    text = written(0, 20)
    path.write_bytes(text[: len(text) // 2] + text[len(text) // 2 :].replace(b"U GEV MM", b"U MEV MM"))
    with pytest.raises(DataError, match=r"other units(.|\n)*GEV MM(.|\n)*MEV MM"):
        rows_of(path)


def test_names_of_weights_that_are_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.hepmc"
    path.write_bytes(written(0, 20).replace(b"nominal", b"nomin\xffl"))
    with pytest.raises(FormatError, match="a name in the file is no text"):
        open_dataset(path)


def test_events_without_weights_and_partons(tmp_path: Path) -> None:
    path = tmp_path / "events.hepmc"
    path.write_bytes(written(0, 40, weights=(), partons=False))
    check(rows_of(path), expected([path]))
    lines = written(0, 40).split(b"\n")
    at = [i for i, line in enumerate(lines) if line.startswith(b"A 0 GenPdfInfo")][10]
    del lines[at]
    path.write_bytes(b"\n".join(lines))
    found = rows_of(path, names=["pdf_info/x1", "pdf_info/parton_id1"])
    assert np.flatnonzero(np.isnan(found["pdf_info/x1"])).tolist() == [10]
    assert np.flatnonzero(found["pdf_info/parton_id1"] == 0).tolist() == [10]


def test_joined_files(tmp_path: Path) -> None:
    path = tmp_path / "events.hepmc"
    path.write_bytes(written(0, 40) + written(40, 30))
    check(rows_of(path), expected([path]))
    assert len(index(str(path))) == 70
    path.write_bytes(written(0, 40) + written(40, 30, weights=("nominal", "down")))
    with pytest.raises(DataError, match="joins lists of events with different headers"):
        rows_of(path)


DAMAGE = {
    "a letter in a number": (lambda text: text.replace(b"e-01 2", b"x-01 2", 1), "line is damaged in event"),
    "a letter in an event": (lambda text: text.replace(b"E 13 2 ", b"E 13 2o ", 1), "line is damaged in event 14"),
    "a line too few": (
        lambda text: re.sub(rb"(E 13 (?:.*\n)+?)P.*\n", rb"\1", text, count=1),
        "event 14",
    ),
    "a line too many": (lambda text: re.sub(rb"(E 13 (?:.*\n)+?)(P.*\n)", rb"\1\2\2", text, count=1), "event 14"),
    "half of the text": (lambda text: text[: len(text) // 2], "event 20"),
    "another beginning": (lambda text: text.replace(b"-START", b"-BEGIN"), "no list of HepMC events"),
    "another format": (lambda text: text.replace(b"::Asciiv3", b"::IO_Ascii"), "no list of HepMC events"),
    "a header alone": (lambda text: text[: text.index(b"\nE ")], "truncated"),
    "a particle before all events": (lambda text: text.replace(b"\nE 0", b"\nP 1\nE 0", 1), "before the first event"),
    "half of an escaped character": (
        lambda text: text.replace(b"LISTING\n", b"LISTING\nW a\\\n", 1),
        "an escaped character",
    ),
    "nothing": (lambda text: b"", "no list of HepMC events"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    change, message = DAMAGE[kind]
    path = tmp_path / "events.hepmc"
    path.write_bytes(change(written(0, 40)))
    with pytest.raises(DataError, match=re.escape(message)) as caught:
        rows_of(path)
    assert caught.value.file == str(path)
    assert caught.value.remedy
    assert caught.value.byte is not None


def test_a_truncated_file_of_version_2(tmp_path: Path) -> None:
    path = tmp_path / "events.hepmc"
    text = written(0, 40, "hepmc2")
    path.write_bytes(text[: text.index(b"E 30 ") - 200])
    with pytest.raises(DataError, match="event 30"):
        rows_of(path)


LINES_3 = {
    "an entry more": (rb"(\nP 2 \S+ \S+) ", rb"\1 7 ", "P and nine entries"),
    "an entry less": (rb"(\nP 2 \S+) \S+", rb"\1", "P and nine entries"),
    "a tab": (rb"(\nP 2 \S+ \S+) ", rb"\1\t", "single spaces"),
    "two spaces": (rb"(\nP 2 \S+ \S+) \S+ ", rb"\1  ", "P and nine entries"),
    "a large particle id": (rb"(\nP 2 \S+) \S+", rb"\1 4294967307", "integers of up to 2147483647"),
    "a real particle id": (rb"(\nP 2 \S+) \S+", rb"\1 11.0", "P and nine entries"),
    "a real status": (rb"(\nP 2 .*) 1\n", rb"\1 1.9\n", "P and nine entries"),
    "two points": (rb"(\nP 2 \S+ \S+ -?\d\.)\d", rb"\1.", "P and nine entries"),
    "no exponent": (rb"(\nP 2 \S+ \S+ \S+e.)\d\d", rb"\1", "P and nine entries"),
    "a word": (rb"(\nP 2 \S+ \S+) \S+", rb"\1 none", "P and nine entries"),
    "a mother behind": (rb"\nP 2 \S+", rb"\nP 2 3", "an earlier particle"),
    "an unknown mother": (rb"\nP 2 \S+", rb"\nP 2 -9", "an earlier particle"),
    "an unknown particle": (rb"(\nV \S+ \S+) \[\d+", rb"\1 [99", "a list of particles"),
    "particle 0": (rb"(\nV \S+ \S+) \[\d+", rb"\1 [0", "a list of particles"),
    "a space in a list": (rb"(\nV \S+ \S+ \[)", rb"\1 ", "a list of particles, and @"),
    "an unknown vertex": (rb"\nV -1", rb"\nV -9", "the id of a vertex"),
    "a short vertex": (rb"(\nV -1.*) \S+", rb"\1", "@ with four numbers"),
    "another mark": (rb"(\nV -1.*) @", rb"\1 x", "@ with four numbers"),
    "an event more": (rb"\nE 13 (\S+)", rb"\nE 13 \1 1", "three integers"),
    "another unit": (rb"\nU GEV", rb"\nU TEV", "GEV or MEV"),
    "a word for a weight": (rb"\nW (\S+) ", rb"\nW \1 x", "W and numbers"),
    "a word for a parton": (rb"GenPdfInfo 21", rb"GenPdfInfo x", "nine numbers of partons"),
    "half of an escaped character": (rb"\nU GEV MM", rb"\nU GEV MM\nA 0 note a\\|b\\", "a text, or nine numbers"),
    "an unknown line": (rb"\nU GEV MM", rb"\nU GEV MM\nX 1", "a line that begins with E"),
}
LINES_2 = {
    "no vertex": (rb"\nV -1 .*", rb"", "particles behind this line, not"),
    "no second vertex": (rb"\nV -2 .*", rb"", "particles behind this line, not"),
    "a particle before its vertex": (rb"(\nV -1 .*)(\nP .*)", rb"\2\1", "0 particles behind this line, not 1"),
    "a particle less": (rb"(\nV -1 .*)(\nP .*)", rb"\1", "particles behind this line, not"),
    "a vertex without particles": (rb"(\nV -2 .*) 0\n(P .*\n)*", rb"\1 0\n", "particles behind this line, not 0"),
    "another number of vertices": (rb"(\nE 13 0 \S+ \S+ \S+ 0 0) 2", rb"\1 3", "as many vertices"),
    "an entry more": (rb"(\nP \d+ \S+) ", rb"\1 7.5 ", "at least twelve entries"),
    "an entry less": (rb"(\nP \d+ \S+) \S+", rb"\1", "twelve entries"),
    "a tab": (rb"(\nP \d+ \S+) ", rb"\1\t", "single spaces"),
    "a large particle id": (rb"(\nP \d+) \S+", rb"\1 4294967307", "integers of up to 2147483647"),
    "a real status": (rb"(\nP .*) 1 (\S+ \S+ \S+ 0\n)", rb"\1 1.9 \2", "at least twelve entries"),
    "flows": (rb"(\nP .*) 0\n", rb"\1 2\n", "each colour flow"),
    "a weight of a vertex": (rb"(\nV .*) 0\n", rb"\1 1\n", "an entry more for each weight"),
    "a vertex without a sign": (rb"\nV -2", rb"\nV 2", "a negative id of its own"),
    "a vertex twice": (rb"\nV -2", rb"\nV -1", "a negative id of its own"),
    "a particle twice": (rb"\nP 10002", rb"\nP 10001", "an id of its own"),
    "an unknown end": (rb"(\nP .*) -2 0\n", rb"\1 -3 0\n", "the id of a vertex of the event"),
    "a weight more": (rb"(\nE 13 .*)", rb"\1 1.5", "random states and weights"),
    "a weight less": (rb"(\nE 13 .*) \S+", rb"\1", "random states and weights"),
}


@pytest.mark.parametrize(
    ("kind", "damage"), [*(("hepmc3", name) for name in LINES_3), *(("hepmc2", name) for name in LINES_2)]
)
def test_damaged_lines(tmp_path: Path, kind: str, damage: str) -> None:
    """HepMC itself shifts, cuts or wraps their values without a word, or ends the process."""
    pattern, other, expected = (LINES_3 if kind == "hepmc3" else LINES_2)[damage]
    path, text = tmp_path / "events.hepmc", written(0, 40, kind)
    begin = text.index(b"\nE 13 ")
    changed = text[:begin] + re.sub(pattern, other, text[begin:], count=1)
    assert changed != text
    path.write_bytes(changed)
    with pytest.raises(DataError, match=re.escape(expected)) as caught:
        rows_of(path)
    assert caught.value.row == 13 and "in event 14" in str(caught.value)
    assert caught.value.byte is not None and caught.value.byte >= begin
    line = changed[caught.value.byte :].split(b"\n")[0]
    assert re.match(rb"[EVPUWAX]", line) and repr(line[:20].decode())[1:-1] in str(caught.value.found)


def test_other_forms_of_numbers(tmp_path: Path) -> None:
    path = tmp_path / "events.hepmc"
    text = re.sub(rb"(\nP 2 \S+ \S+) \S+ \S+ \S+ \S+", rb"\1 .5 -1. 1E5 nan", written(0, 40))
    path.write_bytes(re.sub(rb"(\nP 1 \S+ \S+) \S+ \S+ \S+", rb"\1 7 -0.25 +1e-3", text).replace(b"\n", b" \r\n"))
    found = rows_of(path, names=["px", "py", "pz", "e"])
    assert all(px[:2].tolist() == [7, 0.5] for px in found["px"])
    assert all(py[:2].tolist() == [-0.25, -1] for py in found["py"])
    assert all(pz[:2].tolist() == [0.001, 100000] for pz in found["pz"])
    assert all(np.isnan(e[1]) for e in found["e"])
    check({name: found[name] for name in ("px", "py", "pz")}, {n: expected([path])[n] for n in ("px", "py", "pz")})


def test_a_weight_less_in_all_events_of_a_block(tmp_path: Path) -> None:
    path, text = tmp_path / "events.hepmc", written(0, 40, "hepmc2")
    at = text.index(b"\nE 20 ")
    path.write_bytes(text[:at] + re.sub(rb"(\nE (?:\S+ ){11})2 (\S+) \S+\nN .*", rb"\g<1>1 \2", text[at:]))
    with pytest.raises(DataError, match=r"another number of weights[\s\S]*2 weights[\s\S]*1 weights"):
        rows_of(path)
