"""Equal random numbers on all ranks: PyTorch's, whenever it is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.launch import run_script

# Seeds itself by the system, as PyTorch does.
TORCH = """
import os
seeds = [os.urandom(8)]
def manual_seed(seed):
    seeds.append(seed)
"""
SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
if sys.argv[2] == "before":
    import torch
from matex_data.mpi.library import MPI
from matex_data.training.comm.channel import open_channel
from matex_data.training.launcher.seeding import seed_all_ranks

channel = open_channel()
seed_all_ranks(channel)
import torch, torch.utils
found = channel.host.allgather_object(torch.seeds)
if channel.rank == 0:
    print("RESULT", *[len(seeds) for seeds in found], *[len(set(column)) for column in zip(*found)])
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_pytorch_is_seeded_alike(when: str, tmp_path: Path) -> None:
    """Its stand-in: 2 seeds on each rank, of which the first, its own, differs, and the second does not."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(TORCH)
    (tmp_path / "torch" / "utils.py").touch()
    done = run_script(2, SCRIPT, str(tmp_path), when)
    assert done.returncode == 0, done.stderr
    assert "RESULT 2 2 2 1" in done.stdout
