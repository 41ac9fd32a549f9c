"""Scripts that know nothing of ranks end, under ``matex run``, with the weights of plain Python."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.launch import environment, run_script

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = ["arrays", "pipeline", "generator", "custom_loop", "functional", "session"]
LAUNCHER = "from matex_data.training.launcher import main; main()"


@functools.cache
def _plain(name: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    folder.mkdir()
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), str(folder / "plain.weights.h5")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return re.findall("^RESULT .*|^ORDER .*", done.stdout, re.MULTILINE), _weights(folder)


def _weights(folder: Path) -> dict[str, Any]:
    """All arrays of the file that the script wrote."""
    found: dict[str, Any] = {}
    for path in folder.glob("*.weights.h5"):
        with h5py.File(path) as file:
            file.visititems(lambda key, item: found.update({key: item[()]}) if isinstance(item, h5py.Dataset) else None)
    for path in folder.glob("*.npz"):
        with np.load(path) as arrays:
            found.update(arrays)
    return found


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_weights_of_plain_python(name: str, size: int, plain_folder: Path, tmp_path: Path) -> None:
    results, expected = _plain(name, plain_folder / name)
    done = run_script(size, LAUNCHER, str(SCRIPTS / f"{name}.py"), str(tmp_path / "x.weights.h5"), timeout=150)
    assert done.returncode == 0, done.stderr
    found = re.findall("^RESULT .*|^ORDER .*", done.stdout, re.MULTILINE)
    assert len(found) == len(results), done.stdout  # rank 0 alone prints
    for mine, reference in zip(found, results, strict=True):
        numbers = [[float(word) for word in line.split()[1:]] for line in (mine, reference)]
        np.testing.assert_allclose(*numbers, rtol=2e-4)
    weights = _weights(tmp_path)
    assert weights.keys() == expected.keys()
    assert expected
    for key, array in expected.items():
        np.testing.assert_allclose(weights[key], array, rtol=1e-3, atol=1e-4 * np.abs(array).max(), err_msg=key)
