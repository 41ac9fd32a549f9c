"""Mutants are drawn by a seed, each a program of its own; the tests of a line are those that executed it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants import drawing
from tests.mutants.selection import Executed, within
from tests.support.launch import environment

MODULE = '''
"""Text with 3 > 2."""
LIMIT: int = 5


def total(values: list[int], most: int | None = None) -> int:
    found = 0
    for value in values[1:LIMIT]:
        if most is not None and value > most:
            raise ValueError(f"{value} > {most}")
        found += 2 * value
    return min(found, 100)
'''


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(MODULE)
    monkeypatch.setattr(drawing, "GROUPS", {"group": ("package",)})
    return tmp_path


def test_a_larger_count_gives_the_same_mutants_and_more(root: Path) -> None:
    few, many = drawing.draw(root, 1, 5), drawing.draw(root, 1, 12)
    assert many[:5] == few and len({mutant.site for mutant in many}) == 12
    assert drawing.draw(root, 2, 12) != many
    assert len({mutant.site.operator for mutant in many}) > 5


def test_each_mutant_is_another_program_in_the_body_of_a_function(root: Path) -> None:
    for mutant in drawing.draw(root, 1, 12):
        lines = [(a, b) for a, b in zip(MODULE.split("\n"), mutant.code(root).split("\n"), strict=True) if a != b]
        assert len(lines) == 1 and mutant.site.line > 6, lines
        compile(mutant.code(root), "module", "exec")
    assert len({mutant.key(root) for mutant in drawing.draw(root, 1, 12)}) == 12


def test_tests_of_a_line_are_those_that_execute_it(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("def f(x):\n    if x:\n        return 1\n    return 2\n")
    program = (
        "from coverage import Coverage\nfrom tests.support import contexts\nfrom module import f\n"
        "contexts.switch('first')\nf(1)\ncontexts.switch('second')\nf(0)\ncontexts.switch('both')\nf(0), f(1)\n"
    )
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "-m", "coverage", "run", "--branch", "--include", "*/module.py", "--data-file", "lines"]
    subprocess.run([*command, "program.py"], cwd=tmp_path, env=environment(), check=True, timeout=60)
    (tmp_path / "seconds.json").write_text(json.dumps({"first": 1.0, "second": 2.0, "both": 0.5}))
    executed = Executed(tmp_path, tmp_path)
    assert executed.tests("module.py", 2) == ["both", "first", "second"]
    assert executed.tests("module.py", 3) == ["both", "first"]
    assert executed.tests("module.py", 4) == ["both", "second"]
    assert executed.tests("other.py", 4) == []


def test_tests_within_a_limit_are_at_least_one() -> None:
    seconds = {"a": 5.0, "b": 6.0, "c": 7.0}
    assert within(["a", "b", "c"], seconds, 11) == ["a", "b"]
    assert within(["c", "a"], seconds, 1) == ["c"]
