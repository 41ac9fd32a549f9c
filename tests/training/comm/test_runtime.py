"""Gradients reduced by TensorFlow's own collectives: the weights of MPI's path, and errors that end the job in time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matex_data.errors import PartitionError
from matex_data.training.launcher.arguments import parse
from tests.support import problems
from tests.support.launch import Completed, run_script
from tests.support.machine_speed import scaled
from tests.support.ranks import Pool

ENV = {"MATEX_COLLECTIVES": "tensorflow"}
LAUNCHER = "from matex_data.training.launcher.run import main; main()"

BOTH = """
import functools, json, sys
from mpi4py import MPI
from matex_data import training
from matex_data.training.comm import runtime
from tests.support import problems
from tests.training import test_exact

summed, kept = [], runtime.Runtime.sum

def counted(self, tensor, name, seconds=0.0):
    summed.append(name)
    return kept(self, tensor, name, seconds)

runtime.Runtime.sum = counted
for name in sys.argv[1:]:
    results = []
    for collectives in ("mpi", "tensorflow"):
        summed.clear()
        fit = functools.partial(training.fit, collectives=collectives)
        weights, counters = test_exact._run(MPI.COMM_WORLD, name, fit)
        assert bool(summed) == (MPI.COMM_WORLD.size > 1 and collectives != "mpi"), (name, collectives, summed)
        results.append([[array.tolist() for array in weights], counters])
    everywhere = MPI.COMM_WORLD.gather(results)
    if MPI.COMM_WORLD.rank == 0:
        print("RESULT", json.dumps([name, everywhere]))
"""
CASES = ("accumulation", "clipnorm", "embedding", "float16", "own_clipping", "several_steps", "uneven", "unused")


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (2, ("accumulation", "clipnorm")),
        (3, ("uneven", "several_steps")),
        *(pytest.param(ranks, CASES, marks=pytest.mark.slow) for ranks in (1, 2, 3, 4)),
    ],
)
def test_weights_are_those_of_sums_by_mpi(ranks: int, cases: tuple[str, ...]) -> None:
    done = run_script(ranks, BOTH, *cases, env=ENV, timeout=60 * len(cases))
    assert done.returncode == 0, done.stderr
    results = [json.loads(line.split(maxsplit=1)[1]) for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert [name for name, _ in results] == list(cases)
    for name, of_ranks in results:
        (by_mpi, counters), *_ = of_ranks[0]
        found = [by_tensorflow for _, by_tensorflow in of_ranks]
        arrays = [[np.array(array) for array in weights] for weights, _ in found]
        rtol = 5e-3 if name == "float16" else 1e-5
        problems.assert_same_weights(arrays, [np.array(array) for array in by_mpi], rtol)
        assert all(other == counters for _, other in found)


def _fit(comm: Any, **options: Any) -> list[Any]:
    from matex_data import training

    model = problems.compiled(problems.perceptron(), "sgd")
    data = problems.shard(problems.table(48), 24, comm.rank, comm.size)
    training.fit(model, data, comm=comm, verbose=0, **options)
    return problems.weights(model)


def test_a_late_request_is_an_error(pool: Pool) -> None:
    outcomes = pool.outcomes(_fit, collectives="tensorflow")
    if pool.size == 1:
        assert not isinstance(outcomes[0], Exception)  # nothing is reduced
        return
    for error in outcomes:
        assert isinstance(error, PartitionError)
        assert "matex run --collectives tensorflow" in str(error)


def _differ(comm: Any, choices: list[str]) -> Any:
    return _fit(comm, collectives=choices[comm.rank])


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize("choices", [["auto", "mpi"], ["mpi", "tensorflow"], ["nccl", "nccl"], ["auto", "nccl"]])
def test_a_choice_that_differs_or_that_there_is_not_is_an_error_on_all_ranks(pool: Pool, choices: list[str]) -> None:
    assert all(isinstance(error, PartitionError) for error in pool.outcomes(_differ, choices))


def test_an_import_after_the_first_tensor_is_an_error() -> None:
    done = run_script(2, "import tensorflow as tf; tf.zeros(1); from matex_data import training", env=ENV)
    assert done.returncode != 0
    assert "before anything creates tensors" in done.stderr


def test_the_command_line_refuses_what_they_cannot_do(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["--strategy", "funneled"], ["--model", "2"], ["--stages", "2"]):
        with pytest.raises(SystemExit):
            parse(["--collectives", "tensorflow", *options, "train.py"])
        assert "--collectives tensorflow is for" in capsys.readouterr().err
    assert parse(["-m", "train"]).of_run["collectives"] == "auto"


SUBSETS = """
from matex_data import training
import keras, numpy as np
from mpi4py import MPI
from tests.training.comm.test_runtime import _fit

alone = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank)
half = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank // 2)
for wrong in (
    lambda: _fit(half, collectives="tensorflow"),
    lambda: training.distribute(keras.optimizers.SGD(), strategy="funneled"),
):
    try:
        wrong()
    except training.trainer.PartitionError as error:
        assert "all ranks of the job" in str(error)
    else:
        raise SystemExit("no error")
_fit(alone, collectives="tensorflow")
_fit(half)
"""


def test_other_ranks_and_other_strategies_are_errors() -> None:
    done = run_script(4, SUBSETS, env=ENV)
    assert done.returncode == 0, done.stderr


SCRIPT = """
import keras, numpy as np, tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)

