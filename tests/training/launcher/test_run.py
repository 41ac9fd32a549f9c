"""Scripts for one process end with the same weights under ``matex run`` as in plain Python."""

from __future__ import annotations

import functools
import gzip
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from tests.support.launch import environment, run_script

SCRIPTS = Path(__file__).parent / "scripts"
NAMES = ["arrays", "pipeline", "generator", "custom_loop", "functional", "session", "mixed", "own_fit", "clipping"]
LAUNCHER = "from matex_data.training.launcher.run import main; main()"


@functools.cache
def _plain(name: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
    folder.mkdir()
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), str(folder / "plain.weights.h5")]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return re.findall("^RESULT .*|^ORDER .*", done.stdout, re.MULTILINE), _weights(folder)


def _weights(folder: Path) -> dict[str, Any]:
    """Return all arrays of the files that the script has written."""
    found: dict[str, Any] = {}
    for path in folder.glob("*.weights.h5"):
        with h5py.File(path) as file:
            file.visititems(lambda key, item: found.update({key: item[()]}) if isinstance(item, h5py.Dataset) else None)
    for path in folder.glob("*.npz"):
        with np.load(path) as arrays:
            found.update(arrays)
    return found


@pytest.fixture(scope="module")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plain")


SIZES = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", NAMES)
def test_weights_equal_plain_python(name: str, size: int, plain_folder: Path, tmp_path: Path) -> None:
    results, expected = _plain(name, plain_folder / name)
    done = run_script(size, LAUNCHER, str(SCRIPTS / f"{name}.py"), str(tmp_path / "x.weights.h5"), timeout=150)
    assert done.returncode == 0, done.stderr
    found = re.findall("^RESULT .*|^ORDER .*", done.stdout, re.MULTILINE)
    assert len(found) == len(results), done.stdout  # rank 0 alone prints
    for mine, reference in zip(found, results, strict=True):
        numbers = [[float(word) for word in line.split()[1:]] for line in (mine, reference)]
        np.testing.assert_allclose(*numbers, rtol=2e-4)
    weights = _weights(tmp_path)
    assert weights.keys() == expected.keys()
    assert expected
    for key, array in expected.items():
        np.testing.assert_allclose(weights[key], array, rtol=1e-3, atol=1e-4 * np.abs(array).max(), err_msg=key)


def _write_idx(path: Path, array: Any) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes()
    path.write_bytes(gzip.compress(header + array.astype(np.uint8).tobytes()))


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with ``MNIST_data``: real digits, enlarged to 28 x 28, 1,003 for training and 201 to test."""
    from sklearn.datasets import load_digits

    folder = tmp_path_factory.mktemp("mnist")
    (folder / "MNIST_data").mkdir()
    images, labels = load_digits(return_X_y=True)
    images = np.pad(np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))), ((0, 0), (2, 2), (2, 2))) * 255 / 16
    for name, rows in (("train", slice(0, 1003)), ("t10k", slice(1003, 1204))):
        _write_idx(folder / "MNIST_data" / f"{name}-images-idx3-ubyte.gz", images[rows])
        _write_idx(folder / "MNIST_data" / f"{name}-labels-idx1-ubyte.gz", labels[rows])
    return folder


@pytest.mark.openmpi
@pytest.mark.parametrize("size", SIZES)
def test_a_matex_script_of_2018(size: int, digits: Path, tmp_path: Path) -> None:
    code = f"import os, sys; os.chdir(sys.argv.pop(1)); {LAUNCHER}"
    out = str(tmp_path / "x.weights.h5")
    done = run_script(size, code, str(digits), "--all-output", str(SCRIPTS / "matex_2018.py"), out, timeout=150)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[1:] for line in re.findall("^ROWS .*", done.stdout, re.MULTILINE)]
    assert sum(int(train) for train, *_ in rows) == 1003  # no row lost, none twice
    assert sum(int(test) for _, test, *_ in rows) == 201
    assert {(steps, largest) for *_, steps, largest in rows} == {("126", "1.000")}  # a batch is 8 rows of all ranks
    results = re.findall("^RESULT (.*)", done.stdout, re.MULTILINE)
    assert len(results) == size
    assert len(set(results)) == 1
    assert float(results[0]) > 0.85


@pytest.mark.parametrize("size", SIZES[1:])
def test_whole_batches_are_reported_once(size: int, tmp_path: Path) -> None:
    script = SCRIPTS / "own_fit.py"
    done = run_script(size, LAUNCHER, "--all-output", str(script), str(tmp_path / "x.weights.h5"), timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the generator given to fit runs on every rank") == 1
    assert done.stderr.count("a training loop of this script runs with the whole batch on every rank") == 1
    assert done.stderr.count("MirroredStrategy: each rank is one replica") == 1
    assert done.stderr.count("remedy: ") == 2


FIT = """
import keras, numpy as np
from matex_data import training

