"""Every sample once and with its value, whatever threads, evictions, passes left early and forks do meanwhile.

``tests/support/stress.py`` is the program; it runs with caches and pools of size 2 and a switch interval of 1 µs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import ROOT, run_script
from tests.support.stress_files import KINDS

STRESS = ROOT / "tests" / "support" / "stress.py"


def _stress(folder: Path, threads: int, files: int, rows: int, rounds: int, *kinds: str, timeout: float) -> int:
    """Return the number of samples that were compared; ``kinds`` may end with options."""
    numbers = [str(number) for number in (threads, files, rows, rounds)]
    done = run_script(0, STRESS, str(folder), *numbers, *kinds, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return int(done.stdout)


def test_many_files_and_threads(tmp_path: Path) -> None:
    assert _stress(tmp_path, 8, 75, 3, 1, "npy", "gzip", "csv", "ttree", timeout=100) > 4 * 2 * 2 * 75 * 3


INTERRUPTED = ("gzip", "compound", "csv", "csv-gzip", "ttree", "lhe-gzip")


def test_interrupts_at_any_moment(tmp_path: Path) -> None:
    assert _stress(tmp_path, 2, 4, 20, 1, *INTERRUPTED, "--seconds", "8", timeout=110) > 100


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [INTERRUPTED[:3], INTERRUPTED[3:]])  # no test of this process may take ten minutes
def test_interrupts_for_five_minutes(tmp_path: Path, kinds: tuple[str, ...]) -> None:
    assert _stress(tmp_path, 2, 4, 20, 1, *kinds, "--seconds", "300", timeout=500) > 5_000


@pytest.mark.slow
@pytest.mark.parametrize("threads", [8, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layout(tmp_path: Path, kind: str, threads: int) -> None:
    assert _stress(tmp_path, threads, 300, 7, 2, kind, timeout=500) > 2 * 3 * 300 * 7


@pytest.mark.slow
@pytest.mark.parametrize("threads", [8, 16])
def test_1500_files(tmp_path: Path, threads: int) -> None:
    assert _stress(tmp_path, threads, 1500, 3, 2, "npy", timeout=500) > 2 * 3 * 1500 * 3


@pytest.mark.slow
def test_all_layouts_at_once(tmp_path: Path) -> None:
    assert _stress(tmp_path, 8, 20, 7, 1, *KINDS, timeout=500) > 2 * 2 * len(KINDS) * 20 * 7
