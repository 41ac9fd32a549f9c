"""Runs that are sent a signal, or near their time limit, save and end; started again they end like undisturbed ones."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matex_data.errors import PartitionError
from matex_data.training.restart import preemption
from tests.support.launch import Completed, run_script
from tests.support.machine_speed import scaled

SCRIPT = Path(__file__).with_name("preempted.py")
LAUNCHER = "from matex_data.training.launcher.run import main; main()"
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h


def _run(
    ranks: int, folder: Path, name: str, env: dict[str, str] | None = None, stages: int = 1, **options: Any
) -> Completed:
    given = ["--checkpoint", str(folder / name), "--all-output", "--stages", str(stages)]
    command = [LAUNCHER, *given, str(SCRIPT)]
    return run_script(ranks, *command, str(folder / f"{name}.npz"), json.dumps(options), env=env, timeout=180)


def _undisturbed(ranks: int, folder: Path, **options: Any) -> None:
    """Run the script with the seed of the interrupted run; compare weights bit by bit, and histories to rounding."""
    (folder / "whole").mkdir()
    shutil.copy(folder / "broken" / "seed.json", folder / "whole")
    done = _run(ranks, folder, "whole", **options)
    assert done.returncode == 0, done.stderr
    with np.load(folder / "broken.npz") as found, np.load(folder / "whole.npz") as expected:
        assert found.files == expected.files
        for name in found.files:
            if found[name].dtype == np.float32:
                assert found[name].tobytes() == expected[name].tobytes()
            else:
                np.testing.assert_allclose(found[name], expected[name], rtol=1e-6)


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Completed]:
    """Return the folder and the output of a job that was sent a signal."""
    folder = tmp_path_factory.mktemp("interrupted")
    return folder, _run(2, folder, "broken", kind="arrays", when="train:9", handler=True, late=True)


def test_a_signal_to_one_rank_saves_and_ends_all(interrupted: tuple[Path, Completed]) -> None:
    _, done = interrupted
    assert done.returncode == PREEMPTED, done.stderr
    assert "SIGUSR1 was received" in done.stderr and "after 1 epochs and 3 steps" in done.stderr
    assert "the script's own handler 1" in done.stdout
    assert "end" not in done.stdout


@pytest.mark.slow
def test_a_job_that_was_sent_a_signal_goes_on_exactly(interrupted: tuple[Path, Completed]) -> None:
    folder, _ = interrupted
    done = _run(2, folder, "broken", kind="arrays")
    assert done.returncode == 0, done.stderr
    _undisturbed(2, folder, kind="arrays")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, {"kind": "steps", "when": "train:11", "signal": "SIGTERM", "senders": [0, 1]}),
        (2, {"kind": "generator", "when": "train:11", "signal": "SIGUSR2", "times": 2}),
        (2, {"kind": "pipeline", "when": "train:11"}),
        (1, {"kind": "pipeline", "when": "train:40", "calls": 2, "senders": [0]}),
        (2, {"kind": "sequence", "when": "train:11", "calls": 2}),
        (2, {"kind": "sequence", "when": "train:32", "calls": 2}),
        (2, {"kind": "pipeline", "when": "test:1"}),
        (2, {"kind": "arrays", "when": "epoch:1", "calls": 2}),
        (2, {"kind": "arrays", "when": "train:25", "calls": 2}),
        (3, {"kind": "arrays", "when": "begin"}),
        (1, {"kind": "pipeline", "when": "train:11", "senders": [0]}),
        (2, {"kind": "arrays", "when": "train:9", "stages": 2}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_scripts_of_every_kind_go_on_exactly(tmp_path: Path, ranks: int, options: dict[str, Any]) -> None:
    done = _run(ranks, tmp_path, "broken", **options)
    assert done.returncode == PREEMPTED, done.stderr
    rest = {name: value for name, value in options.items() if name in ("kind", "calls", "stages")}
    done = _run(ranks, tmp_path, "broken", **rest)
    assert done.returncode == 0, done.stderr
    _undisturbed(ranks, tmp_path, **rest)


@pytest.mark.slow
def test_a_run_saves_before_its_time_limit(tmp_path: Path) -> None:
    limit = {"MATEX_END_TIME": str(time.time() + 40), "MATEX_END_MARGIN": "20"}
    done = _run(2, tmp_path, "broken", env=limit, kind="arrays", pause=2.0)
    assert done.returncode == PREEMPTED, done.stderr
    assert "the time limit is near" in done.stderr
    assert 5 < done.seconds < scaled(40)


@pytest.mark.slow
def test_other_data_are_refused(tmp_path: Path) -> None:
    assert _run(2, tmp_path, "broken", kind="arrays", when="train:9").returncode == PREEMPTED
    done = _run(2, tmp_path, "broken", kind="steps")
    assert done.returncode not in (0, PREEMPTED)
    assert "call 1 of fit had other data or options" in done.stderr


TWO_CALLS = """
import sys
import keras, numpy as np

x = np.arange(60, dtype="float32").reshape(20, 3)
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
for epochs in map(int, sys.argv[1:]):
    print("EPOCHS", len(model.fit(x, x[:, :1], epochs=epochs, verbose=0).epoch))
"""


def test_a_call_of_fit_after_another_training_is_refused(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(TWO_CALLS)
    for first, text in (("1", ""), ("3", "another number of epochs in the call before"), ("3", "delete this folder")):
        command = [LAUNCHER, "--checkpoint", str(tmp_path / "saved"), str(tmp_path / "script.py"), first, "2"]
        done = run_script(1, *command, timeout=90)
        assert (done.returncode == 0) == (text == "") and text in done.stderr, done.stderr
        assert done.stdout.split() == ["EPOCHS", first, *(("EPOCHS", "2") if not text else ())]


ONE_DATASET = """
import keras, numpy as np, tensorflow as tf

