"""Scripts for one process end with the same weights under ``matex run`` as in plain Python."""

from __future__ import annotations

import functools
import gzip
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from matex_data.training.launcher.arguments import parse
from tests.support.launch import ROOT, run_script

pytestmark = pytest.mark.shares_jobs

SCRIPTS = Path(__file__).parent / "scripts"
DRIVER = ROOT / "tests" / "support" / "script_driver.py"
REPORTED = ("custom_loop", "generator", "own_fit")
JOBS = (("session",), REPORTED, ("arrays", "pipeline", "functional", "mixed", "clipping"))
"""Scripts by the job that runs them. By default only ``session``, which is not in ``test_scripts.py``."""
LAUNCHER = "from matex_data.training.launcher.run import main; main()"


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, tuple[str, ...]], Path]:
    """Return a function that runs scripts in one job, and returns the folder of their outputs. 0: plain Python."""

    @functools.cache
    def run(ranks: int, names: tuple[str, ...]) -> Path:
        folder = tmp_path_factory.mktemp("scripts")
        command = [LAUNCHER, "--all-output", str(DRIVER)] if ranks else [DRIVER]
        done = run_script(ranks, *command, str(folder), *(str(SCRIPTS / f"{name}.py") for name in names), timeout=240)
        assert done.returncode == 0, done.stderr
        return folder / SCRIPTS.name

    return run


def _results(folder: Path) -> list[str]:
    return re.findall("^RESULT .*|^ORDER .*", (folder / "stdout").read_text(), re.MULTILINE)


def _weights(folder: Path) -> dict[str, Any]:
    """Return all arrays of the file that the script wrote."""
    found: dict[str, Any] = {}
    for path in folder.glob("x.weights.h5"):
        with h5py.File(path) as file:
            file.visititems(lambda key, item: found.update({key: item[()]}) if isinstance(item, h5py.Dataset) else None)
    for path in folder.glob("x.weights.h5.npz"):
        with np.load(path) as arrays:
            found.update(arrays)
    return found


SIZES = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("names", "name"),
    [pytest.param(job, name, marks=pytest.mark.slow if job != JOBS[0] else ()) for job in JOBS for name in job],
)
def test_weights_equal_plain_python(
    names: tuple[str, ...], name: str, size: int, outputs: Callable[[int, tuple[str, ...]], Path]
) -> None:
    results, expected = _results(outputs(0, names) / name), _weights(outputs(0, names) / name)
    found = _results(outputs(size, names) / name)
    assert len(found) == len(results)
    for mine, reference in zip(found, results, strict=True):
        numbers = [[float(word) for word in line.split()[1:]] for line in (mine, reference)]
        np.testing.assert_allclose(*numbers, rtol=2e-4)
    weights = _weights(outputs(size, names) / name)
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


@pytest.mark.slow
@pytest.mark.parametrize("size", (2, 4))
def test_whole_batches_are_reported_once(size: int, outputs: Callable[[int, tuple[str, ...]], Path]) -> None:
    stderr = "".join(path.read_text() for path in outputs(size, REPORTED).glob("*/stderr.*"))
    assert stderr.count("the generator given to fit runs on every rank") == 1
    assert stderr.count("a training loop of this script runs with the whole batch on every rank") == 1
    assert stderr.count("matex_data.training.shard(") == 1
    assert stderr.count("MirroredStrategy: each rank is one replica") == 1


OWN_LOGS = """
import keras, numpy as np, tensorflow as tf

class Own(keras.Sequential):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"largest": tf.reduce_max(x)}

x = np.arange(64, dtype="float32").reshape(16, 4) / 64
model = Own([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd")
print("LARGEST", model.fit(x, x[:, :1], batch_size=8, shuffle=False, verbose=0).history["largest"])
"""


