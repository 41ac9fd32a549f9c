"""Programs that end with iterators, threads and readers left open, in fifty ways: nothing is printed as they exit."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.launch import run_script

SCRIPT = """
import os, signal, sys, threading, time
import numpy as np
import matex_data as md

way, path = sys.argv[1:]
data = md.open_dataset(path, inputs="x")
batches = data.batches(16, shuffle=True, seed=1)
kept = []

def keep(iterable):
    kept.append(iter(iterable))
    next(kept[-1])

def within(leave, *arguments):
    for batch in batches:
        leave(*arguments)

def fail(problem=ValueError):
    raise problem("of the user")

def swallow():
    try:
        within(fail)
    except ValueError:
        pass

def delete():
    global data, batches
    keep(batches)
    del data, batches
    kept.clear()

def cycle():
    node = type("Node", (), {})()
    node.own, node.iterator = node, iter(batches)
    next(node.iterator)

def thread():
    threading.Thread(target=lambda: [time.sleep(0.01) for batch in batches], daemon=True).start()
    time.sleep(0.05)

def kill():
    keep(batches)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(30)

WAYS = {
    "nothing": lambda: None,
    "an iterator": lambda: keep(batches),
    "two iterators": lambda: (keep(batches), keep(batches)),
    "samples": lambda: keep(data),
    "an error in the loop": lambda: within(fail),
    "an interrupt in the loop": lambda: within(fail, KeyboardInterrupt),
    "a swallowed error": swallow,
    "exit in the loop": lambda: within(sys.exit),
    "exit 3 in the loop": lambda: within(sys.exit, 3),
    "os._exit": lambda: within(os._exit, 0),
    "a signal": kill,
    "a cycle": cycle,
    "deleted": delete,
    "a thread": thread,
    "a module": lambda: (keep(batches), sys.modules.update(left=kept[0])),
    "arrays": lambda: keep(md.open_dataset({"x": np.zeros((64, 8))}).batches(16)),
    "samples in memory": lambda: keep(data.batches(16, shuffle="global", seed=1)),
    "sets": lambda: [keep(part.batches(8)) for part in data.split(0.5, 0.5, seed=1)],
    "one sample": lambda: data[3],
    "tensors": lambda: keep(data.tf_dataset(16)),
    "a condition": lambda: keep(data.where("max(x) > 40").batches(16, shuffle=True, seed=1)),
    "a function": lambda: keep(data.map(lambda sample: sample, fields=["x"]).batches(16)),
    "another opening": lambda: (keep(batches), keep(md.open_dataset(path).batches(8))),
    "all of it": lambda: kept.append(data.load()),
    "a whole pass": lambda: kept.append(list(batches)),
}
WAYS[way]()
"""
CODES = {
    "an error in the loop": {1},
    "an interrupt in the loop": {1, 2, 130},
    "exit 3 in the loop": {3},
    "a signal": {15},
}
QUICK = ("an iterator", "an error in the loop", "a cycle", "a signal")
WAYS = [line.split('"')[1] for line in SCRIPT.partition("WAYS = {")[2].splitlines() if line.startswith('    "')]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exits") / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(5120.0).reshape(640, 8), chunks=(40, 8), compression="gzip")
    return path


@pytest.mark.parametrize("way", [way if way in QUICK else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_nothing_is_printed_at_exit(way: str, ranks: int, path: Path) -> None:
    done = run_script(ranks, SCRIPT, way, str(path), timeout=60, forked=False)
    assert done.returncode in CODES.get(way, {0}), done.stderr
    for word in ("Exception ignored", "__del__", "Fatal Python error", "Segmentation", "AttributeError", "ImportError"):
        assert word not in done.stderr, done.stderr
    if way not in CODES and way not in (
        "tensors",
        "a thread",
    ):  # TensorFlow says what it likes; a thread ends in its loop
        assert done.stderr == ""
