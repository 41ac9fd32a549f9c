"""Trees that forked processes read at the same time, after their parent has opened them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import NoReturn

import numpy as np
import uproot

from matex_data.errors import DataError
from matex_data.readers.root.entries import Clusters
from matex_data.readers.root.reader import index
from tests.support.serial import every_row

ROWS, SECONDS = 100_000, 0.5  # larger than the buffer of a file
VALUES = np.random.default_rng(0).integers(0, 1 << 62, ROWS)


def _read_again_and_again(path: str) -> bool:
    """Return whether all reads of half a second give the right values."""
    opened, end = index(path, ["n"]), time.monotonic() + SECONDS
    while time.monotonic() < end:
        if not np.array_equal(every_row(opened, "n"), VALUES):
            return False
    return True


def _exit_after_reading(path: str) -> NoReturn:
    signal.alarm(30)  # ends a process that hangs
    code = 1
    try:
        code = 0 if _read_again_and_again(path) else 1
    except DataError:
        code = 2
    finally:
        os._exit(code)


def test_processes_do_not_share_a_position_in_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "events.root")
    with uproot.recreate(path) as file:
        file.mkrntuple("events", {"n": VALUES})
    opened = index(path, ["n"])
    (layout,) = opened.files[0].layouts.values()
    assert isinstance(layout.table, Clusters)  # type: ignore[attr-defined]
    every_row(opened, "n")
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            _exit_after_reading(path)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
