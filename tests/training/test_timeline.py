"""The trace that MATEX_TIMELINE asks for."""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np

from tests.support.launch import run_script

SCRIPT = """
import sys
import keras
import matex_data as md

data = md.open_dataset(sys.argv[1], inputs="x", targets="y").tf_dataset(24)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
md.training.fit(model, data, epochs=2, verbose=0)
"""


def test_each_rank_writes_its_steps_communication_and_data(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.zeros((96, 8), "f4")
        file["y"] = np.zeros((96, 1), "f4")
    traces = tmp_path / "run.json"
    done = run_script(2, SCRIPT, str(tmp_path / "data.h5"), env={"MATEX_TIMELINE": str(traces)}, timeout=120)
    assert done.returncode == 0, done.stderr
    starts = []
    for rank in range(2):
        events = json.loads((tmp_path / f"run.{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}
        spans = [event for event in events if event["ph"] == "X"]
        assert all(span["dur"] >= 0 for span in spans)
        names = {span["name"] for span in spans}
        assert {"waiting for data", "sum of 36 bytes", "step 0", "step 3"} <= names
        assert sum(span["name"] == "step 3" for span in spans) == 2
        starts.append(min(span["ts"] for span in spans if span["cat"] == "step"))
    assert abs(starts[0] - starts[1]) < 10e6  # one clock
