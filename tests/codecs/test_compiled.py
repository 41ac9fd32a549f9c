"""Loops that Numba compiles."""

from __future__ import annotations

import subprocess
import sys

from tests.support.launch import ROOT

SCRIPT = """
import sys
import numpy as np
from matex_data.codecs.shuffle import unshuffle

out = np.empty(8, np.uint8)
unshuffle(np.arange(8, dtype=np.uint8), 2, out)
print(out.tolist(), "awkward" in sys.modules)

import awkward, numba

@numba.njit
def total(values):
    found = 0
    for value in values:
        found += value
    return found

print(total(awkward.Array([1, 2])))
"""


def test_extensions_of_numba_are_left_to_the_code_of_the_user() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )
    assert done.stdout.splitlines() == ["[0, 4, 1, 5, 2, 6, 3, 7] False", "3"], done.stderr
