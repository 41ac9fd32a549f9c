"""What a run of tests tells: commit and speed of the machine at its begin; seconds and reasons of skips at its end."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections import Counter

import pytest

from tests.support import machine_speed
from tests.support.launch import ROOT

BEGIN = "MATEX_TEST_BEGIN"
"""Environment variable with the time at which `make` began, in seconds since 1970."""
MPI_VARIABLES = ("MATEX_MPIEXEC", "MPI4PY_MPIABI", "OPAL_PREFIX", "LD_LIBRARY_PATH")
"""Environment variables that choose Open MPI, as the Makefile sets them."""


def pytest_report_header() -> str:
    """Return the lines that a run begins with."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    return f"commit: {commit}\nspeed: 20 million additions take {machine_speed.additions():.2f} s"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> pytest.TestReport:
    """Add the command that repeats a test to the report of its failure."""
    report: pytest.TestReport = yield
    if report.failed:
        variables = [f"{name}={shlex.quote(os.environ[name])}" for name in MPI_VARIABLES if name in os.environ]
        python = os.path.relpath(sys.executable, ROOT)
        command = [*variables, python, "-m", "pytest", shlex.quote(item.nodeid)]
        report.sections.append(("Repeat", " ".join(command)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write how many tests were skipped for each reason, and the seconds since `make` began."""
    reasons: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        *_, reason = report.longrepr
        reasons[str(reason).removeprefix("Skipped: ")] += 1
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
    if BEGIN in os.environ:
        seconds = time.time() - float(os.environ[BEGIN])
        speed = f"20 million additions take {machine_speed.additions():.2f} s"
        terminalreporter.write_line(f"{seconds:.0f} s since make began, where {speed}")
