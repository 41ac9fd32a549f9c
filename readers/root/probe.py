"""Trial of branches of C++ objects in a child process, since uproot may misread them as objects of any size."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from matex_data.machine import without_rank
from matex_data.readers.root.files import open_tree

MEMORY_BYTES = 2 << 30  # that reading one entry may take
SECONDS = 120


def unreadable(path: str, key: str, names: Sequence[str]) -> Mapping[str, str]:
    """Return the reason for each of these branches whose first entry uproot cannot read.

    Parameters
    ----------
    path, key : of the file, and of the tree in it.
    """
    command = [sys.executable, "-m", __name__, path, key]
    reasons = dict.fromkeys(names, f"no answer within {SECONDS} seconds, or the process ended")
    try:
        output = subprocess.run(
            command,
            input=json.dumps(list(names)).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            env=without_rank(),
        ).stdout
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
    for line in output.splitlines():
        with suppress(ValueError):  # the last line, of a process that ended
            name, reason = json.loads(line)
            reasons[name] = reason
    return {name: reason for name, reason in reasons.items() if reason}


def first_line(error: BaseException) -> str:
    """Return the kind of an error of uproot, and the beginning of its message."""
    lines = [line.strip() for line in str(error)[:2000].split("\n") if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:200]}"


def _try_all(path: str, key: str, names: Sequence[str]) -> None:
    """Print for each branch its name, and the reason if uproot cannot read its first entry, as lines of JSON."""
    tree = open_tree(path, key)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if _HAS_PROC else 0
    with suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    for name in names:
        reason = ""
        try:
            tree[name].array(entry_start=0, entry_stop=1, library="ak")
        except Exception as error:  # uproot raises errors of many kinds
            reason = first_line(error)
        print(json.dumps([name, reason]), flush=True)


_HAS_PROC = Path("/proc/self/statm").exists()

if __name__ == "__main__":
    _try_all(sys.argv[1], sys.argv[2], json.load(sys.stdin))
