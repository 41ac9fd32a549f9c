"""How fast this machine is now: limits of time in tests follow from it, and a run tells it beside its seconds."""

from __future__ import annotations

import os
import time

USUAL_SECONDS = 1.2
"""Seconds for 20 million additions on the machine on which limits of time were chosen."""
VARIABLE = "MATEX_TEST_SPEED"
"""Environment variable that passes the figure on to all processes of a run."""


def additions() -> float:
    """Return the seconds that Python needs here for 20 million additions, measured once a run from a tenth of them."""
    if VARIABLE not in os.environ:
        program = compile("total = 0\nfor number in range(2_000_000):\n    total += number", "additions", "exec")
        begin = time.perf_counter()
        exec(program, {})  # as python -c does it: in a function it would take half the time
        os.environ[VARIABLE] = f"{10 * (time.perf_counter() - begin):.2f}"
    return float(os.environ[VARIABLE])


def scaled(seconds: float) -> float:
    """Return a limit of time for this machine, on which other programs may run: never less than it was chosen for."""
    return seconds * max(1.0, additions() / USUAL_SECONDS)
