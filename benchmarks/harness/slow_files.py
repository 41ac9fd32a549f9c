"""File system of a remote storage: ``python -m benchmarks.harness.slow_files FOLDER MOUNT`` until it is unmounted.

It shows a folder, read-only, and lets each read of up to a megabyte and each operation on metadata wait. Any number of
them may wait at once. Nothing is kept in the page cache. Needs FUSE (``fuse3`` of the system) and ``mfusepy``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import IO, Any

READ_SECONDS, METADATA_SECONDS = 0.005, 0.001
READ_BYTES = 1 << 20  # of one request, the most of FUSE
START_LIMIT = 10.0  # seconds
COUNTS = "/.counts"  # file with the numbers of requests so far


@contextmanager
def mounted(folder: Path, mount: Path) -> Iterator[Path]:
    """Context manager: show ``folder`` at ``mount``, with the delays of a remote storage.

    Raises
    ------
    OSError : the system does not allow it, or lacks FUSE.
    """
    mount.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.harness.slow_files", str(folder), str(mount)]
    with tempfile.TemporaryFile("w+") as talk:  # a full pipe would stop it
        server = subprocess.Popen(command, stdout=talk, stderr=talk)
        try:
            _wait_for_mount(mount, server, talk)
            yield mount
        finally:
            if mount.is_mount():
                subprocess.run(["fusermount3", "-u", "-z", str(mount)], check=False)
            server.terminate()
            server.wait()


def _wait_for_mount(mount: Path, server: subprocess.Popen[bytes], talk: IO[str]) -> None:
    deadline = time.monotonic() + START_LIMIT
    while not mount.is_mount():
        if server.poll() is not None or time.monotonic() > deadline:
            talk.seek(0)
            raise OSError(f"no file system in user space: {talk.read().strip()[-500:]}")
        time.sleep(0.05)


def counts(mount: Path) -> dict[str, int]:
    """Return the requests of a mounted file system so far: reads, their bytes, and operations on metadata."""
    found: dict[str, int] = json.loads((mount / COUNTS[1:]).read_text().strip("\0"))
    return found


def main() -> None:
    """Serve the file system in the foreground."""
    import mfusepy

    class Slow(mfusepy.Operations):  # type: ignore[misc, unused-ignore]
        """Read-only view of a folder."""

        use_ns = True

        def __init__(self, root: str) -> None:
            self.root, self.lock = root, Lock()
            self.counts = {"reads": 0, "bytes": 0, "metadata": 0}

        def _metadata(self) -> None:
            with self.lock:
                self.counts["metadata"] += 1
            time.sleep(METADATA_SECONDS)

        def init_with_config(self, connection: Any, config: Any) -> None:
            connection.max_background = 256

        def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
            if path == COUNTS:
                return {"st_mode": 0o100444, "st_size": 200, "st_nlink": 1}
            self._metadata()
            try:
                found = os.lstat(self.root + path)
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno) from error
            names = ("st_mode", "st_size", "st_nlink", "st_uid", "st_gid", "st_ino")
            nanoseconds = {name: getattr(found, f"{name}_ns") for name in ("st_mtime", "st_atime", "st_ctime")}
            return {name: getattr(found, name) for name in names} | nanoseconds

        def readdir(self, path: str, fh: int) -> list[Any]:
            """Return the names with the kinds of the files, as most file systems do."""
            self._metadata()
            with os.scandir(self.root + path) as entries:
                kinds = [(entry.name, 0o040000 if entry.is_dir() else 0o100000) for entry in entries]
            return [".", "..", *((name, {"st_mode": kind}, 0) for name, kind in kinds)]

        def open(self, path: str, flags: int) -> int:
            if path == COUNTS:
                return 0
            self._metadata()
            return os.open(self.root + path, os.O_RDONLY)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            if path == COUNTS:
                return json.dumps(self.counts).encode()[offset : offset + size]
            time.sleep(READ_SECONDS)
            data = os.pread(fh, size, offset)
            with self.lock:
                self.counts["reads"] += 1
                self.counts["bytes"] += len(data)
            return data

        def release(self, path: str, fh: int) -> None:
            if path != COUNTS:
                os.close(fh)

    root, mount = sys.argv[1:]
    mfusepy.FUSE(Slow(str(Path(root).resolve())), mount, foreground=True, ro=True, direct_io=True)


if __name__ == "__main__":
    main()
