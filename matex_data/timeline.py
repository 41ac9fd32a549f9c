"""Timeline of a rank: what it does when, for viewers of Chrome traces such as Perfetto.

Source of the format: "Trace Event Format" of the Chromium project; events of type "X" (complete) and "M" (metadata).
"""

from __future__ import annotations

import atexit
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from matex_data import machine

MOST_EVENTS = 1_000_000  # of a rank; later ones are dropped


class Timeline:
    """Spans of time of the threads of this process.

    Parameters
    ----------
    path : file that is written at the end of the program, with the number of the rank in front of its suffix; None: no
        spans are recorded.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._events: list[dict[str, Any]] = []
        if path:
            atexit.register(self.write)

    @property
    def enabled(self) -> bool:
        """True if spans are recorded."""
        return bool(self._path)

    @contextmanager
    def span(self, name: str, category: str) -> Iterator[None]:
        """Context manager: record the time in it.

        Parameters
        ----------
        name : of the span.
        category : "data", "communication" or "step".
        """
        if not self._path:
            yield
            return
        begin = time.time()
        try:
            yield
        finally:
            self.add(name, category, begin)

    def add(self, name: str, category: str, begin: float) -> None:
        """Record a span that ends now.

        Parameters
        ----------
        begin : in seconds since the epoch, a clock that the ranks of a machine share.
        """
        if len(self._events) < MOST_EVENTS:
            span = {"ts": begin * 1e6, "dur": (time.time() - begin) * 1e6, "tid": threading.current_thread().name}
            self._events.append({"name": name, "cat": category, "ph": "X", **span})

    def write(self) -> None:
        """Write the file of this rank."""
        launched = machine.launched_rank()
        rank = launched.rank if launched else 0
        path = Path(str(self._path))
        threads = {event["tid"]: number for number, event in enumerate(self._events)}
        names = [("process_name", 0, f"rank {rank}"), *(("thread_name", tid, name) for name, tid in threads.items())]
        metadata = [{"name": kind, "ph": "M", "tid": tid, "args": {"name": name}} for kind, tid, name in names]
        spans = [{**event, "tid": threads[event["tid"]]} for event in self._events]
        events = [{**event, "pid": rank} for event in metadata + spans]
        path.with_suffix(f".{rank}{path.suffix}").write_text(json.dumps({"traceEvents": events}))


timeline = Timeline(os.environ.get("MATEX_TIMELINE"))
"""Timeline of this process; the environment variable ``MATEX_TIMELINE`` names its file."""