{0}
x = rng.normal(size=(60, 3)).astype("float32")
print("SUM", x.sum())
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], epochs=2, batch_size=20, verbose=0)
"""


@pytest.mark.parametrize("different", [False, True])
def test_random_numbers_without_a_seed(different: bool, tmp_path: Path) -> None:
    """NumPy's generators draw the same numbers on all ranks; a warning reports batches that still differ."""
    seed = "rng = np.random.default_rng(training.world().rank)" if different else "rng = np.random.default_rng()"
    (tmp_path / "script.py").write_text(FIT.format(seed))
    done = run_script(2, LAUNCHER, "--all-output", str(tmp_path / "script.py"), timeout=90)
    assert done.returncode == 0, done.stderr
    assert len(set(re.findall("^SUM (.*)", done.stdout, re.MULTILINE))) == 1 + different
    assert done.stderr.count("the ranks do not get the same batches") == different


PARTS = """
import keras, numpy as np, tensorflow as tf
from matex_data import training

keras.utils.set_random_seed(1)
x = np.random.normal(size=(80, 3)).astype("float32")
data = tf.data.Dataset.from_tensor_slices(x).batch(20)
dense = keras.layers.Dense(1)
dense(next(iter(data)))
for batch in data:
    break
rank, size = training.world().rank, training.world().size
optimizer = training.distribute(keras.optimizers.SGD(0.1))
for start in range(0, 80, 20):
    batch = x[start + 20 * rank // size : start + 20 * (rank + 1) // size]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(dense(batch) - batch[:, :1]))
    optimizer.apply(tape.gradient(loss, dense.trainable_variables), dense.trainable_variables)
print("RESULT", *dense.kernel.numpy().ravel())
"""


def test_batches_without_a_step_have_no_weight(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PARTS)
    found = [run_script(size, LAUNCHER, str(tmp_path / "script.py"), timeout=90).stdout.split() for size in (1, 2)]
    assert len(found[0]) == 4
    np.testing.assert_allclose(*[[float(word) for word in words[1:]] for words in found], rtol=1e-5)


def test_no_verify_skips_the_self_check(tmp_path: Path) -> None:
    script = SCRIPTS / "planted" / "contrastive.py"
    done = run_script(2, LAUNCHER, "--no-verify", str(script), str(tmp_path / "x.weights.h5"), timeout=90)
    assert done.returncode == 0, done.stderr
    assert "self-check" not in done.stderr


def test_another_keras_backend_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('trained')")
    code = f"import keras; keras.backend.backend = lambda: 'jax'; {LAUNCHER}"
    done = run_script(2, code, str(tmp_path / "script.py"), timeout=90)
    assert done.returncode != 0
    assert "remedy: set KERAS_BACKEND=tensorflow" in done.stderr
    assert "trained" not in done.stdout


UNEVEN = """
import keras, numpy as np
from matex_data import training

def batches():
    for _ in range(5 + 3 * training.world().rank):
        yield np.ones((8, 2), "float32"), np.ones((8, 1), "float32")

model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(batches(), verbose=0)
print("trained")
"""


def test_a_rank_with_more_batches_ends_the_job(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNEVEN)
    done = run_script(2, LAUNCHER, str(tmp_path / "script.py"), timeout=120, env={"MATEX_TIMEOUT": "12"})
    assert done.returncode != 0
    assert re.search(r"another rank does not take part: this one has waited 1\d s", done.stderr)
    assert f"this rank is at {tmp_path / 'script.py'}, line " in done.stderr
    assert "trained" not in done.stdout


ENDS = {
    "sys.exit(3)": (3, ""),
    "sys.exit('no such file')": (1, "no such file"),
    "raise KeyError('missing')": (1, "all 2 ranks"),
    "training.world().rank == 1 and sys.exit(4)": (4, ""),
    "training.world().rank == 1 and 1 / 0": (1, "rank 1 of 2"),
    "training.world().rank == 1 and __import__('os')._exit(0)": (1, "it called os._exit"),
}


@pytest.mark.openmpi
@pytest.mark.parametrize("end", ENDS)
def test_a_failing_script_ends_the_job(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    waits = "training.allreduce([1.0])" if "rank" in end else "None"
    script.write_text(f"import sys\nfrom matex_data import training\n{end}\n{waits}\nprint('trained')\n")
    done = run_script(2, LAUNCHER, str(script), timeout=90)
    code, text = ENDS[end]
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "trained" not in done.stdout
