"""``matex plan --train``: what a script costs is measured, and nothing of it is saved."""

from __future__ import annotations

import json
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from matex_data.cli.scaling import Measured, predict
from tests.cli.test_commands import CALL
from tests.support.launch import Completed, run_script

MEASURE = "from matex_data.training.launcher.measuring import main; main()"
SCRIPT = """
import atexit, sys
from pathlib import Path
import keras, numpy as np
folder = Path(sys.argv[1])
atexit.register((folder / "ended").touch)
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(500), keras.layers.Dense(300), keras.layers.Dense(2)])
model.compile(keras.optimizers.Adam(), "mse", steps_per_execution=4)
rows = np.ones((100, 6), "f4"), np.ones((100, 2), "f4")
data = {data}
try:
    model.fit({arguments}, epochs=3, validation_data=rows, callbacks=[
        keras.callbacks.ModelCheckpoint(folder / "model.keras"), keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.LambdaCallback(on_train_begin=lambda logs: (folder / "begun").touch()),
    ])
finally:
    model.save(folder / "last.keras")
"""
OF_ARRAYS = SCRIPT.format(data="rows", arguments="*rows, batch_size=40, validation_split=0.2")
OF_FILE = SCRIPT.format(
    data="__import__('matex_data').open_dataset(str(folder / 'x.h5'), inputs='x', targets='y')",
    arguments="data.tf_dataset(40, shuffle=True)",
)


def _measured(folder: Path, code: str, ranks_per_node: int, ranks: int) -> Measured:
    script, result = folder / "train.py", folder / "costs.json"
    script.write_text(code)
    arguments = str(result), repr(time.time()), str(ranks_per_node), str(ranks), str(script), str(folder)
    done = run_script(0, MEASURE, *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())
    found["times"] = {int(rows): seconds for rows, seconds in found["times"].items()}
    return Measured(**found)


@pytest.mark.parametrize("code", [OF_ARRAYS, OF_FILE])
def test_costs_of_a_script_and_nothing_saved(tmp_path: Path, code: str) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["y"] = np.ones((100, 6), "f4"), np.ones((100, 2), "f4")
    found = _measured(tmp_path, code, 3, 30)
    assert {path.name for path in tmp_path.iterdir()} == {"train.py", "costs.json", "x.h5"}
    assert (found.batch, found.steps, found.sharded) == (40, 2 if code is OF_FILE else 3, code is OF_FILE)
    assert sorted(found.times) == [2, 14, 40]  # rows of a rank of 30, of 3 and of one
    assert all(len(seconds) >= 3 and min(seconds) > 0 for seconds in found.times.values())
    last, second, first = 300 * 2 + 2, 500 * 300 + 300, 500 * 6 + 500
    assert sorted(nbytes for nbytes, _ in found.buckets) == [4 * (first + last + 300), 4 * (second - 300)]
    assert all(0 < ready <= 1 for _, ready in found.buckets)
    assert found.file_bytes == (pytest.approx(32, rel=0.5) if code is OF_FILE else None)
    assert found.data > 0 and found.data_cpu > 0 and found.memory > 0 and found.start > 0


SPARSE = """
import time
import keras, numpy as np, tensorflow as tf
def slow(x):
    time.sleep(0.2)
    return x
model = keras.Sequential([keras.Input((5,), dtype="int32"), keras.layers.Embedding(1000, 8), keras.layers.Flatten(),
                          keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(), "mse")
data = tf.data.Dataset.from_tensor_slices((np.ones((64, 5), "int32"), np.ones((64, 1), "float32"))).batch(32)
data = data.map(lambda x, y: (x, tf.ensure_shape(tf.numpy_function(slow, [y], tf.float32), (None, 1)))).cache()
model.fit(data)
"""


