"""The examples of docs/processes.md, on two ranks; what killed processes have left."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from matex_data.mpi import processes
from tests.support.frameworks import needs
from tests.support.launch import ROOT, run_script

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "processes.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processes") / "images.h5"
    with h5py.File(path, "w") as file:
        file["image"] = np.random.default_rng(0).permutation(960 * 16).astype("f4").reshape(960, 4, 4)
    return path


def test_processes_of_each_rank(images: Path) -> None:
    done = run_script(2, EXAMPLES[0], str(images), timeout=90)
    assert done.returncode == 0, done.stderr
    with h5py.File(images) as file:
        shares = file["image"][:].reshape(20, 2, -1).max(axis=(0, 2))
    assert sorted(done.stdout.splitlines()) == sorted(f"brightest {share}" for share in shares)


@needs("torch")
def test_workers_of_a_data_loader(images: Path) -> None:
    done = run_script(2, EXAMPLES[1], str(images), timeout=120)
    assert done.returncode == 0, done.stderr
    lines = [f"{workers} workers, epoch {epoch} 480 samples" for workers in (0, 2) for epoch in (0, 1)]
    assert sorted(done.stdout.splitlines()) == sorted(lines * 2)


def test_what_killed_processes_have_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, killed = platform.node(), 2**22 + 1
    left = [f".a{node}~{killed}~0", f".a{node}~{killed}~1", f".a{node}~{killed}~denied"]
    kept = [
        *(f".a{node}~{os.getpid()}~0", f".a{node}~{killed}", f".a{node}~~0", f".b{node}~{killed}~0"),
        *(f".aelsewhere~{killed}~0", f".a{node}-2~{killed}~0"),  # there it may run
        processes.unfinished_name(".a", "name.keras"),
    ]
    for name in (*left[1:], *kept):
        (tmp_path / name).touch()
    (tmp_path / left[0] / "within").mkdir(parents=True)
    unlink = Path.unlink

    def denied(path: Path, missing_ok: bool = False) -> None:
        if path.name.endswith("denied"):
            raise PermissionError("of another user")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", denied)
    processes.remove_unfinished(tmp_path, ".a")
    assert {path.name for path in tmp_path.iterdir()} == {*kept, left[2]}
    monkeypatch.setattr(Path, "glob", lambda *_: pytest.fail("the folder is listed again"))
    processes.remove_unfinished(tmp_path, ".a")
