"""Packages with readers of further formats, installed for a while."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from matex_data.readers import formats


@contextmanager
def installed(folder: Path, *packages: Path) -> Iterator[Path]:
    """Context manager: packages installed below a folder, for this process and for ranks that start later."""
    site = folder / "site"
    sources = [shutil.copytree(package, folder / package.name) for package in packages]  # a build leaves files there
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--target", str(site)]
    command = [sys.executable, "-m", "pip", "install", "-q", *options, *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")])))
        formats._plugin_formats.cache_clear()
        yield site
    formats._plugin_formats.cache_clear()
