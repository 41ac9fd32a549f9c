"""LHE files: conformance suite, corpus, large and compressed files, weights, and errors; expected values by pylhe."""

from __future__ import annotations

import gzip
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pylhe
import pytest
from mpi4py import MPI

from matex_data import DataError, FieldNotFound, FormatError, open_dataset
from matex_data.errors import DecodeError
from matex_data.readers import detect
from matex_data.readers.lhe.reader import EVENT_FIELDS, PARTICLE_FIELDS, index, index_collectively
from matex_data.readers.text import events as reader
from matex_data.readers.text import scan
from tests.support.corpus import CORPUS, needs_corpus
from tests.support.format_suite import Arrays, Case, FormatSuite, same
from tests.support.ranks import Pools
from tests.support.serial import every_row
from tests.support.simulated import on_ranks


def written(first: int, count: int, weights: Sequence[str] = ("1001", "mu=2 up")) -> pylhe.LHEFile:
    """Return events of 0 to 5 particles, with the process ids ``first``, ``first + 1``, ..."""
    rng = np.random.default_rng(first)
    events = []
    for pid in range(first, first + count):
        n = int(rng.integers(0, 6))
        numbers = [[int(i) for i in rng.integers(-25, 600, 6)] + list(rng.normal(0, 100, 7)) for _ in range(n)]
        event = pylhe.LHEEvent(
            pylhe.LHEEventInfo(n, pid, *rng.normal(size=4)), [pylhe.LHEParticle(*row) for row in numbers]
        )
        event.weights = {name: float(value) for name, value in zip(weights, rng.normal(size=9), strict=False)}
        events.append(event)
    header = None
    if weights:
        entries: list[Any] = [pylhe.LHEInitRWGTWeight(id=name, name=f"weight {name}") for name in weights]
        header = pylhe.LHEHeader(initrwgt=pylhe.LHEInitRWGT(entries=entries))
    process = pylhe.LHEProcInfo(1.0, 0.1, 1.0, 1)
    init = pylhe.LHEInit(pylhe.LHEInitInfo(2212, 2212, 6500.0, 6500.0, 0, 0, 1, 1, -4, 1), [process], [])
    return pylhe.LHEFile(init=init, events=events, header=header)


