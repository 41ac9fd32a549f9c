"""Scripts of the documentation that need no Slurm: that of PBS, and the sections of the container."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.slurm import ROOT, mpi_libraries
from tests.cluster.test_cluster import SCRIPTS, TRAIN, arrays, one_process
from tests.support.launch import environment

QSUB = '#!/bin/sh\nfor word in "$@"; do echo "$word"; done > submitted\n'
"""Command that notes what it is to submit: there is no server of PBS here."""


def test_every_script_is_one_for_bash() -> None:
    for script in SCRIPTS.glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True, timeout=10)
    sections = re.split(r"^%(\w+)\n", (SCRIPTS / "matex.def").read_text(), flags=re.MULTILINE)
    assert sections[1::2] == ["post", "environment", "runscript"]
    for section in sections[2::2]:
        subprocess.run(["sh", "-n"], input=section, text=True, check=True, timeout=10)


@pytest.mark.slow
def test_a_job_of_pbs_submits_itself_again_and_goes_on(tmp_path: Path) -> None:
    """Set the variables of PBS, and let MPICH's launcher read its file of nodes."""
    if "mpich" not in mpi_libraries(ROOT):
        pytest.skip("mpich is not installed")
    (tmp_path / "qsub").write_text(QSUB)
    (tmp_path / "qsub").chmod(0o755)
    (tmp_path / "nodes").write_text("localhost\nlocalhost\n")
    variables = {
        "PBS_JOBID": "12.server",
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PBS_O_WORKDIR": str(tmp_path),
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHON": sys.executable,
        "SCRIPT": f"{TRAIN} {tmp_path}/out.npz",
    }

    def run(**more: str) -> int:
        command = ["bash", str(SCRIPTS / "pbs.sh")]
        return subprocess.run(command, env=environment(**variables, **more), cwd=tmp_path, timeout=200).returncode

    assert run(WALLTIME="50", PAUSE="2", MATEX_END_MARGIN="25") == 75
    option, values, script = (tmp_path / "submitted").read_text().splitlines()
    assert option == "-v" and script == "docs/clusters/pbs.sh"
    assert not (tmp_path / "out.npz").exists()
    assert run(**dict(value.split("=", 1) for value in values.split(",")[1:])) == 0
    for found, expected in zip(arrays(tmp_path / "out.npz"), one_process(tmp_path), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)