def test_slices_of_sparse_gradients_count_by_their_rows_and_data_as_in_later_epochs(tmp_path: Path) -> None:
    found = _measured(tmp_path, SPARSE, 1, 2)
    assert sorted(nbytes for nbytes, _ in found.buckets) == [4 * 41, 32 * 5 * 8 * 4 // 2]
    assert found.data < 0.2 / 32 / 2  # seconds of a row


def _plan(*arguments: str, ranks: int = 1) -> Completed:
    return run_script(ranks, CALL, "plan", *arguments)


@pytest.mark.slow
def test_a_plan_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OF_ARRAYS)
    options = "--train", str(script), "--nodes", "6", "--ranks-per-node", "2", "--filesystem", "50GB/s"
    done = _plan(*options, "--network", "1Gb/s,50us", "--", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"train.py"}
    _, *rows = [line.split() for line in done.stdout.splitlines() if line[:1] == " "]
    assert [" ".join(row[:3]) for row in rows] == ["1 1 40", "1 2 20", "2 4 10", "4 8 5", "6 12 4"]
    said = "steps by rows: 4: ", "gradients: 618 kB in 2 buckets", "every rank makes whole batches", "is not counted"
    for text in said:
        assert text in done.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--train", "{script}", "--nodes", "2"], "give --network"),
        (["--train", "{script}", "--nodes", "2", "--network", "100Gb"], "--network gives no latency"),
        (["--train", "{script}", "--filesystem", "fast"], "--filesystem gives no bandwidth"),
        (["--train", "{script}", "--ranks", "4"], "--ranks has no meaning here"),
        (["x.h5", "--ranks", "4", "--batch-size", "8", "--nodes", "2"], "--nodes has no meaning here"),
        (["x.h5", "--batch-size", "8"], "lacks arguments"),
        (["x.h5", "--train", "{script}"], "x.h5 has no meaning here"),
        (["x.h5", "--train", "{script}", "--", "--flag"], "x.h5 has no meaning here"),
        (["--train", "{script}x"], "no such file"),
        (["{data}", "--ranks", "4", "--batch-size", "8"], "choose a smaller --batch-size"),
        pytest.param(
            ["--train", "{script}"], "the script ends before a training step is measured", marks=pytest.mark.slow
        ),
    ],
)
def test_errors(tmp_path: Path, arguments: list[str], text: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(3)")
    data = tmp_path / "table.csv"
    data.write_text("x,y\n1,2\n3,4\n")
    done = _plan(*(x.format(script=script, data=data) for x in arguments))
    assert done.returncode == 1 and text in done.stderr and "Traceback" not in done.stderr
    assert "found: exit code 3" in done.stderr or "ends before" not in text


CONVOLUTIONS = """
import sys, time
import keras, numpy as np
from keras import layers
rows, filters = 512, (32, 32, 64)
x, y = np.ones((rows, 32, 32, 3), "f4"), np.zeros(rows)
convolutions = [layers.Conv2D(count, 3, activation="relu") for count in filters]
model = keras.Sequential([keras.Input((32, 32, 3)), *convolutions, layers.Flatten(), layers.Dense(10)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
stamps = []
clock = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: stamps.append(time.process_time()))
model.fit(x, y, batch_size=128, epochs=6, verbose=0, callbacks=[clock])
print("step", float(np.median(np.diff(stamps)[4:])))
"""


@pytest.mark.slow
def test_two_ranks_take_as_long_as_predicted(tmp_path: Path) -> None:
    """Compare processor times, since other programs run beside tests: those of a rank and of what was predicted."""
    script = tmp_path / "train.py"
    script.write_text(CONVOLUTIONS)
    ratios = []
    for _ in range(3):
        predicted = predict(_measured(tmp_path, CONVOLUTIONS, 2, 2), 1, 2).step
        done = run_script(2, CALL, "run", str(script))
        assert done.returncode == 0, done.stderr
        ratios.append(predicted / float(done.stdout.split("step")[1]))
    assert 0.8 < sorted(ratios)[1] < 1.25, ratios
