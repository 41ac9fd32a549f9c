"""Pools of ranks: values, exceptions, hangs and crashes, each within its time limit."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from mpi4py import MPI

from tests.support.launch import Hung, mpiexec, run_script
from tests.support.machine_speed import scaled
from tests.support.ranks import ALIVE, Pool, Pools, RanksFailed, Task


def _sum(comm: MPI.Intracomm, factor: int, offset: int = 0) -> tuple[int, int, int]:
    return comm.rank, os.getpid(), comm.allreduce(factor * comm.rank + offset)


def _fail_on(comm: MPI.Intracomm, rank: int) -> int:
    print(f"rank {comm.rank} speaks")
    if comm.rank == rank:
        raise ValueError(f"rank {rank} is broken")
    return comm.rank


def _fail(comm: MPI.Intracomm) -> None:
    raise KeyError("everyone")


def _fail_without_pickle(comm: MPI.Intracomm) -> None:
    error = OSError("holds a lock")
    error.lock = sys.stdout  # type: ignore[attr-defined]
    raise error


def _wait_for_ever(comm: MPI.Intracomm) -> None:
    if comm.rank == 0:
        comm.recv(source=0)


def _sleep_on_the_last(comm: MPI.Intracomm) -> None:
    if comm.rank == comm.size - 1:
        time.sleep(600)


def _crash(comm: MPI.Intracomm) -> None:
    if comm.rank == comm.size - 1:
        os.write(2, b"last words")
        os._exit(3)
    comm.barrier()


def _crash_later(comm: MPI.Intracomm) -> None:
    threading.Timer(0.2, _end).start()


def _end() -> None:
    os.write(2, b"last words")
    os._exit(3)


def _abort(comm: MPI.Intracomm) -> None:
    if comm.rank == 0:
        comm.Abort(7)
    comm.barrier()


def _exit(comm: MPI.Intracomm) -> None:
    sys.exit(5)


def _runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def ranks() -> Iterator[Pools]:
    """Yield pools for this module alone, since its tests end them: others have imported TensorFlow."""
    pools = Pools()
    yield pools
    pools.close()


def test_values_are_ordered_by_rank_and_processes_stay(pool: Pool) -> None:
    first = pool.run(_sum, 10, offset=1)
    second = pool.run(_sum, 10, offset=1)
    total = sum(10 * rank + 1 for rank in range(pool.size))
    assert [(rank, value) for rank, _, value in first] == [(rank, total) for rank in range(pool.size)]
    assert first == second
    assert len({pid for _, pid, _ in first}) == pool.size


@pytest.mark.rank_counts(2, 5)
def test_marker_chooses_the_rank_counts(pool: Pool) -> None:
    assert pool.size in (2, 5)
    assert len(pool.run(_sum, 1)) == pool.size


def test_exception_shows_the_rank_its_traceback_and_output(ranks: Pools) -> None:
    with pytest.raises(RanksFailed, match="_fail_on raised on 1 of 3 ranks") as caught:
        ranks(3).run(_fail_on, 1)
    text = str(caught.value)
    assert "---- rank 1\nTraceback" in text
    assert "ValueError: rank 1 is broken" in text
    assert "---- rank 0, 2\n(returned a value)" in text
    assert "rank 2 speaks" in text


def test_outcomes_hold_values_and_exceptions(ranks: Pools) -> None:
    outcomes = ranks(3).outcomes(_fail_on, 1)
    assert outcomes[0] == 0
    assert outcomes[2] == 2
    assert isinstance(outcomes[1], ValueError)
    assert "in _fail_on" in str(outcomes[1].__cause__)


def test_all_ranks_raise(pool: Pool) -> None:
    assert [repr(error) for error in pool.outcomes(_fail)] == [repr(KeyError("everyone"))] * pool.size


def test_exception_that_cannot_be_pickled_is_sent_as_text(ranks: Pools) -> None:
    (error,) = ranks(1).outcomes(_fail_without_pickle)
    assert isinstance(error, RuntimeError)
    assert "OSError: holds a lock" in str(error)


def test_system_exit_is_an_outcome(ranks: Pools) -> None:
    assert [error.code for error in ranks(2).outcomes(_exit)] == [5, 5]


@pytest.mark.parametrize("function", [_wait_for_ever, _sleep_on_the_last])
def test_hang_ends_with_stacks_and_the_next_task_runs(ranks: Pools, function: Task) -> None:
    begin = time.monotonic()
    pids = [pid for _, pid, _ in ranks(2).run(_sum, 1)]
    with pytest.raises(RanksFailed, match=r"hung on 1 of 2 ranks \(\d") as caught:
        ranks(2).run(function, timeout=2)
    assert time.monotonic() - begin < scaled(30)
    assert f"in {function.__name__}" in str(caught.value)
    assert "test_ranks.py" in str(caught.value)
    assert not any(_runs(pid) for pid in pids)
    assert [rank for rank, _, _ in ranks(2).run(_sum, 1)] == [0, 1]


@pytest.mark.parametrize("function", [_crash, _abort])
def test_a_process_that_ends_is_a_failure_and_the_next_task_runs(ranks: Pools, function: Task) -> None:
    begin = time.monotonic()
    with pytest.raises(RanksFailed, match="a process ended") as caught:
        ranks(3).run(function)
    assert time.monotonic() - begin < scaled(30)
    assert function is _abort or "last words" in str(caught.value)
    assert len(ranks(3).run(_sum, 1)) == 3


@pytest.mark.slow
def test_few_pools_stay_alive() -> None:
    pools = Pools()
    try:
        for size in (1, 2, 1, 3, 1, 4, 1, 5):
            pools(size).run(_sum, 1)
        alive = [size for size in range(1, 6) if pools(size).alive]
    finally:
        pools.close()
    assert len(alive) <= ALIVE
    assert {1, 5} <= set(alive)


def test_run_script_gives_code_output_and_arguments(tmp_path: Path) -> None:
    path = tmp_path / "hello.py"
    path.write_text("import sys\nfrom mpi4py import MPI\nprint(MPI.COMM_WORLD.size, sys.argv[1:])\nsys.exit(4)\n")
    done = run_script(2, path, "--flag", "a b")
    assert done.returncode == 4
    assert done.stdout.split("\n")[:2] == ["2 ['--flag', 'a b']"] * 2
    assert 0 < done.seconds < scaled(60)


def test_run_script_takes_code_and_environment() -> None:
    done = run_script(1, "import os\nprint(os.environ['COLOUR'])\n", env={"COLOUR": "blue"})
    assert (done.returncode, done.stdout) == (0, "blue\n")


def test_run_script_that_hangs_shows_stacks_and_leaves_nothing() -> None:
    code = "import os, time\nprint(os.getpid(), flush=True)\ndef wait_here():\n    time.sleep(600)\nwait_here()\n"
    with pytest.raises(Hung, match=r"2 ranks of .* hung") as caught:
        run_script(2, code, timeout=3)
    text = str(caught.value)
    assert "in wait_here" in text
    pids = [int(line) for line in text.splitlines() if line.isdigit()]
    assert len(pids) == 2
    assert not any(_runs(pid) for pid in pids)


def test_without_mpi_tests_skip_but_fail_in_ci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="mpich"):
        mpiexec()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="mpich"):
        mpiexec()


def test_a_process_that_ended_between_two_tasks_is_a_failure_with_its_output(ranks: Pools) -> None:
    ranks(2).run(_crash_later)
    time.sleep(scaled(3))
    with pytest.raises(RanksFailed, match=r"_sum: a process had ended after .*_crash_later\n(.*\n)*last words"):
        ranks(2).run(_sum, 2)
    assert ranks(2).run(_sum, 2)[0][2] == 2
