"""Loops that Numba compiles."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.launch import ROOT

SCRIPT = """
import numpy as np
from numba.core import entrypoints
from matex_data.readers.images.decoding.resample import compiled_transposition

load = entrypoints.init_all
out = np.empty((4, 2), np.uint8)
compiled_transposition(1)(np.arange(8, dtype=np.uint8).reshape(2, 4), out)
print(out.reshape(-1).tolist(), entrypoints.init_all is load)

import awkward, numba

@numba.njit
def total(values):
    found = 0
    for value in values:
        found += value
    return found

print(total(awkward.Array([1, 2])))
"""


def test_numba_is_left_as_it_is() -> None:
    """Nothing of Numba is replaced, and what the user compiles works as well."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )
    assert done.stdout.splitlines() == ["[0, 4, 1, 5, 2, 6, 3, 7] True", "3"], done.stderr


def test_no_folder_for_compiled_code() -> None:
    # The nodes of a cluster may have neither a home nor a package folder that is writable.
    nowhere = {**os.environ, "NUMBA_CACHE_LOCATOR_CLASSES": "IPythonCacheLocator"}  # finds no cache folder for a module
    script = SCRIPT.partition("import awkward")[0]
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=nowhere, check=False)
    assert done.stdout == "[0, 4, 1, 5, 2, 6, 3, 7] True\n", done.stderr
