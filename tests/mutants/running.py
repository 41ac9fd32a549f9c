"""Run tests on a mutant, in a copy of the sources, up to the first failure."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.drawing import Mutant
from tests.support.launch import environment, kill

PACKAGES = {
    "matex_data/readers": "readers",
    "matex_data/training": "training",
    "matex_data/_sample_data": "sample_data",
}
"""Links that make a copy of the repository importable, as ``package_dir`` of setup.cfg does."""
START_SECONDS = 45.0
"""Seconds for pytest to start and to collect, beside another one."""
SLOWER = 6
"""Times the seconds of a test that a mutant may take before it counts as hung."""


@dataclass(frozen=True)
class Outcome:
    """Result of tests on a mutant: the test that fails, ``hung``, or neither; and the seconds they took."""

    failed: str | None
    hung: bool
    seconds: float


class Tree:
    """Copy of the sources in which mutants live, one at a time."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True)
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, folder / name)
        for link, target in PACKAGES.items():
            (folder / link).symlink_to(folder / target)
        self._variables = environment(PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=str(folder))
        subprocess.run(
            [sys.executable, "-m", "compileall", "-q", "matex_data", "readers", "training", "tests"],
            cwd=folder, env={**self._variables, "PYTHONDONTWRITEBYTECODE": ""}, check=False, capture_output=True,
        )  # fmt: skip

    @contextlib.contextmanager
    def changed(self, mutant: Mutant) -> Iterator[None]:
        """Context manager: the module is the mutant's. Byte code of other modules stays valid."""
        path = self.folder / mutant.site.path
        source, status = path.read_text(), path.stat()
        path.write_text(mutant.code(self.folder))
        os.utime(path, (status.st_atime, status.st_mtime + 10 + mutant.number))  # Python compares whole seconds
        try:
            yield
        finally:
            path.write_text(source)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))

    def run(self, tests: Sequence[str], seconds: float) -> Outcome:
        """Run tests in their order, up to the first failure, for a time that is long for what they usually take."""
        names, limit = self.folder / "tests.txt", START_SECONDS + SLOWER * seconds
        names.write_text("\n".join(tests))
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", f"@{names}"]
        begin = time.monotonic()
        with (self.folder / "output.txt").open("w+") as output:
            process = subprocess.Popen(
                [*command, "--tb=line", "-rfE"],
                cwd=self.folder,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            hung = False
            try:
                process.wait(limit)
            except subprocess.TimeoutExpired:
                hung = True
            finally:
                process.send_signal(signal.SIGTERM)
                kill(process)
            output.seek(0)
            text = output.read()
        seconds = time.monotonic() - begin
        if hung:
            return Outcome(None, True, seconds)
        failed = re.search(r"^(?:FAILED|ERROR) (\S.*?)(?: - .*)?$", text, re.MULTILINE)
        if process.returncode == 0:
            return Outcome(None, False, seconds)
        return Outcome(failed[1] if failed else f"pytest ended with {process.returncode}", False, seconds)
