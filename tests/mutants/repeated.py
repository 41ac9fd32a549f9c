"""List the tests that repeat what faster ones execute: ``python -m tests.mutants.repeated``, after ``make mutants``.

`make test` leaves them to `make test-all`. A test is listed if it takes long and each transition between two lines that
it executes is executed by tests that stay, unless

- it is the fastest of its function, and fast enough;
- it depends on the MPI library, and so runs with Open MPI, too;
- it is one of ``KEPT``, which ask what no line shows: by hostile or random input, of sources, documents and imports, or
  from both ends at once.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import reduce
from operator import or_
from pathlib import Path

from tests.mutants.__main__ import FOLDER
from tests.support.choosing import REPEATED, function
from tests.support.launch import ROOT

SHORT = 0.5
"""Seconds up to which a test stays in any case; under coverage, as all seconds here."""
FASTEST = 1.0
"""Seconds up to which the fastest test of a function stays."""
KEPT = (
    *("tests/security/", "/test_random_runs.py", "/test_chains.py", "csv/test_corpus.py"),
    *(
        "tests/test_house.py",
        "test_ownership.py",
        "test_importing.py",
        "test_packaging.py",
        "test_docs.py",
        "test_examples.py",
        "test_demo.py",
    ),
    *("test_weights_and_logs_equal_one_process", "bitwise_equal_over_twenty", "schema_has_what"),
)


def repeated(executed: Mapping[str, int], seconds: Mapping[str, float], kept: Iterable[str]) -> list[str]:
    """Return the tests that can be left out: those with the most new transitions a second stay, one after the other.

    Parameters
    ----------
    executed : transitions of each test, as the bits of a number.
    seconds : of each test.
    kept : tests that stay.
    """
    stay = {name for name in seconds if seconds[name] <= SHORT} | set(kept)
    done = reduce(or_, (executed.get(name, 0) for name in stay), 0)
    left = {name: executed.get(name, 0) & ~done for name in seconds if name not in stay}
    while left := {name: new for name, bits in left.items() if (new := bits & ~done)}:
        best = max(left, key=lambda name: left[name].bit_count() / seconds[name])
        done |= left.pop(best)
        stay.add(best)
    functions = {function(name) for name in stay}
    for name in sorted(seconds, key=lambda name: seconds[name]):
        if function(name) not in functions and seconds[name] <= FASTEST:
            functions.add(function(name))
            stay.add(name)
    return sorted(set(seconds) - stay)


def compact(names: Iterable[str], seconds: Iterable[str]) -> list[str]:
    """Return test functions of which all tests are listed, and single tests of the others."""
    listed = set(names)
    partly = {function(name) for name in seconds if name not in listed}
    return sorted({name if function(name) in partly else function(name) for name in listed})


def _transitions(path: Path, tests: Iterable[str]) -> dict[str, int]:
    """Return the transitions between lines that each test executes, as the bits of a number."""
    known = set(tests)
    tables = sqlite3.connect(path)
    numbers: dict[tuple[int, int, int], int] = {}
    found: dict[str, int] = {}
    rows = tables.execute("select context, file_id, fromno, tono from arc join context on context.id = context_id")
    for name, *transition in rows:
        bit = 1 << numbers.setdefault(tuple(transition), len(numbers))
        if name in known:
            found[name] = found.get(name, 0) | bit
    return found


def _collected(expression: str) -> set[str]:
    """Return the names of the tests that a run with this expression of marks has."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", expression]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


def main() -> None:
    """Write the list anew. Tests that were listed before are not among those measured: they stay listed."""
    seconds: dict[str, float] = json.loads((FOLDER / "seconds.json").read_text())
    kept = _collected("openmpi and not slow and not frameworks") | {n for n in seconds if any(k in n for k in KEPT)}
    names = repeated(_transitions(FOLDER / "lines", seconds), seconds, kept & set(seconds))
    before = REPEATED.read_text().splitlines() if REPEATED.exists() else []
    lines = sorted({*before, *compact(names, seconds)})
    REPEATED.write_text("".join(f"{line}\n" for line in lines))
    print(
        f"{len(names)} of {len(seconds)} tests, {sum(seconds[n] for n in names):.0f} of {sum(seconds.values()):.0f} s"
    )


if __name__ == "__main__":
    main()
