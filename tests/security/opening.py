"""Opens files one after the other, in a process that may take little more memory than it has: ``python -m``.

Reads lines of JSON, ``{"path": ..., "options": ..., "inputs": ...}``; prints a line of JSON for each, the error or "".
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

ALLOWED = 256 << 20  # bytes beside what the process has

if __name__ == "__main__":
    import astropy.io.fits  # noqa: F401  before the limit: modules and threads take memory, too
    import pyarrow.parquet  # noqa: F401
    import scipy.io  # noqa: F401

    from matex_data import open_dataset

    for number, line in enumerate(sys.stdin):
        case, text = json.loads(line), ""
        if number:  # after a harmless file, whose reading has started all threads
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + ALLOWED, resource.RLIM_INFINITY))
        try:
            data = open_dataset(case["path"], inputs=case.get("inputs"), **case.get("options", {}))
            next(iter(data.batches(2)), None)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        print(json.dumps(text), flush=True)
