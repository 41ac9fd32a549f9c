"""Choose the tests of a changed line: from the lines and seconds of each test in one run under coverage."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

import coverage.numbits  # noqa: F401 - the tables of coverage need its functions
import pytest

NEAR = 12
"""Lines above a line in which the statement begins whose part it is."""


class Executed:
    """Lines that each test executes, and its seconds, as ``python -m tests.mutants measure`` has written them."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._tables = sqlite3.connect(folder / "lines", check_same_thread=False)
        self._lock = threading.Lock()
        self._root = root
        self.seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())
        self._files = dict(self._tables.execute("select path, id from file"))

    def tests(self, path: str, line: int) -> list[str]:
        """Return the tests that execute a line, the fastest first."""
        file = self._files.get(str((self._root / path).resolve()))
        names: set[str] = set()
        for near in range(line, max(0, line - NEAR), -1):
            with self._lock:
                rows = self._tables.execute(
                    "select distinct context.context from arc join context on context.id = arc.context_id "
                    "where arc.file_id = ? and (arc.fromno = ? or arc.tono = ?)",
                    (file, near, near),
                ).fetchall()
            names = {name for (name,) in rows if name in self.seconds}
            if names:
                break
        return sorted(names, key=lambda name: (self.seconds[name], name))


class Durations:
    """Plugin of pytest that writes the seconds of each test, set-up included, to a file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(self._seconds))


def within(tests: Iterable[str], seconds: dict[str, float], limit: float) -> list[str]:
    """Return the first tests that together take at most ``limit`` seconds, and at least one."""
    chosen: list[str] = []
    total = 0.0
    for test in tests:
        total += seconds[test]
        if chosen and total > limit:
            break
        chosen.append(test)
    return chosen


if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[2:], plugins=[Durations(Path(sys.argv[1]))]))