def expected(paths: Sequence[Path | str]) -> Arrays:
    """Return all fields of the events of files as pylhe reads them."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        events = [event for path in paths for event in pylhe.LHEFile.fromfile(str(path)).events]
    fields: Arrays = {
        name: np.array([getattr(event.eventinfo, name) for event in events], dtype)
        for name, dtype in EVENT_FIELDS.items()
    }
    for name, dtype in PARTICLE_FIELDS.items():
        fields[name] = np.empty(len(events), object)
        for i, event in enumerate(events):
            fields[name][i] = np.array([getattr(particle, name) for particle in event.particles], dtype)
    if events and events[0].weights:
        fields["weights"] = np.array([list(event.weights.values()) for event in events])
    return fields


class TestLhe(FormatSuite):
    def write(self, folder: Path) -> Case:
        paths = [folder / "a.lhe", folder / "b.lhe", folder / "c.lhe"]
        for path, first, count in zip(paths, (0, 150, 151), (150, 1, 60), strict=True):
            written(first, count).tofile(path)
        return Case([str(path) for path in paths], expected(paths), "pid")

    def damage(self, folder: Path) -> Case:
        path = folder / "a.lhe"
        text = written(0, 150).tolhe()
        path.write_text(text.replace("    90 ", "  9o   ", 1))
        return Case(str(path), {}, "pid")


def rows_of(path: Path | str, **options: Any) -> Arrays:
    found = index(str(path), **options)
    return {name: every_row(found, name) for name in found.fields}


def check(found: Arrays, wanted: Arrays) -> None:
    assert set(found) == set(wanted)
    for name, values in wanted.items():
        same(found[name], values)


def _corpus() -> list[Path]:
    return sorted(CORPUS.rglob("*.lhe*"))


def _load_each(comm: MPI.Intracomm, paths: list[str], small: bool) -> list[Arrays]:
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(reader, "SMALL_BYTES", 1)
            patch.setattr(scan, "READ_BYTES", 20_000)
        return [open_dataset(path, comm=comm).load() for path in paths]


@needs_corpus
@pytest.mark.parametrize(("size", "small"), [(1, False), (3, True)])
def test_every_file_of_the_corpus_against_pylhe(ranks: Pools, size: int, small: bool) -> None:
    paths = [str(path) for path in _corpus()]
    assert paths
    by_rank = ranks(size).run(_load_each, paths, small, timeout=120)
    for path, shares in zip(paths, zip(*by_rank, strict=True), strict=True):
        check({name: np.concatenate([share[name] for share in shares]) for name in shares[0]}, expected([path]))


@pytest.mark.parametrize("size", (1, 2, 5))
def test_a_large_file_is_scanned_by_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """Cover comments that hold marks of events, also across the segments of ranks and the reads of one."""
    path = tmp_path / "large.lhe"
    lines = written(0, 120).tolhe().replace("<event>", "<!-- <event> </LesHouchesEvents> -->\n<event>")
    comment = "<!-- " + "<event>\n" * 3000 + " -->\n"
    path.write_text(lines.replace("<event>\n  3     60 ", f"{comment}<event>\n  3     60 ") + "\n")
    whole = index(str(path))
    monkeypatch.setattr(reader, "SMALL_BYTES", 1)
    monkeypatch.setattr(scan, "READ_BYTES", 1000)
    for found in on_ranks(size, lambda ranks: index_collectively([str(path)], None, ranks)):
        assert len(found) == 120
        rows, wanted = found.files[0].layouts["pid"].table, whole.files[0].layouts["pid"].table
        assert rows.offset.tolist() == wanted.offset.tolist()
        assert rows.edges.tolist() == wanted.edges.tolist()
    check({name: every_row(found, name) for name in found.fields}, expected([path]))


def test_a_mark_at_the_end_of_a_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "events.lhe"
    path.write_text(written(0, 9).tolhe())
    monkeypatch.setattr(reader, "SMALL_BYTES", 1)
    for step in range(65, 165):
        monkeypatch.setattr(scan, "READ_BYTES", step)
        assert len(index(str(path))) == 9


def test_groups_of_events_and_a_declaration(tmp_path: Path) -> None:
    path = tmp_path / "groups.lhe"
    text = (
        written(0, 200, ())
        .tolhe()
        .replace("<event>", '<eventgroup n="1">\n<event>')
        .replace("</event>", "</event>\n</eventgroup>")
    )
    text = text.replace("<init>", "<!-- Gr\xf6\xdfe -->\n<init>")
    path.write_bytes(f'<?xml version="1.0" encoding="iso-8859-1"?>\n{text}'.encode("latin-1"))
    found = index(str(path))
    assert found.files[0].layouts["pid"].borders() is not None
    check(rows_of(path), expected([path]))


def test_weights(tmp_path: Path) -> None:
    path = tmp_path / "events.lhe"
    file = written(0, 20)
    file.events[3].weights = {}
    file.events[4].weights.pop("1001")
    path.write_text(file.tolhe())
    found = index(str(path))
    assert found.fields["weights"].attributes["ids"] == ["1001", "mu=2 up"]
    events = list(pylhe.LHEFile.fromfile(path).events)
    by_id = [[event.weights.get(name, np.nan) for name in ("1001", "mu=2 up")] for event in events]
    same(every_row(found, "weights"), np.array(by_id))
    path.write_text(file.tolhe(pylhe.WEIGHTS_FORMAT).replace("<event>", "<event>", 1))
    assert index(str(path)).fields["weights"].shape == (2,)
    undeclared = written(0, 20)
    undeclared.header = None
    path.write_text(undeclared.tolhe())
    check(rows_of(path), expected([path]))
    undeclared.events[7].weights["new"] = 1.0
    path.write_text(undeclared.tolhe())
    with pytest.raises(DecodeError, match=r"unknown weight in event 8(.|\n)*'new'"):
        rows_of(path)


def test_files_that_differ_in_their_weights(tmp_path: Path) -> None:
    written(0, 5).tofile(tmp_path / "a.lhe")
    written(5, 5, ("1001", "other")).tofile(tmp_path / "b.lhe")
    with pytest.raises(FormatError, match=r"do not agree on weights(.|\n)*other"):
        open_dataset(str(tmp_path), comm=MPI.COMM_SELF)
    assert len(open_dataset(str(tmp_path), inputs="px", comm=MPI.COMM_SELF)) == 10


def test_files_without_events_and_other_compressions(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.lhe", "b.lhe", "c.lhe")]
    for path, first, count in zip(paths, (0, 4, 4), (4, 0, 30), strict=True):
        path.write_text(written(first, count).tolhe())
    check(open_dataset(str(tmp_path), comm=MPI.COMM_SELF).load(), expected(paths))
    packed = tmp_path / "events"
    packed.write_bytes(gzip.compress(paths[2].read_bytes()))
    check(open_dataset(str(packed), comm=MPI.COMM_SELF).load(), expected(paths[2:]))
    assert detect(str(packed), packed.read_bytes()) == "lhe"


def test_attributes_and_names(tmp_path: Path) -> None:
    path = tmp_path / "events.lhe"
    path.write_text(written(0, 5).tolhe())
    found = index(str(path), ["px", "lifetime"])
    assert [(f.attributes["units"], f.ragged) for f in found.fields.values()] == [("GeV", True), ("mm", True)]
    with pytest.raises(FieldNotFound, match="'px'"):
        index(str(path), ["pxx"])
    with pytest.raises(FormatError, match="no option"):
        open_dataset(str(path), tree="x", comm=MPI.COMM_SELF)


DAMAGE = {
    "a letter in a number": (lambda text: text.replace("    13 ", "  1e   ", 1), "not of LHE in event 14"),
    "a line too few": (
        lambda text: re.sub(r"(<event>\n  4 .*\n).*\n", r"\1", text, count=1),
        "wrong number of particles",
    ),
    "a line too many": (lambda text: re.sub(r"(<event>\n  4 .*\n)(.*\n)", r"\1\2\2", text, count=1), "wrong number"),
    "a short line": (lambda text: re.sub(r"(<event>\n  4 .*\n +\S+).*\n", r"\1\n", text, count=1), "not of LHE"),
    "an event that is not closed": (lambda text: text.replace("</event>", "", 1), "no XML in event 1"),
    "an event within an event": (lambda text: text.replace("<event>", "<event><event>", 2), "no XML"),
    "a number that is too large": (lambda text: text.replace("    13 ", " 1e300 ", 1), "not of LHE in event 14"),
    "a real id": (lambda text: text.replace("    13 ", "  13.5 ", 1), "not of LHE in event 14"),
    "an integer that pylhe rounds": (lambda t: t.replace("    13 ", " 9007199254740993 ", 1), "not of LHE in event 14"),
    "an underscore": (lambda text: text.replace("    13 ", "  1_3  ", 1), "not of LHE in event 14"),
    "an entry more": (lambda text: re.sub(r"(<event>\n  4 .*\n +\S+)", r"\1 7", text, count=1), "not of LHE"),
    "a real status": (lambda text: re.sub(r"(<event>\n  4 .*\n +\S+ +\S+)", r"\1.9", text, count=1), "not of LHE"),
    "two lists": (lambda text: text + text, "joins lists of events"),
    "bytes that are no text": (lambda text: text.replace("    13 ", " \ufffd\x00 ", 1), "no XML in event 14"),
    "no end": (lambda text: text.removesuffix("</LesHouchesEvents>"), "truncated"),
    "no event, but text": (lambda text: re.sub(r"(?s)<event>.*</event>", "a & b", text), "no XML"),
    "an end that is cut off": (lambda text: text[:-1], "truncated"),
    "half of the text": (lambda text: text[: len(text) // 2], "truncated"),
    "a header alone": (lambda text: text[:200], "truncated"),
    "another root": (lambda text: text.replace("LesHouchesEvents", "events"), "header"),
    "no init": (lambda text: text.replace("init>", "inix>"), "no events of Les Houches"),
    "a damaged init": (lambda text: text.replace("2212", "p"), "header"),
    "a header that is no XML": (lambda text: text.replace("<header>", "<header"), "header of the events is no XML"),
    "nothing": (lambda text: "", "truncated"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named(tmp_path: Path, kind: str) -> None:
    change, message = DAMAGE[kind]
    path = tmp_path / "events.lhe"
    path.write_text(change(written(0, 40).tolhe()))
    with warnings.catch_warnings(), pytest.raises(DataError, match=re.escape(message)) as caught:
        warnings.simplefilter("error")
        rows_of(path)
    assert caught.value.file == str(path)
    assert caught.value.remedy
    if "event " in message:
        text, row = path.read_bytes(), caught.value.row
        starts = [match.start() for match in re.finditer(b"<event>", text)]
        assert row is not None and caught.value.byte is not None
        assert starts[row] <= caught.value.byte


def test_integers_as_some_programs_write_them(tmp_path: Path) -> None:
    path, text = tmp_path / "events.lhe", written(0, 40).tolhe()
    path.write_text(re.sub(r"(<event>\n +\S+ +\S+)", r"\1.000", text).replace("\n", " \r\n"))
    check(rows_of(path), expected([path]))


def test_numbers_as_fortran_writes_them(tmp_path: Path) -> None:
    path, text = tmp_path / "events.lhe", written(0, 3).tolhe()
    path.write_text(re.sub(r"(<event>\n +\S+ +\S+ +)\S+ +\S+", r"\1NaN +Infinity", text))
    found = rows_of(path)
    assert np.isnan(found["weight"]).all()
    assert np.isposinf(found["scale"]).all()


def test_damaged_compression(tmp_path: Path) -> None:
    path = tmp_path / "events.lhe.gz"
    path.write_bytes(gzip.compress(written(0, 40).tolhe().encode())[:-20])
    with pytest.raises(DataError, match="unpack") as caught:
        index(str(path))
    assert caught.value.file == str(path)


def test_mutated_files_give_an_error_or_the_values_of_pylhe(tmp_path: Path) -> None:
    """Read damaged files; ``make test-all`` has no further ones, since each takes a few milliseconds."""
    rng = np.random.default_rng(1)
    text = written(0, 12).tolhe().encode()
    path = tmp_path / "events.lhe"
    equal = 0
    for _ in range(300):
        damaged = bytearray(text)
        for at in rng.integers(0, len(text), int(rng.integers(1, 4))).tolist():
            damaged[at] = int(rng.choice(np.frombuffer(b"<>/! 0127-.eE\nax&\x00\xff", np.uint8)))
        path.write_bytes(bytes(damaged[: int(rng.integers(len(text)))] if rng.random() < 0.1 else damaged))
        try:
            found = rows_of(path)
        except DataError:
            continue
        wanted = expected([path])
        check(found, wanted)
        equal += 1
    assert 20 < equal < 300
