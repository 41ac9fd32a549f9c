"""The case of the start: from the command to the end of the first training step, under ``matex run`` and without."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.cases.reading import Goal, Measured, Setup
from benchmarks.harness.measure import ROOT, SETTINGS, TIME_LIMIT, mpiexec

SCRIPT = str(ROOT / "benchmarks" / "readers" / "first_step.py")
PLAIN = [sys.executable, SCRIPT]
LAUNCHED = [sys.executable, "-m", "matex_data", "run", "--all-output", SCRIPT]
ROUNDS = 3  # for each that is asked for: a start is short, and imports depend on what else the machine does
MOST = 1.2


def start(setup: Setup) -> Measured:
    """Measure the start of one rank and of two, one core each, beside as many processes of plain Python."""
    starts: dict[str, Callable[[], tuple[float, float]]] = {
        "python": partial(_start, [PLAIN]),
        "matex run, 1 rank": partial(_start, [LAUNCHED]),
        "two lone copies": partial(_start, [PLAIN, PLAIN]),
        "matex run, 2 ranks": partial(_start, [[mpiexec(), "-n", "2", "-bind-to", "core", *LAUNCHED]], bound=True),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in starts}
    for _ in range(ROUNDS * setup.repetitions):
        for name, run in starts.items():
            found[name].append(run())
    pairs = [("matex run, 1 rank", "python"), ("matex run, 2 ranks", "two lone copies")]
    goals = [Goal(f"{ours} / {plain}", _ratio(found[ours], found[plain]), MOST, most=True) for ours, plain in pairs]
    rows = [
        [name, *(f"{median(figures):.2f}" for figures in zip(*times, strict=True)), f"{min(times)[0]:.2f}"]
        for name, times in found.items()
    ]
    columns = ["", "seconds", "CPU seconds of a process", "seconds at best"]
    return Measured("From the command to the end of the first step, a small MLP", [], goals, columns, rows)


def _start(commands: Sequence[Sequence[str]], bound: bool = False) -> tuple[float, float]:
    """Run commands side by side; return the seconds to the last first step, and the most CPU seconds of a process.

    Parameters
    ----------
    bound : the command binds its processes to cores; otherwise each command gets a core.
    """
    environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # it would compile this package again at each start
    cores = sorted(os.sched_getaffinity(0))
    begin = time.time()
    running = [
        subprocess.Popen(
            [*([] if bound else ["taskset", "-c", str(core)]), *command],
            env=environment,
            cwd=Path(SCRIPT).parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for command, core in zip(commands, cores, strict=False)
    ]
    output = "".join(process.communicate(timeout=TIME_LIMIT)[0] for process in running)
    times = re.findall(r"FIRST STEP (\S+) (\S+)", output)
    if not times or any(process.returncode for process in running):
        raise RuntimeError(f"{commands[0]} ended without a first step")
    return max(float(end) for end, _ in times) - begin, max(float(cpu) for _, cpu in times)


def _ratio(ours: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]]) -> float:
    """Return the median of the ratios of seconds within each round."""
    return median(a / b for (a, _), (b, _) in zip(ours, plain, strict=True))


CASES: dict[str, list[Callable[[Setup], Measured]]] = {"start": [start]}
