"""Name of the running test, which coverage keeps beside each line: `make mutants` chooses the tests of a line by it."""

from __future__ import annotations

import os
import sys

VARIABLE = "PYTEST_CURRENT_TEST"
"""Environment variable in which pytest names the test and its phase."""


def current() -> str:
    """Return the identifier of the test that this process, or the one that started it, runs; empty outside of tests."""
    return os.environ.get(VARIABLE, "").rpartition(" ")[0]


def switch(test: str) -> None:
    """Count the lines that this process executes from here on to a test, if coverage is measured."""
    if "coverage" in sys.modules:
        from coverage import Coverage

        if (measured := Coverage.current()) is not None:
            measured.switch_context(test)