keras.utils.set_random_seed(1)
rng = np.random.default_rng(0)
x = rng.normal(size=(104, 4)).astype("float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.3), "mse")
history = model.fit(x, x[:, :1] ** 2, batch_size=13, epochs=2, validation_split=0.1, verbose=0)
print("RESULT", *(f"{value:.6f}" for values in history.history.values() for value in values))
"""


def _launched(folder: Path, code: str, ranks: int, *options: str, timeout: float = 120) -> Completed:
    (folder / "script.py").write_text(code)
    command = [LAUNCHER, *options, str(folder / "script.py")] if ranks else [folder / "script.py"]
    return run_script(ranks, *command, timeout=timeout)  # type: ignore[arg-type]


def _results(done: Completed) -> list[float]:
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT"))
    return [float(word) for word in line.split()[1:]]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_unmodified_script_has_the_logs_of_one_process(ranks: int, tmp_path: Path) -> None:
    plain = _launched(tmp_path, SCRIPT, 0)
    done = _launched(tmp_path, SCRIPT, ranks, "--collectives", "tensorflow", "--verify", "always")
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(_results(done), _results(plain), rtol=2e-4)


FAULT = """
import os, signal, time
import keras, numpy as np
from matex_data import training

class Fault(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and training.world().rank == training.world().size - 1:
            FAULT

x = np.ones((4000, 4), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(x, x[:, :1], batch_size=12, epochs=1000, verbose=0, callbacks=[Fault()])
"""


@pytest.mark.parametrize(
    "fault",
    [
        "os.kill(os.getpid(), signal.SIGKILL)",
        "raise RuntimeError('this rank fails')",
        pytest.param("os._exit(1)", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_ends_ends_the_job_in_time(fault: str, tmp_path: Path) -> None:
    done = _launched(tmp_path, FAULT.replace("FAULT", fault), 2, "--collectives", "tensorflow")
    assert done.returncode != 0
    assert done.seconds < scaled(40)


ERRORS_IN_A_STEP = """
import numpy as np, keras, tensorflow as tf
from mpi4py import MPI
from matex_data import training
from tests.support import problems

class Bad(keras.layers.Layer):
    def call(self, x):
        with tf.control_dependencies([tf.debugging.assert_less(tf.reduce_max(x), 100.0, "too large")]):
            return tf.identity(x)

comm = MPI.COMM_WORLD
x, y = problems.table(48)
x[40] = 1000.0  # on the last rank alone
first = keras.layers.Dense(4, kernel_initializer="ones")
model = keras.Sequential([keras.Input((6,)), first, Bad(), keras.layers.Dense(3)])
problems.compiled(model, "sgd")
training.fit(model, problems.shard((x, y), 48, comm.rank, comm.size), verbose=0, verify="never")
"""


def test_an_error_within_a_step_of_one_rank_ends_the_job_in_time() -> None:
    done = run_script(2, ERRORS_IN_A_STEP, env=ENV)
    assert done.returncode != 0
    assert "too large" in done.stderr
    assert done.seconds < scaled(40)


PROBED = """
from matex_data.training.comm import runtime
import sys
ADDRESSES = sys.argv.pop(1).split(",")
from mpi4py import MPI
runtime.gpu_address = lambda: ADDRESSES[MPI.COMM_WORLD.rank] or None
runtime.Runtime.is_right = lambda self, rank: print("HINT", self.hint) or rank == 0
from matex_data.training.launcher import run
run.gpus = lambda: len(ADDRESSES[MPI.COMM_WORLD.rank])
run.main()
"""


@pytest.mark.parametrize(
    ("addresses", "options", "hint", "message"),
    [
        pytest.param(",", [], None, None, marks=pytest.mark.slow),
        pytest.param("a,a", [], None, "not every rank has a GPU of its own", marks=pytest.mark.slow),
        pytest.param("a,", [], None, "not every rank has a GPU of its own", marks=pytest.mark.slow),
        ("a,b", [], "nccl", "a sum by TensorFlow's collectives is wrong"),
        ("a,a", ["--collectives", "tensorflow"], "ring", "a sum by TensorFlow's collectives is wrong"),
    ],
)
def test_auto_takes_what_is_right(
    addresses: str, options: list[str], hint: str | None, message: str | None, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_script(2, PROBED, addresses, *options, str(tmp_path / "script.py"), timeout=120)
    assert (f"HINT {hint}" in done.stdout + done.stderr) == (hint is not None)
    assert (done.returncode == 0) == (not options), done.stderr
    assert "gradients are reduced by MPI" in done.stderr if message and not options else True
    assert done.stderr.count(message or "gradients are reduced by MPI") == (message is not None)


KILLED = """
import os, signal, sys

class Killed(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1 and os.environ.get("KILLED"):
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("first", ["tensorflow", pytest.param("mpi", marks=pytest.mark.slow)])
def test_a_run_resumes_by_other_collectives(first: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head, tail = SCRIPT.split("keras.utils", 1)
    code = head + KILLED + "\nkeras.utils" + tail.replace("verbose=0", "verbose=0, callbacks=[Killed()]")
    expected = _results(_launched(tmp_path, code, 0))
    folder = ("--checkpoint", str(tmp_path / "checkpoint"))
    monkeypatch.setenv("KILLED", "1")
    assert _launched(tmp_path, code, 2, "--collectives", first, *folder).returncode != 0
    monkeypatch.delenv("KILLED")
    (second,) = {"mpi", "tensorflow"} - {first}
    done = _launched(tmp_path, code, 2, "--collectives", second, *folder)
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(_results(done), expected, rtol=2e-4)
