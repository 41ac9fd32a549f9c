"""One seed of Python's hashes for all ranks, so that sets of strings have one order."""

from __future__ import annotations

import os
import sys

VARIABLE = "PYTHONHASHSEED"


def restart_with_hash_seed() -> None:
    """Start this program once more with a fixed ``PYTHONHASHSEED``, unless it is set.

    Python draws the seed when it starts, on each rank another one. Call it before MPI begins and before heavy imports.
    The process keeps its id and its open files, by which a rank speaks to its launcher; its children inherit the seed.
    """
    if VARIABLE in os.environ:
        return
    os.environ[VARIABLE] = "0"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