def test_neighbours_are_connected_in_every_round_of_a_check(tmp_path: Path) -> None:
    """The step of rank 1 is traced in the first round, with rank 0; rank 2 traces its own in the second one."""
    (tmp_path / "script.py").write_text(OWN_LOGS)
    done = run_script(3, LAUNCHER, str(tmp_path / "script.py"), timeout=90, env={"MATEX_TIMEOUT": "40"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["LARGEST", "[0.984375]"]


FIT = """
import sys
import keras, numpy as np
from matex_data import training

sys.stdout.write(f"SUM {np.random.default_rng().normal(size=60).sum()}\\n")
x = np.random.default_rng(training.world().rank).normal(size=(60, 3)).astype("float32")
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], epochs=2, batch_size=20, verbose=0)
"""


def test_random_numbers_without_a_seed(tmp_path: Path) -> None:
    """Generators of NumPy draw the same numbers on all ranks; data that differ nevertheless are an error."""
    (tmp_path / "script.py").write_text(FIT)
    done = run_script(2, LAUNCHER, "--all-output", str(tmp_path / "script.py"), timeout=90)
    assert done.returncode != 0, done.stderr
    first, second = re.findall("^SUM (.*)", done.stdout, re.MULTILINE)
    assert first == second
    assert "the ranks give fit() different data" in done.stderr
    assert "whole batches" not in done.stderr


PARTS = """
import sys
import keras, numpy as np, tensorflow as tf
from matex_data import training

keras.utils.set_random_seed(1)
x = np.random.normal(size=(80, 3)).astype("float32")
data = tf.data.Dataset.from_tensor_slices(x).batch(20)
dense = keras.layers.Dense(1)
dense(next(iter(data)))
for batch in data:
    break
print("RESULT", *dense.kernel.numpy().ravel(), *dense.bias.numpy())
rank, size = training.world().rank, training.world().size
optimizer = training.distribute(keras.optimizers.SGD(0.1))
for start in range(0, 80, 20):
    batch = x[start + 20 * rank // size : start + 20 * (rank + 1) // size]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(dense(batch) - batch[:, :1]))
    optimizer.apply(tape.gradient(loss, dense.trainable_variables), dense.trainable_variables)
print("RESULT", *dense.kernel.numpy().ravel(), *dense.bias.numpy())
np.save(sys.argv[1], x)
"""


def test_batches_without_a_step_have_no_weight(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PARTS)
    done = run_script(2, LAUNCHER, str(tmp_path / "script.py"), str(tmp_path / "x.npy"), timeout=90)
    assert done.returncode == 0, done.stderr
    begin, found = ([float(word) for word in line.split()] for line in re.findall("^RESULT (.*)", done.stdout, re.M))
    x, kernel, bias = np.load(tmp_path / "x.npy"), np.array(begin[:3]), begin[3]
    for rows in x.reshape(4, 20, 3).astype(float):
        error = rows @ kernel + bias - rows[:, 0]
        kernel, bias = kernel - 0.1 * 2 * (error @ rows) / 20, bias - 0.1 * 2 * error.mean()
    np.testing.assert_allclose(found, [*kernel, bias], rtol=1e-5)


TINY = """
import keras, numpy as np

x = np.random.default_rng(0).normal(size=(60, 3)).astype("float32")
model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
model.compile(keras.optimizers.SGD(1.0), lambda y, p: 1e-7 * keras.ops.mean(keras.ops.square(y - p), -1))
model.fit(x, x[:, :1] + 1, epochs=1, batch_size=60, verbose=0)
print("RESULT", *(model.layers[0].kernel.numpy().ravel() * 2**24))
"""


def test_gradients_are_sent_in_16_bits_but_checked_without_rounding(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TINY)
    options = ["--wire-dtype", "float16", "--all-output", "--verify", "always"]
    done = run_script(2, LAUNCHER, *options, str(tmp_path / "script.py"), timeout=90)
    assert done.returncode == 0, done.stderr
    first, second = (np.array(line.split(), float) for line in re.findall("^RESULT (.*)", done.stdout, re.MULTILINE))
    assert np.abs(first).max() > 1
    np.testing.assert_array_equal(first, np.round(first))  # multiples of the smallest float16
    np.testing.assert_array_equal(first, second)
    assert "the gradients of shards and of the whole batch agree" in done.stderr


@pytest.mark.slow
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
    done = run_script(2, LAUNCHER, str(tmp_path / "script.py"), timeout=120, env={"MATEX_TIMEOUT": "5"})
    assert done.returncode != 0
    assert re.search(r"another rank does not take part: this one has waited \d+ s", done.stderr)
    assert f"this rank is at {tmp_path / 'script.py'}, line " in done.stderr
    assert "trained" not in done.stdout


ENDS = {
    "sys.exit(3)": (3, ""),
    "sys.exit('no such file')": (1, "no such file"),
    "raise KeyError('missing')": (1, "all 2 ranks"),
    "training.world().rank == 1 and sys.exit(4)": (4, ""),
    "training.world().rank == 1 and 1 / 0": (1, "rank 1 of 2"),
    "raise KeyboardInterrupt": (130, "all 2 ranks"),
    "training.world().rank == 1 and __import__('os')._exit(0)": (1, "it called os._exit"),
}


COVERED = (
    "sys.exit('no such file')",
    "raise KeyError('missing')",
    "sys.exit(3)",
    "training.world().rank == 1 and sys.exit(4)",
    "training.world().rank == 1 and 1 / 0",
)
"""Ends that quick tests of ``test_files.py`` and ``test_deadlines.py`` cover."""


@pytest.mark.parametrize("end", [pytest.param(end, marks=pytest.mark.slow) if end in COVERED else end for end in ENDS])
def test_a_failing_script_ends_the_job(end: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    waits = "training.allreduce([1.0])" if "rank" in end else "None"
    script.write_text(f"import sys\nfrom matex_data import training\n{end}\n{waits}\nprint('trained')\n")
    done = run_script(2, LAUNCHER, str(script), timeout=90, forked=False)
    code, text = ENDS[end]
    assert done.returncode == code, done.stderr
    assert text in done.stderr
    assert "trained" not in done.stdout


SETS = """
import sys
import keras, numpy as np
from tests_package import helper

names = list(set(f"name {i}" for i in range(24)))  # in an order of its own in each process without a common seed
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.layers.Input((1,)), keras.layers.Dense(1)])
rows = np.array([[float(name.split()[1])] for name in names])
sys.stdout.write(f"RESULT {model.predict(rows, verbose=0).ravel().tolist()}\\n")
sys.stdout.write(f"CALLED {__name__} {helper.__name__} {sys.argv[1:]} {sys.path[0]} {sys.argv[0]}\\n")
"""
COMMAND = """
import os, sys
os.chdir(sys.argv.pop(1))
os.environ.pop("PYTHONHASHSEED")
os.execv(sys.executable, [sys.executable, "-m", "matex_data", "run", *sys.argv[1:]])
"""


def test_a_module_runs_with_one_hash_seed_on_all_ranks(tmp_path: Path) -> None:
    """Started as by a user, who sets no seed; plain Python with the seed of matex run."""
    (tmp_path / "tests_package").mkdir()
    (tmp_path / "tests_package" / "helper.py").touch()
    module = tmp_path / "tests_package" / "train.py"
    module.write_text(SETS)
    plain = run_script(0, f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{SETS}")
    options = ["--all-output", "-m", "tests_package.train", "--own", "-m", "1"]
    done = run_script(2, COMMAND, str(tmp_path), *options, timeout=200, forked=False)
    assert done.returncode == 0, done.stderr
    results = re.findall("^RESULT .*", done.stdout, re.MULTILINE)
    assert results == re.findall("^RESULT .*", plain.stdout, re.MULTILINE) * 2
    called = f"CALLED __main__ tests_package.helper ['--own', '-m', '1'] {tmp_path} {module}"
    assert re.findall("^CALLED .*", done.stdout, re.MULTILINE) == [called] * 2
    assert "hash strings differently" not in done.stderr


def test_hashes_that_differ_are_reported(tmp_path: Path) -> None:
    (tmp_path / "script.py").touch()
    code = f"""
import builtins
from matex_data.training import world
builtins.hash = lambda value, original=hash: original(value) + world().rank
{LAUNCHER}"""
    done = run_script(2, code, str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("the ranks hash strings differently") == 1
    assert "PYTHONHASHSEED" in done.stderr


@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("absent", "tests.absent")), "absent.within"]
)
def test_a_missing_module_is_named(name: str) -> None:
    done = run_script(1, LAUNCHER, "-m", name)
    assert done.returncode == 1
    assert f"there is no module {name!r}" in done.stderr and "remedy" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_or_a_module_is_required() -> None:
    done = run_script(1, LAUNCHER, "-m")
    assert done.returncode == 2
    assert "name a script, or a module after -m" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py"], "there is no script 'nothing.py'"),
        (["--stages", "0", "-m", "x"], "argument --stages: expected a whole number of 1 or more, found '0'"),
        (["--micro-batches", "few", "-m", "x"], "found 'few'"),
        (["--save-every", "-1", "-m", "x"], "argument --save-every: expected"),
    ],
)
def test_a_wrong_command_line_is_told(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("program", "script", "of_script"),
    [
        (["-mtrain", "-n", "3"], "train", ["-n", "3"]),
        (["-m", "train", "--", "-m"], "train", ["--", "-m"]),
        ([__file__, "--", "a", "--stages", "2"], Path(__file__), ["--", "a", "--stages", "2"]),
    ],
)
def test_what_follows_the_script_is_its_own(program: list[str], script: Any, of_script: list[str]) -> None:
    parsed = parse(["-n2", "--stages", "2", "--no-verify", "--ranks", "4", *program])
    assert (parsed.ranks, parsed.of_run["stages"], parsed.of_run["verify"]) == ("4", 2, "never")
    assert (parsed.of_run["script"], parsed.of_run["arguments"]) == (script, of_script)
    assert parse([*parsed.of_ranks, "x"]).of_run == {**parsed.of_run, "arguments": [*of_script, "x"]}


INSTALLED = """
import os, sys, time
time.sleep(0.3 * int(os.environ._data[b"PMI_RANK"]))
sys.stdout.write(f"CLOCK {time.time()} {__name__}\\n")
"""


def test_an_installed_module_that_is_run_is_a_script(tmp_path: Path) -> None:
    (tmp_path / "site-packages" / "installed").mkdir(parents=True)
    (tmp_path / "site-packages" / "installed" / "train.py").write_text(INSTALLED)
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site-packages')!r}); {LAUNCHER}"
    done = run_script(2, code, "--all-output", "-m", "installed.train", timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = re.findall("^CLOCK (.*) __main__", done.stdout, re.MULTILINE)
    assert first == second


def test_a_script_from_a_pipe_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(SystemExit):
        parse(["-n", "2", str(pipe)])
    assert "only one process can read a script" in capsys.readouterr().err
    assert parse([str(pipe)]).ranks is None
