"""Scripts of the documentation that need no Slurm: that of PBS, and the image of a container."""

from __future__ import annotations

import os
import shutil
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


TRAINS = """
import keras
import numpy as np

keras.utils.set_random_seed(0)
x = np.random.rand(64, 8).astype("float32")
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x.sum(1), epochs=2, verbose=0)
print("trained")
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_image_is_built_without_a_network_and_trains(tmp_path: Path) -> None:
    """Build on a minimal Debian, which needs no registry. Its Python is 3.11, as that of the wheels has to be."""
    if os.geteuid() or sys.version_info[:2] != (3, 11) or not (shutil.which("buildah") and shutil.which("debootstrap")):
        pytest.skip("needs root, Python 3.11, buildah and debootstrap")
    variables = {**os.environ, "BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
    storage = ("--root", str(tmp_path / "images"), "--runroot", str(tmp_path / "run"))

    def call(*command: str) -> str:
        done = subprocess.run(command, env=variables, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=600)
        assert done.returncode == 0, command
        return done.stdout.strip()

    def buildah(*command: str) -> str:
        return call("buildah", *storage, *command)

    call("debootstrap", "--variant=minbase", "--include=python3,python3-venv", "bookworm", str(tmp_path / "debian"))
    base = buildah("from", "scratch")
    buildah("copy", "-q", base, str(tmp_path / "debian"), "/")
    buildah("commit", "-q", base, "localhost/debian:minimal")
    call(sys.executable, "-m", "pip", "wheel", "-q", "--wheel-dir", str(tmp_path / "wheels"), f"{ROOT}[all,mpi]")
    options = ("--network", "none", "--build-arg", "BASE=localhost/debian:minimal", "--tag", "matex")
    buildah("build", *options, "--file", str(SCRIPTS / "Dockerfile"), str(tmp_path))
    (tmp_path / "train.py").write_text(TRAINS)
    made = buildah("from", "--pull-never", "localhost/matex")
    buildah("copy", "-q", made, str(tmp_path / "train.py"), "/train.py")
    assert buildah("run", made, "--", "matex", "run", "-n", "2", "/train.py").splitlines()[-1] == "trained"
