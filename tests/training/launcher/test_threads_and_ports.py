"""Scripts with threads that train, and with servers, under ``matex run``."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.support.launch import Completed, run_script
from tests.support.machine_speed import scaled

LAUNCHER = "from matex_data.training.launcher.run import main; main()"
BEGIN = """
import http.server, threading, urllib.request
import keras, numpy as np

x = np.ones((24, 4), "float32")

def train():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(x, x[:, :1], batch_size=12, verbose=0)
    print("RESULT", float(abs(model.get_weights()[0]).sum()))
"""
TWO_THREADS = """
threads = [threading.Thread(target=train) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
ONE_THREAD = """
thread = threading.Thread(target=train)
thread.start()
thread.join()
"""
SERVER = """
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"loss")

    def log_message(self, *_):
        pass

server = http.server.HTTPServer(("127.0.0.1", PORT), Answer)
threading.Thread(target=server.serve_forever, daemon=True).start()
train()
print("RESULT", urllib.request.urlopen(f"http://127.0.0.1:PORT").read())
"""


def _run(code: str, folder: Path, ranks: int) -> Completed:
    (folder / "script.py").write_text(BEGIN + code)
    return run_script(ranks, LAUNCHER, str(folder / "script.py"), timeout=90)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_two_threads_that_train_end_the_job_soon(ranks: int, tmp_path: Path) -> None:
    done = _run(TWO_THREADS, tmp_path, ranks)
    assert done.returncode != 0 and done.seconds < scaled(40)
    assert "fit() is called while another thread trains" in done.stderr or "called by other threads" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_thread_may_train(ranks: int, tmp_path: Path) -> None:
    done = _run(ONE_THREAD, tmp_path, ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RESULT") == 1


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_server_has_its_port_on_rank_0(ranks: int, tmp_path: Path, free_port: int) -> None:
    done = _run(SERVER.replace("PORT", str(free_port)), tmp_path, ranks)
    assert done.returncode == 0, done.stderr
    assert "RESULT b'loss'" in done.stdout


POOL = """
import multiprocessing, os

with multiprocessing.get_context("fork").Pool(2) as pool:
    print("RESULT", pool.map(abs, range(-3, 0)))
"""


def test_processes_of_a_pool_are_said_to_be_those_of_each_rank(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(POOL)
    done = run_script(2, LAUNCHER, "--all-output", str(tmp_path / "script.py"), timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RESULT [3, 2, 1]") == 2
    assert done.stderr.count("this script starts processes, at ") == 1


@pytest.fixture
def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
