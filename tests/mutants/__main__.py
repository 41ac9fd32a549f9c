"""Run mutants: ``python -m tests.mutants``, which ``make mutants`` does; ``--help`` lists what can be chosen."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.mutants.drawing import GROUPS, Mutant, draw
from tests.mutants.running import Tree
from tests.mutants.selection import Executed, within
from tests.support.launch import ROOT, share_fork_server

FOLDER = ROOT / "build" / "mutants"
SOURCES = ("matex_data", "readers", "training")
FIRST_SECONDS = 60.0
"""Seconds of tests that each mutant meets first; for those that survive, see ``--package-seconds``."""


def main() -> None:
    """Measure which test executes which line unless that is known, run mutants, and print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--part", default="1/1", help="1/8: the first of eight parts")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--package-seconds", type=float, default=180.0, help="of further tests that survivors meet")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for results, which a later run continues")
    parser.add_argument("--report", action="store_true", help="print the table of the results so far")
    parser.add_argument("--again", action="store_true", help="run mutants again that have a result")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    number, parts = map(int, options.part.split("/"))
    mutants = [m for m in draw(ROOT, options.seed, options.count) if m.number % parts == number - 1]
    if not options.report:
        measure(options.folder)
        share_fork_server()
        Run(options.folder, options.package_seconds, options.again, options.jobs).run(mutants)
    print(report(mutants, Results(options.folder)))


def measure(folder: Path) -> None:
    """Run the tests of ``make test`` under coverage, unless the sources are those of the last measurement."""
    digest = hashlib.sha256()
    for path in sorted(path for top in (*SOURCES, "tests") for path in ROOT.glob(f"{top}/**/*.py")):
        digest.update(f"{path}\0".encode() + path.read_bytes())
    stamp = folder / "measured"
    if stamp.exists() and stamp.read_text() == digest.hexdigest():
        return
    print("== Measuring which test executes which line")
    data = folder / "lines"
    for old in folder.glob("lines*"):
        old.unlink()
    pytest = ["-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"]
    coverage = [sys.executable, "-m", "coverage"]
    measured = [*coverage, "run", f"--data-file={data}", "-m", "tests.mutants.selection", str(folder / "seconds.json")]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [*measured, *pytest, "--timeout", "600", "-m", "not slow and not repeated and not frameworks"]
    code = subprocess.run(command, cwd=ROOT, env=variables, check=False).returncode
    if code not in (0, 1):  # 1: a test failed, as one may that measures time; its lines are known nevertheless
        sys.exit(f"pytest ended with {code}")
    subprocess.run([*coverage, "combine", "-q", f"--data-file={data}", str(folder)], cwd=ROOT, check=True)
    stamp.write_text(digest.hexdigest())


