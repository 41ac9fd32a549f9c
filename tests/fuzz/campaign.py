"""Damage files, look at each, and tell what is a finding from what a library itself does not survive."""

from __future__ import annotations

import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from matex_data import DataError
from tests.fuzz import hostile
from tests.fuzz.checks import PROBES, check
from tests.fuzz.children import Result, look
from tests.fuzz.mutations import mutant
from tests.fuzz.readings import (
    BOTH_REFUSE,
    CRASH,
    FINDINGS,
    FLEETING,
    LIBRARYS_OWN,
    MEMORY,
    TIMEOUT,
    UNCOMPARED,
    WHOLE,
    Refused,
    Verdict,
    attempt,
    libraries_apart,
    ours,
    refusal,
)
from tests.fuzz.sources import Source, sources

TEXTS = ("csv", "hepmc", "lhe", "manifest", "jsonl", "xyz")
SECONDS = 10.0  # that one file may take
WAIT = 20.0  # and a file that somebody made
PATIENT = 30.0  # when it is looked at once more, alone, on a machine that may be busy


@dataclass
class Tally:
    """Outcomes of the files of one format."""

    format: str
    sources: int
    counts: Counter[str] = field(default_factory=Counter)
    findings: list[tuple[Result, str]] = field(default_factory=list)
    samples: dict[str, list[tuple[Result, str]]] = field(default_factory=dict)
    seconds: float = 0.0

    def alike(self) -> list[list[tuple[Result, str]]]:
        """Group the findings that end at the same line or with the same message."""
        groups: dict[str, list[tuple[Result, str]]] = {}
        for result, where in sorted(self.findings, key=lambda finding: finding[0].number):
            lines = result.verdict.text.strip().splitlines() or [""]
            places = [line for line in lines if "readers/" in line or "matex_data/" in line]
            words = re.sub(r"'[^']*'|[0-9]+|\[.*?\]", "", lines[-1])[:60]
            groups.setdefault(f"{result.verdict.outcome}{places[-1:]}{words}", []).append((result, where))
        return sorted(groups.values(), key=len, reverse=True)


