"""A rank that is killed ends the job within seconds, also where the launcher does not notice it."""

from __future__ import annotations

import re
import socket
import time

import pytest

from matex_data.mpi import links
from tests.support.launch import run_script
from tests.support.machine_speed import scaled

SCRIPT = """
import os, signal, sys, time

child = os.fork()
if child:  # what the launcher watches: it goes on when the rank is killed, and so does its side of MPI's connections
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        time.sleep(60)
    os._exit(os.waitstatus_to_exitcode(status))

from mpi4py import MPI
from matex_data.io.sessions import read_sessions

victim, how = int(sys.argv[1]), sys.argv[2]
comm = read_sessions(MPI.COMM_WORLD).comm
comm.barrier()
time.sleep(1)
if comm.rank == victim and how == "kill":
    print("killed at", time.time(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if comm.rank == victim and how == "worker":  # a process that the rank has forked keeps copies of its connections
    if os.fork():
        print("killed at", time.time(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
if how == "leave":
    print("end", comm.rank)
    sys.exit(0)
comm.barrier()
"""
SECONDS = 5.0


@pytest.mark.openmpi
@pytest.mark.parametrize(
    ("ranks", "victim", "how"),
    [
        pytest.param(2, 0, "kill", marks=pytest.mark.slow),
        (4, 1, "kill"),
        pytest.param(3, 0, "worker", marks=pytest.mark.slow),
        pytest.param(16, 0, "kill", marks=pytest.mark.slow),
        pytest.param(16, 5, "kill", marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_ends_the_job(ranks: int, victim: int, how: str) -> None:
    done = run_script(ranks, SCRIPT, str(victim), how, forked=False, timeout=60)
    end = time.time()
    assert done.returncode != 0
    assert f"the process of rank {victim} has died" in done.stderr
    (killed,) = re.findall(r"killed at ([\d.]+)", done.stdout)
    assert end - float(killed) < SECONDS


def test_ranks_that_end_in_order_raise_no_alarm() -> None:
    done = run_script(4, SCRIPT, "0", "leave", forked=False)
    assert done.returncode == 0, done.stderr
    assert "died" not in done.stderr
    assert done.stdout.count("end") == 4


def test_addresses_are_those_of_this_machine() -> None:
    found = links.addresses()
    assert found[-1] == "127.0.0.1"
    for host in found:
        with socket.socket() as listener:
            listener.bind((host, 0))  # fails at addresses of others


def test_every_rank_is_below_one_other() -> None:
    for size in (2, 3, 16, 1000):
        assert sorted(child for rank in range(size) for child in links.below(rank, size)) == list(range(1, size))
        assert all(links.above(child) == rank for rank in range(size) for child in links.below(rank, size))


STRANGERS = """
import socket, sys, time
from mpi4py import MPI
from matex_data.io.sessions import read_sessions
from matex_data.mpi.activity import State

def dropped(call):
    call.settimeout(5)
    try:
        return call.recv(1) == b""
    except ConnectionError:
        return True

comm = read_sessions(MPI.COMM_WORLD).comm
comm.barrier()
time.sleep(1)
if comm.rank == 0:
    port = comm.liveness._links._listener.getsockname()[1]
    calls = [socket.create_connection(("127.0.0.1", port)) for _ in range(24)]  # of which 8 say nothing
    for number, call in enumerate(calls[8:]):
        call.sendall((b"GET / HTTP/1.1" + bytes(100), b"x")[number % 2])
comm.barrier()
slowest = 0.0
for _ in range(8):
    if comm.rank == 1:
        begin = time.monotonic()
        assert comm.liveness.states([0])[0][0] != State.SILENT
        slowest = max(slowest, time.monotonic() - begin)
if comm.rank == 1:
    print("slowest answer", slowest, flush=True)
comm.barrier()
if comm.rank == 0:
    time.sleep(2)
    print("dropped", all(dropped(call) for call in calls), flush=True)
comm.barrier()
"""


@pytest.mark.openmpi
def test_strangers_are_dropped_and_delay_nobody() -> None:
    done = run_script(2, STRANGERS, forked=False, timeout=60)
    assert done.returncode == 0 and "died" not in done.stderr, done.stderr
    (slowest,) = re.findall(r"slowest answer ([\d.]+)", done.stdout)
    assert float(slowest) < scaled(1) and "dropped True" in done.stdout, done.stdout
