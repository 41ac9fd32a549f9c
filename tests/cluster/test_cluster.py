"""Jobs of Slurm on two nodes. The quick part runs in any test run, all of it in ``make test-cluster``."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import matex_data as md
from tests.cluster.slurm import ROOT, Cluster, JobState, Mpi, facts_of
from tests.support.launch import environment

RANKS = Path(__file__).with_name("ranks.py")
TRAIN = Path(__file__).with_name("train.py")
SCRIPTS = ROOT / "docs" / "clusters"
ONE_EACH = ("--nodes=2", "--ntasks=2", "--ntasks-per-node=1")
BOTH = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=2")
MEMORY = Path("/sys/fs/cgroup/memory")


def _run(
    slurm: Cluster, mpi: Mpi, *arguments: object, launcher: str | None = None, seconds: float = 120
) -> tuple[JobState, str]:
    """Run a task of ``ranks.py`` on two nodes; return the state of the job, and its output."""
    out = slurm.folder / f"out-{time.monotonic_ns()}"
    command = launcher or f"srun --mpi={mpi.srun}"
    words = " ".join(map(str, arguments))
    script = f"#!/bin/bash\n{command} $PYTHON {RANKS} {words}\ncode=$?\necho ended $(date +%s.%N)\nexit $code\n"
    job = slurm.submit(script, *BOTH, "--output", str(out), env=mpi.environment)
    return slurm.wait(job, seconds), out.read_text()


def _check_batches(path: Path, table: Path) -> None:
    """Compare the global batches with those of one process; lanes go to the ranks in order."""
    expected = [np.array(batch) for batch in md.open_dataset(str(table), inputs="x").batches(48, shuffle=True, seed=1)]
    found = np.load(path)
    assert found.shape == (len(expected), 48, 6)
    for batch, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.sort(batch[:, 0]), np.sort(other[:, 0]))


def test_ranks_on_two_nodes_read_the_batches_of_one_process(slurm: Cluster, mpi: Mpi, table: Path) -> None:
    state, out = _run(slurm, mpi, "read", table, slurm.folder / f"{mpi.name}.npy")
    assert state.state == "COMPLETED", out
    assert sorted(fact["node"] for fact in facts_of(out)) == ["node1", "node1", "node2", "node2"]
    _check_batches(slurm.folder / f"{mpi.name}.npy", table)


@pytest.mark.slow
def test_the_launcher_of_the_mpi_library_starts_ranks_on_both_nodes(slurm: Cluster, mpi: Mpi, table: Path) -> None:
    launcher = " ".join([*mpi.mpiexec, "-n", "4"])
    state, out = _run(slurm, mpi, "read", table, slurm.folder / "own.npy", launcher=launcher)
    assert state.state == "COMPLETED", out
    assert len({fact["node"] for fact in facts_of(out)}) == 2
    _check_batches(slurm.folder / "own.npy", table)


@pytest.mark.parametrize("victim", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_killed_rank_ends_the_job(slurm: Cluster, mpi: Mpi, table: Path, victim: int) -> None:
    state, out = _run(slurm, mpi, "die", table, victim, "kill")
    assert state.state == "FAILED" and state.exit_code != 0
    killed = max(fact["time"] for fact in facts_of(out))
    assert float(re.findall(r"ended ([\d.]+)", out)[0]) - killed < 5


@pytest.mark.slow
@pytest.mark.skipif(not MEMORY.exists(), reason="needs cgroups of version 1")
def test_a_rank_at_the_memory_limit_of_its_cgroup_ends_the_job(slurm: Cluster, mpi: Mpi, table: Path) -> None:
    group = MEMORY / f"matex-{os.getpid()}"
    limited = slurm.folder / "limited.sh"
    limited.write_text(
        f"#!/bin/bash\nif [ $SLURM_PROCID = 3 ]; then mkdir {group} && echo 600M > {group}/memory.limit_in_bytes && "
        f'echo $$ > {group}/tasks; fi\nexec "$@"\n'
    )
    limited.chmod(0o755)
    try:
        state, out = _run(slurm, mpi, "die", table, 3, "memory", launcher=f"srun --mpi={mpi.srun} {limited}")
    finally:
        time.sleep(0.5)
        group.rmdir()
    assert state.state == "FAILED", out
    last = max(fact["time"] for fact in facts_of(out) if "time" in fact)
    assert float(re.findall(r"ended ([\d.]+)", out)[0]) - last < 6


def test_ranks_that_mpi_does_not_connect_are_refused(slurm: Cluster, mpi: Mpi, table: Path) -> None:
    state, out = _run(slurm, mpi, "read", table, slurm.folder / "none.npy", launcher="srun --mpi=none")
    assert state.state == "FAILED"
    assert not (slurm.folder / "none.npy").exists()
    assert "remedy" in out, out


@pytest.mark.slow
def test_a_file_on_one_node_only_is_an_error_on_all(slurm: Cluster, mpi: Mpi, table: Path) -> None:
    slurm.on_node(slurm.nodes[0], "cp", "-p", str(table), "/tmp/only.h5")
    state, out = _run(slurm, mpi, "read", "/tmp/only.h5", slurm.folder / "only.npy")
    assert state.state == "FAILED"
    assert "/tmp/only.h5" in out and not (slurm.folder / "only.npy").exists()


@pytest.mark.slow
def test_copies_on_the_nodes_are_read(slurm: Cluster, mpi: Mpi, table: Path) -> None:
    for node in slurm.nodes:
        slurm.on_node(node, "cp", "-p", str(table), "/tmp/copy.h5")
    state, out = _run(slurm, mpi, "read", "/tmp/copy.h5", slurm.folder / f"copy-{mpi.name}.npy")
    assert state.state == "COMPLETED", out
    _check_batches(slurm.folder / f"copy-{mpi.name}.npy", table)


@pytest.mark.slow
def test_different_copies_are_an_error(slurm: Cluster, mpi: Mpi, table: Path) -> None:
    import h5py

    for node, rows in zip(slurm.nodes, (480, 360), strict=True):
        path = slurm.folder / f"{node.name}.h5"
        with h5py.File(path, "w") as file:
            file["x"] = np.ones((rows, 6), "float32")
        slurm.on_node(node, "cp", str(path), "/tmp/different.h5")
    state, out = _run(slurm, mpi, "read", "/tmp/different.h5", slurm.folder / "different.npy")
    assert state.state == "FAILED", out
    assert "/tmp/different.h5" in out


@pytest.mark.slow
def test_a_slow_file_system_is_read(slurm: Cluster, mpi: Mpi, table: Path) -> None:
    pytest.importorskip("mfusepy")
    data = slurm.folder / "data"
    data.mkdir(exist_ok=True)
    shutil.copy(table, data)
    for node in slurm.nodes:
        slurm.on_node(node, "mkdir", "-p", "/tmp/slow")
        if slurm.on_node(node, "mountpoint", "/tmp/slow", check=False).endswith("is a mountpoint"):
            continue
        slurm.start_on_node(node, sys.executable, "-m", "benchmarks.harness.slow_files", str(data), "/tmp/slow")
    time.sleep(3)
    state, out = _run(slurm, mpi, "read", "/tmp/slow/table.h5", slurm.folder / f"slow-{mpi.name}.npy")
    assert state.state == "COMPLETED", out
    _check_batches(slurm.folder / f"slow-{mpi.name}.npy", table)


def one_process(tmp_path: Path, *arguments: str) -> list[np.ndarray]:
    """Return the results of the script in plain Python."""
    command = [sys.executable, str(TRAIN), str(tmp_path / "one.npz"), *arguments]
    subprocess.run(command, env=environment(), check=True, timeout=240)
    return arrays(tmp_path / "one.npz")


def arrays(path: Path) -> list[np.ndarray]:
    with np.load(path) as found:
        return [found[name] for name in found.files]


def _submit(slurm: Cluster, mpi: Mpi, name: str, *options: str, **variables: str) -> int:
    """Submit ``slurm.sh`` with the training script, on two ranks."""
    out = str(slurm.folder / f"{name}.out")
    arguments = (str(TRAIN), str(slurm.folder / f"{name}.npz"))
    variables = {"CHECKPOINT": str(slurm.folder / f"{name}-checkpoint"), **mpi.environment, **variables}
    return slurm.submit(SCRIPTS / "slurm.sh", *ONE_EACH, "--output", out, *options, arguments=arguments, env=variables)


def _await_steps(progress: Path, steps: int, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not progress.exists() or len(progress.read_text()) < steps:
        assert time.monotonic() < end, "no step"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def undisturbed(slurm: Cluster, mpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """Train on two nodes without a disturbance, and compare with one process, up to rounding; return the results."""
    name = f"{mpi.name}-whole"
    job = _submit(slurm, mpi, name)
    expected = one_process(tmp_path_factory.mktemp("one"))
    state = slurm.wait(job, 300)
    assert state.state == "COMPLETED", (slurm.folder / f"{name}.out").read_text()
    found = arrays(slurm.folder / f"{name}.npz")
    for array, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, other, rtol=1e-3, atol=1e-5)
    return found


@pytest.mark.parametrize(
    ("mpi", "cause"),
    [
        ("mpich", "USR1"),
        *(pytest.param("mpich", cause, marks=pytest.mark.slow) for cause in ("requeue", "limit")),
        *(pytest.param("openmpi", cause, marks=pytest.mark.slow) for cause in ("USR1", "requeue", "limit")),
    ],
    indirect=["mpi"],
)
def test_a_preempted_job_ends_like_an_undisturbed_one(
    slurm: Cluster, mpi: Mpi, cause: str, undisturbed: list[np.ndarray]
) -> None:
    """The documented job script queues the job again; its weights are bit by bit those of one at a stretch."""
    name = f"{mpi.name}-{cause}"
    progress = slurm.folder / f"{name}.steps"
    variables = {"PROGRESS": str(progress), "PAUSE": "0.2"}
    if cause == "limit":  # saves after half of the time that is left when training begins, and gets no signal before
        variables = {"PAUSE": "5", "MATEX_END_MARGIN": "150"}
        job = _submit(slurm, mpi, name, "--time=3", "--signal=USR1@1", **variables)
        slurm.wait(job, 60, ("RUNNING",))  # not PENDING as at its begin
    else:
        job = _submit(slurm, mpi, name, **variables)
        _await_steps(progress, 4)
    if cause == "USR1":
        slurm.command("scancel", "--signal=USR1", str(job))
    elif cause == "requeue":
        slurm.command("scontrol", "requeue", str(job))
    slurm.wait(job, 200, ("PENDING", "REQUEUED"))
    slurm.command("scontrol", "update", f"JobId={job}", "TimeLimit=60")
    state = slurm.wait(job, 240)
    out = (slurm.folder / f"{name}.out").read_text()
    assert state == JobState("COMPLETED", 0, 1), out
    reason = {"USR1": "SIGUSR1 was received", "requeue": "SIGTERM was received", "limit": "the time limit is near"}[
        cause
    ]
    assert reason in out and "all ranks end with exit code 75" in out
    assert out.count("trained") == 1
    found = arrays(slurm.folder / f"{name}.npz")
    assert [array.tobytes() for array in found[:-1]] == [array.tobytes() for array in undisturbed[:-1]]
    np.testing.assert_allclose(found[-1], undisturbed[-1], rtol=1e-6)  # losses of an epoch are added in two parts


@pytest.mark.slow
def test_the_jobs_of_an_array_have_checkpoints_of_their_own(slurm: Cluster, mpi: Mpi) -> None:
    folder = slurm.folder / f"checkpoints-{mpi.name}"
    out = str(slurm.folder / f"array-{mpi.name}-%a.out")
    arguments = (str(TRAIN), str(slurm.folder / "array.npz"))
    variables = {"CHECKPOINTS": str(folder), **mpi.environment}
    job = slurm.submit(SCRIPTS / "array.sh", "--output", out, arguments=arguments, env=variables)
    for task in (1, 2):
        state = slurm.wait(f"{job}_{task}", 240)
        assert state.state == "COMPLETED", (slurm.folder / f"array-{mpi.name}-{task}.out").read_text()
        assert (folder / f"{job}-{task}" / "fit-1").is_dir()


@pytest.mark.slow
def test_data_and_environments_are_staged_to_the_nodes(slurm: Cluster, mpi: Mpi, table: Path) -> None:
    events = slurm.folder / "events"
    events.mkdir(exist_ok=True)
    shutil.copy2(table, events / "table.h5")
    script = slurm.folder / "staged.py"
    script.write_text(
        f"import os, sys\nsys.argv = ['', 'read', os.environ['DATA'], sys.argv[1]]\nexec(open({str(RANKS)!r}).read())\n"
    )
    out = slurm.folder / f"staged-{mpi.name}.out"
    arguments = (str(events), str(script), str(slurm.folder / f"staged-{mpi.name}.npy"))
    options = (*ONE_EACH, "--output", str(out))
    job = slurm.submit(SCRIPTS / "staging.sh", *options, arguments=arguments, env=mpi.environment)
    state = slurm.wait(job, 240)
    assert state.state == "COMPLETED", out.read_text()
    _check_batches(slurm.folder / f"staged-{mpi.name}.npy", table)
    for node in slurm.nodes:
        assert slurm.on_node(node, "ls", "/tmp").find(str(job)) < 0

    shutil.make_archive(str(slurm.folder / "environment"), "tar", slurm.folder, "events")
    words = f"#!/bin/bash\nbash {SCRIPTS}/environment.sh {slurm.folder}/environment.tar\n"
    job = slurm.submit(words, *BOTH, "--output", str(slurm.folder / "environment.out"))
    assert slurm.wait(job, 60).state == "COMPLETED", (slurm.folder / "environment.out").read_text()
    for node in slurm.nodes:
        assert slurm.on_node(node, "ls", "/tmp/events") == "table.h5"