seen = []

def noted(numbers):
    seen.append(numbers.tolist())
    return np.float32(numbers)[:, None]

def data():
    batches = tf.data.Dataset.range(20).shuffle(20).batch(5)
    batches = batches.map(lambda i: tf.ensure_shape(tf.numpy_function(noted, [i], tf.float32), (None, 1)))
    return tf.data.Dataset.zip(batches, batches)

model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
given = {"x": data(), "validation_data": data(), "verbose": 0}
for epochs in (2, 1):
    model.fit(**given, epochs=epochs)
    print("SEEN", seen)
    seen.clear()
"""


def test_a_dataset_of_several_calls_goes_on_with_the_order_of_the_next_one(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ONE_DATASET)
    command = [LAUNCHER, "--checkpoint", str(tmp_path / "saved"), str(tmp_path / "script.py")]
    straight = run_script(1, *command, timeout=90)
    shutil.rmtree(tmp_path / "saved" / "fit-2")
    continued = run_script(1, *command, timeout=90)
    assert straight.returncode == continued.returncode == 0, continued.stderr
    assert continued.stdout.splitlines() == ["SEEN []", straight.stdout.splitlines()[1]]
    assert len(straight.stdout) > 400


WITHIN = """
import os, signal, sys
import keras, numpy as np

x = np.arange(60, dtype="float32").reshape(20, 3)

def made():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model

class Probe(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        made().fit(x, x[:, :1], verbose=0)
        if epoch == 1 and "stop" in sys.argv:
            os.kill(os.getpid(), signal.SIGUSR1)

print("EPOCHS", len(made().fit(x, x[:, :1], epochs=4, verbose=0, callbacks=[Probe()]).epoch))
"""


def test_a_call_of_fit_within_another_leaves_its_checkpoint_and_signals(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(WITHIN)
    command = [LAUNCHER, "--checkpoint", str(tmp_path / "saved"), str(tmp_path / "script.py")]
    stopped = run_script(1, *command, "stop", timeout=90)
    assert stopped.returncode == PREEMPTED, stopped.stderr
    assert stopped.stderr.count("a call of fit within another one saves no checkpoint") == 1
    done = run_script(1, *command, timeout=90)
    assert (done.returncode, done.stdout.split()) == (0, ["EPOCHS", "4"]), done.stderr
    assert [path.name for path in (tmp_path / "saved").glob("fit-*")] == ["fit-1"]


def test_handlers_of_signals_nest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATEX_SIGNALS", "SIGUSR1")
    before, received = signal.getsignal(signal.SIGUSR1), preemption.REQUESTS._received
    with preemption.stopping_on_request():
        with preemption.stopping_on_request():
            handler = signal.getsignal(signal.SIGUSR1)
        assert signal.getsignal(signal.SIGUSR1) == handler != before
    assert signal.getsignal(signal.SIGUSR1) == before
    assert preemption.REQUESTS._received == received


OWN_LOOP = """
import sys, os, signal
import matex_data as md

for step in range(100):
    if step == 3 and md.training.world().rank == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    if md.training.stop_requested():
        print("stop", step, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)  # as of srun -K1, once another rank has ended
        sys.exit(md.training.EXIT_PREEMPTED)
"""


@pytest.mark.slow
@pytest.mark.openmpi
def test_own_loops_ask_for_the_agreement(tmp_path: Path) -> None:
    done = run_script(2, OWN_LOOP)
    assert done.returncode == PREEMPTED, done.stderr
    assert done.stdout.split() == ["stop", "3", "stop", "3"]


def test_the_margin_grows_with_saves_and_steps() -> None:
    limit = preemption.TimeLimit(end=1000.0, margin=60.0, now=0.0)
    assert [limit.is_near(now) for now in (700.0, 720.0, 900.0)] == [False, False, True]  # the next look: 1080 s
    limit = preemption.TimeLimit(end=1000.0, margin=60.0, now=0.0)
    limit.note_save(100.0)
    assert [limit.is_near(now) for now in (730.0, 733.0, 741.0)] == [False, False, True]
    assert preemption.TimeLimit(1000.0, 60.0, 0.0).is_near(941.0)
    short = preemption.TimeLimit(end=40.0, margin=60.0, now=0.0)  # a job of 40 s still trains
    assert not short.is_near(1.0) and short.is_near(21.0)
    short = preemption.TimeLimit(end=1040.0, margin=60.0, now=1000.0)
    assert not short.is_near(1001.0) and short.is_near(1021.0)
    assert not preemption.TimeLimit(None, 60.0, 0.0).is_near(1e12)


def test_the_environment_names_signals_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MATEX_SIGNALS", "SIGUSR1, SIGHUP")
    assert [each.name for each in preemption.signals()] == ["SIGUSR1", "SIGHUP"]
    monkeypatch.setenv("MATEX_SIGNALS", "none")
    assert preemption.signals() == []
    monkeypatch.setenv("MATEX_SIGNALS", "SIGKILL")
    with pytest.raises(PartitionError, match="SIGKILL"):
        preemption.signals()
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1700000000")
    assert preemption.end_time() == 1.7e9
    monkeypatch.setenv("MATEX_END_TIME", "noon")
    with pytest.raises(PartitionError, match="MATEX_END_TIME"):
        preemption.end_time()
