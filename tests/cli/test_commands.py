"""The command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
from PIL import Image

from tests.support.launch import run_script

CALL = "import sys; from matex_data.cli.commands import main; sys.argv[0] = 'matex'; main()"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("cli") / "events.h5"
    with h5py.File(path, "w") as file:
        energy = np.arange(500, dtype="f4")
        energy[7] = np.nan
        file["energy"] = energy
        file["energy"].attrs["units"] = "GeV"
        file.create_dataset("hits", data=np.ones((500, 30)), chunks=(50, 30), fletcher32=True)
    return str(path)


def test_inspect(path: str) -> None:
    done = run_script(1, CALL, "inspect", path)
    assert done.returncode == 0, done.stderr
    for text in ("500 samples", "energy", "float32", "(30,)", "units=GeV", "blocks a window"):
        assert text in done.stdout


def test_plan(path: str, tmp_path: Path) -> None:
    options = ("--ranks", "20", "--batch-size", "100", "--ranks-per-node", "4")
    done = run_script(2, CALL, "plan", path, *options, "--json", "--plot", str(tmp_path / "plan.png"))
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["steps"] == 5 and figures["bytes_per_node"] == 4 * figures["bytes_per_rank"]
    assert figures["amplification"] >= 1
    with Image.open(tmp_path / "plan.png") as picture:
        assert picture.width > picture.height
    done = run_script(1, CALL, "plan", path, *options, "--shuffle", "all")
    assert done.returncode == 1 and "unknown shuffle" in done.stderr


@pytest.mark.parametrize("size", [1, 3])
def test_validate_counts_missing_values(path: str, size: int) -> None:
    done = run_script(size, CALL, "validate", path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("500 samples are sound") == 1
    assert "499" in done.stdout and "1" in done.stdout


def test_validate_names_the_damaged_row(path: str, tmp_path: Path) -> None:
    with h5py.File(path) as file:
        chunk = file["hits"].id.get_chunk_info(2)
    content = bytearray(Path(path).read_bytes())
    content[chunk.byte_offset + 5] ^= 4
    (tmp_path / "flipped.h5").write_bytes(content)
    done = run_script(2, CALL, "validate", str(tmp_path / "flipped.h5"))
    assert done.returncode == 1
    assert "row 100" in done.stderr and "'hits'" in done.stderr and "Traceback" not in done.stderr


def test_bench(path: str) -> None:
    done = run_script(2, CALL, "bench", path, "--epochs", "2")
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout and "MB/s on a rank" in done.stdout
    assert done.stdout.count("shuffle: ") == 1


def test_a_missing_file(path: str) -> None:
    done = run_script(1, CALL, "inspect", path + "x")
    assert done.returncode == 1
    assert "no such file" in done.stderr and "events.h5" in done.stderr


def test_run_passes_the_scripts_own_flags(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:], __name__)")
    done = run_script(1, CALL, "run", str(script), "--epochs", "3", "--help")
    assert done.returncode == 0, done.stderr
    assert "['--epochs', '3', '--help'] __main__" in done.stdout


def test_python_m_is_the_same() -> None:
    code = f"import subprocess; subprocess.run([{sys.executable!r}, '-m', 'matex_data', '--help'], check=True)"
    done = run_script(1, code)
    assert all(word in done.stdout for word in ("inspect", "plan", "validate", "bench", "run"))