class Results:
    """Results of mutants, one a line in a file, which another run continues."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "results.jsonl"
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        self._by_key: dict[str, dict[str, Any]] = {row["key"]: row for row in map(json.loads, lines)}
        self._lock = threading.Lock()

    def __getitem__(self, mutant: Mutant) -> dict[str, Any] | None:
        return self._by_key.get(mutant.key(ROOT))

    def add(self, mutant: Mutant, **values: Any) -> None:
        """Append the result of a mutant."""
        row = {"key": mutant.key(ROOT), "number": mutant.number, "group": mutant.group, **values}
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
            self._by_key[row["key"]] = row


class Run:
    """Tests of mutants, several at a time."""

    def __init__(self, folder: Path, package_seconds: float, again: bool, jobs: int) -> None:
        self._folder, self._package_seconds, self._again, self._jobs = folder, package_seconds, again, jobs
        self._executed = Executed(folder, ROOT)
        self._results = Results(folder)
        self._trees = threading.local()
        self._count = iter(range(jobs))
        self._plain: Tree | None = None
        self._unchanged: dict[str, bool] = {}
        self._lock = threading.Lock()

    def run(self, mutants: Sequence[Mutant]) -> None:
        """Run the mutants that have no result yet, in their order."""
        with ThreadPoolExecutor(self._jobs) as threads:
            list(threads.map(self._one, mutants))

    def _one(self, mutant: Mutant) -> None:
        last = self._results[mutant]
        if last is not None and not self._again:
            return
        if not hasattr(self._trees, "tree"):
            self._trees.tree = Tree(ROOT, self._folder / f"tree{next(self._count)}")
        tree: Tree = self._trees.tree
        with tree.changed(mutant):
            outcome = self._outcome(tree, mutant, last)
        self._results.add(mutant, **outcome)
        print(f"{mutant.number:4} {outcome['outcome']:9} {mutant.site.path}:{mutant.site.line} {mutant.site.operator}"
              f"  {outcome.get('by', '')} {outcome['seconds']:.0f} s", flush=True)  # fmt: skip

    def _outcome(self, tree: Tree, mutant: Mutant, last: dict[str, Any] | None) -> dict[str, Any]:
        """Run the test that failed last time, then the fastest ones, then those of the package."""
        seconds = self._executed.seconds
        tests = self._executed.tests(mutant.site.path, mutant.site.line)
        if not tests:
            return {"outcome": "survived", "seconds": 0.0, "by": "no test executes the line"}
        first = within(tests, seconds, FIRST_SECONDS)
        package = [test for test in tests if test not in set(first) and _package(test) == _package(mutant.site.path)]
        other = [test for test in tests if test not in set(first) and _package(test) != _package(mutant.site.path)]
        rest = within([*package, *other], seconds, self._package_seconds) if package or other else []
        before = [last["by"]] if last is not None and last.get("by") in seconds else []
        total = 0.0
        for step in (before, first, rest):
            while step := [test for test in step if self._unchanged.get(test) is not False]:
                result = tree.run(step, sum(seconds[test] for test in step))
                total += result.seconds
                if result.hung:
                    return {"outcome": "hung", "by": "", "seconds": total}
                if result.failed and (result.failed not in step or self._passes_unchanged(result.failed)):
                    return {"outcome": "killed", "by": result.failed, "seconds": total}
                if not result.failed:
                    break
        return {"outcome": "survived", "seconds": total, "tests": len(first) + len(rest), "of": len(tests)}

    def _passes_unchanged(self, test: str) -> bool:
        """Return whether a test passes on the sources as they are; another failure says nothing about a mutant."""
        with self._lock:
            if test not in self._unchanged:
                if self._plain is None:
                    self._plain = Tree(ROOT, self._folder / "plain")
                self._unchanged[test] = self._plain.run([test], self._executed.seconds.get(test, 1.0)).failed is None
            return self._unchanged[test]


def _package(path: str) -> str:
    """Return the package of a module, or of a test: ``readers/hdf5``, ``epochs``, ``training/exact``."""
    parts = path.partition("::")[0].removeprefix("tests/").removeprefix("matex_data/").split("/")[:-1]
    return "/".join(parts[:2])


def report(mutants: Sequence[Mutant], results: Results) -> str:
    """Return the share that is killed by group as a table, and the survivors below it."""
    lines = ["| group | mutants | killed | share |", "|---|---|---|---|"]
    survivors = []
    totals = [0, 0]
    for group in GROUPS:
        found = [(m, row) for m in mutants if m.group == group and (row := results[m]) is not None]
        killed = sum(row["outcome"] != "survived" for _, row in found)
        survivors += [m for m, row in found if row["outcome"] == "survived"]
        totals = [totals[0] + len(found), totals[1] + killed]
        lines.append(f"| {group} | {len(found)} | {killed} | {killed / max(1, len(found)):.2f} |")
    lines.append(f"| all | {totals[0]} | {totals[1]} | {totals[1] / max(1, totals[0]):.2f} |")
    return "\n".join([*lines, "", "Survivors:", *(f"  {m.number} {m.key(ROOT)}" for m in survivors)])


if __name__ == "__main__":
    main()
