"""Some damaged files of each format, the same at every run. ``make fuzz`` looks at thousands."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz.__main__ import IMAGES, PARTICLES, RECORDS, TABLES
from tests.support.launch import ROOT

FORMATS = [("hdf5", "netcdf"), ("csv", "npy", "npz", "idx", "cifar"), IMAGES, PARTICLES, TABLES]
FORMATS += [pytest.param(RECORDS, marks=pytest.mark.slow)]  # ASE and TensorFlow, which write them, take 20 s to load


@pytest.mark.parametrize("formats", FORMATS, ids=" ".join)
def test_damaged_files_are_read_right_or_refused(formats: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--quick", "--keep", str(tmp_path), "--formats", *formats]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
