"""Loops that Numba compiles."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.launch import ROOT

SCRIPT = """
import sys
import numpy as np
from matex_data.readers.images.decoding.resample import compiled_transposition

out = np.empty((4, 2), np.uint8)
compiled_transposition(1)(np.arange(8, dtype=np.uint8).reshape(2, 4), out)
print(out.reshape(-1).tolist(), "awkward" in sys.modules)

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


def test_no_folder_for_compiled_code() -> None:
    # The nodes of a cluster may have neither a home nor a package folder that is writable.
    nowhere = {**os.environ, "NUMBA_CACHE_LOCATOR_CLASSES": "IPythonCacheLocator"}  # finds no cache folder for a module
    script = SCRIPT.partition("import awkward")[0]
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT, env=nowhere, check=False)
    assert done.stdout == "[0, 4, 1, 5, 2, 6, 3, 7] False\n", done.stderr


MEANWHILE = """
import threading
from matex_data.readers.images.decoding.compiled import _without_extensions

begun, end = threading.Event(), threading.Event()

def compile_loops():
    with _without_extensions():
        begun.set()
        end.wait(60)

thread = threading.Thread(target=compile_loops)
thread.start()
begun.wait()
import awkward, numba

@numba.njit
def total(values):
    found = 0
    for value in values:
        found += value
    return found

print(total(awkward.Array([1, 2])))
end.set()
thread.join()
"""


def test_the_user_may_compile_meanwhile() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEANWHILE], capture_output=True, text=True, timeout=100, cwd=ROOT, check=False
    )
    assert done.stdout == "3\n", done.stderr
