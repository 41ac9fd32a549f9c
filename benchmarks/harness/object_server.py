"""Store of objects on this machine: ``python -m benchmarks.harness.object_server FOLDER`` until its input ends.

It serves the files of a folder by HTTP with byte ranges, and lets each answer wait, as a store in the same data centre
does. It counts requests and the bytes that it sends.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from typing import ClassVar
from urllib.parse import unquote
from urllib.request import urlopen

ANSWER_SECONDS = 0.020
COUNTS = "/.counts"  # object with the numbers so far


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Context manager: serve a folder, and return its URL."""
    command = [sys.executable, "-m", "benchmarks.harness.object_server", str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.stdin.close()


def counts(url: str) -> dict[str, int]:
    """Return the requests for objects so far, and the bytes that were sent."""
    with urlopen("/".join(url.split("/")[:3]) + COUNTS) as answer:
        found: dict[str, int] = json.load(answer)
    return found


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # connections stay open
    folder: ClassVar[Path]
    found: ClassVar[dict[str, int]] = {"requests": 0, "bytes": 0}
    lock: ClassVar[Lock] = Lock()

    def do_HEAD(self) -> None:
        self._answer(with_content=False)

    def do_GET(self) -> None:
        if self.path == COUNTS:
            content = json.dumps(self.found).encode()
            self._begin(200, len(content))
            self.wfile.write(content)
        else:
            self._answer(with_content=True)

    def _answer(self, with_content: bool) -> None:
        time.sleep(ANSWER_SECONDS)
        path = self.folder / unquote(self.path).lstrip("/")
        if not path.is_file():
            self._begin(404, 0)
            return
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            begin, end = self._range(status.st_size)
            partial = {"Content-Range": f"bytes {begin}-{end - 1}/{status.st_size}"} if "Range" in self.headers else {}
            changed = {"Last-Modified": formatdate(status.st_mtime, usegmt=True), "ETag": f'"{status.st_mtime_ns:x}"'}
            self._begin(206 if partial else 200, end - begin, {**partial, **changed})
            sent = 0
            while with_content and begin + sent < end:
                sent += os.sendfile(self.connection.fileno(), file.fileno(), begin + sent, end - begin - sent)
        with self.lock:
            self.found["requests"] += 1
            self.found["bytes"] += sent

    def _range(self, size: int) -> tuple[int, int]:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted is None:
            return 0, size
        return int(wanted[1]), min(size, int(wanted[2] or size) + 1)

    def _begin(self, status: int, nbytes: int, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(nbytes), "Accept-Ranges": "bytes", **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.flush()

    def log_message(self, format: str, *arguments: object) -> None:
        """Write no line for each request."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024  # of Python's five, connections of several ranks at once are refused


def main() -> None:
    """Serve until the input ends."""
    _Handler.folder = Path(sys.argv[1]).resolve()
    server = _Server(("127.0.0.1", 0), _Handler)
    print(server.server_port, flush=True)
    Thread(target=server.serve_forever, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