@dataclass(frozen=True)
class Campaign:
    """Mutants of one format, each made from the seed and its number alone.

    Parameters
    ----------
    seed : of all mutants.
    corpus : folder of real files; None: only those that are written here.
    keep : folder for the mutants that are findings.
    jobs : processes at once.
    hostile : sizes, counts, paths and names of codecs are damaged, and memory is measured, of this package alone.
    """

    format: str
    seed: int
    corpus: Path | None
    keep: Path
    jobs: int
    hostile: bool = False

    def run(self, numbers: range | list[int], progress: Callable[[], None] = lambda: None) -> Tally:
        """Look at the mutants of these numbers."""
        begin = time.monotonic()
        found = sources(self.format, self.corpus)
        tally = Tally(self.format, len(found))
        with tempfile.TemporaryDirectory(prefix="matex-fuzz-") as folder:
            task = partial(_measure if self.hostile else _examine, self, found, Path(folder))
            suspects = []
            for result in look(task, list(numbers), WAIT if self.hostile else SECONDS, self.jobs):
                if result.verdict.outcome in (CRASH, TIMEOUT) and result.stage == "library":
                    result = replace(result, verdict=Verdict(LIBRARYS_OWN, result.verdict.text))
                if result.verdict.outcome in FINDINGS:
                    suspects.append(result)
                else:
                    self._count(tally, found, result)
                    progress()
            for result in suspects:
                self._count(tally, found, self._again(task, found, Path(folder), result))
                progress()
        tally.seconds = time.monotonic() - begin
        return tally

    def mutant(self, found: list[Source], number: int) -> tuple[Source, bytes, str]:
        """Return the damaged file, its bytes, and a description of the damage."""
        chance = random.Random(f"{self.seed}:{self.format}:{number}")
        source = chance.choice(found)
        damage = hostile.mutant if self.hostile else mutant
        data, how = damage(chance, source.data, self.format in TEXTS)
        return source, data, how

    def command(self, number: int) -> str:
        """Return the command that reproduces one mutant."""
        corpus = f" --corpus {self.corpus}" if self.corpus else ""
        kind = " --hostile" if self.hostile else ""
        return f"python -m tests.fuzz{kind} --formats {self.format} --seed {self.seed} --only {number}{corpus}"

    def _count(self, tally: Tally, found: list[Source], result: Result) -> None:
        outcome = result.verdict.outcome
        tally.counts[outcome] += 1
        source, data, how = self.mutant(found, result.number)
        if outcome in FINDINGS:
            folder = self.keep / self.format / str(result.number)
            folder.mkdir(parents=True, exist_ok=True)
            source.write(folder, data)
            tally.findings.append((result, f"{source.name}, {how}"))
        elif len(samples := tally.samples.setdefault(outcome, [])) < 400:
            samples.append((result, f"{source.name}, {how}"))

    def _again(self, task: Callable[..., Verdict], found: list[Source], folder: Path, result: Result) -> Result:
        """Alone in a process; what the libraries do not survive by themselves is theirs."""
        (second,) = look(task, [result.number], PATIENT, 1)
        outcome = second.verdict.outcome
        if outcome not in FINDINGS:
            return replace(second, verdict=Verdict(FLEETING, f"{result.verdict.outcome}: {result.verdict.text}"))
        if outcome not in (CRASH, TIMEOUT):
            return second
        if second.stage == "library":
            return replace(second, verdict=Verdict(LIBRARYS_OWN, second.verdict.text))
        probe = PROBES.get(self.format)
        if probe is not None:
            (alone,) = look(partial(_probe, self, found, folder), [result.number], PATIENT, 1)
            if alone.verdict.outcome in (CRASH, TIMEOUT):
                return replace(second, verdict=Verdict(LIBRARYS_OWN, alone.verdict.text))
        (apart,) = look(partial(_apart, task), [result.number], PATIENT, 1)
        if outcome == CRASH and apart.verdict.outcome not in FINDINGS:
            # A library that damages the memory of its process brings down whoever uses it next.
            text = f"only in a process in which the library has read it: {second.verdict.text}"
            return replace(second, verdict=Verdict(LIBRARYS_OWN, text))
        return second


def _examine(
    campaign: Campaign, found: list[Source], folder: Path, number: int, stage: Callable[[str], None]
) -> Verdict:
    for path in _written(campaign, found, folder, number):
        return check(campaign.format, path, stage)
    raise AssertionError


def _measure(
    campaign: Campaign, found: list[Source], folder: Path, number: int, stage: Callable[[str], None]
) -> Verdict:
    """Read a file by this package alone, and measure the memory that it takes."""
    for path in _written(campaign, found, folder, number):
        before = hostile.resident(peak=False)
        read = attempt(partial(ours, path))
        taken = hostile.resident(peak=True) - before
        if taken > hostile.ALLOWED + 2 * WHOLE:
            return Verdict(MEMORY, f"{taken >> 20} MiB: {read}")
        if isinstance(read, Verdict):
            return read
        return refusal(read, Refused("")) if isinstance(read, DataError) else Verdict(UNCOMPARED)
    raise AssertionError


def _apart(task: Callable[..., Verdict], number: int, stage: Callable[[str], None]) -> Verdict:
    with libraries_apart():
        return task(number, stage)


def _probe(campaign: Campaign, found: list[Source], folder: Path, number: int, stage: Callable[[str], None]) -> Verdict:
    for path in _written(campaign, found, folder, number):
        stage("library")
        PROBES[campaign.format](path)
    return Verdict(BOTH_REFUSE)


def _written(campaign: Campaign, found: list[Source], folder: Path, number: int) -> Iterator[Path]:
    """Context manager: write a mutant to a folder of its own, and remove it afterwards."""
    source, data, _ = campaign.mutant(found, number)
    place = folder / str(number)
    shutil.rmtree(place, ignore_errors=True)  # of a process that did not survive it
    place.mkdir()
    yield source.write(place, data)
    shutil.rmtree(place, ignore_errors=True)
