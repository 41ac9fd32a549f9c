"""Choice of a GPU, with lists of devices that stand for those of a machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from matex_data.machine import RankAndSize
from matex_data.training.comm.runtime import choose_gpu
from tests.support.launch import run_script


@pytest.mark.parametrize(
    ("local", "gpus", "assigned", "expected"),
    [
        ((0, 4), 4, False, 0),
        ((3, 4), 4, False, 3),
        ((3, 4), 4, True, 3),  # the scheduler shows all GPUs of the job to every rank
        ((2, 4), 2, False, 0),
        ((1, 2), 8, False, 1),
        ((1, 2), 1, False, 0),  # the only GPU of the machine
        ((1, 2), 1, True, None),  # the scheduler has given one to this rank
        ((1, 2), 0, False, None),
        ((0, 1), 4, False, None),  # one process: as in plain Python
    ],
)
def test_choice(local: tuple[int, int], gpus: int, assigned: bool, expected: int | None) -> None:
    assert choose_gpu(RankAndSize(*local), gpus, assigned) == expected


GPUS = """
import os
import sys
import tensorflow as tf
from tensorflow.python.eager import context

gpus, visible = [f"GPU:{number}" for number in range(int(sys.argv.pop(1)))], []
mode = sys.argv.pop(1)
os.environ.pop("CUDA_VISIBLE_DEVICES")


def choose(gpu, kind):
    if mode == "started":
        raise RuntimeError("Visible devices cannot be modified after being initialized")
    assert not context.context()._initialized
    visible[:] = [gpu]


tf.config.list_physical_devices = lambda kind: gpus
tf.config.get_visible_devices = lambda kind: visible or (gpus[1:] if mode == "script" else gpus)
tf.config.set_visible_devices = choose
tf.config.experimental.set_memory_growth = lambda gpu, grows: sys.stdout.write(f"GROWS {gpu} {grows}\\n")
"""
LAUNCHED = f"{GPUS}\nfrom matex_data.training.launcher.run import main; main()"
SCRIPT = """
import sys
from matex_data import training
import tensorflow as tf

sys.stdout.write(f"RANK {training.world().rank} {tf.config.get_visible_devices('GPU')}\\n")
"""


def _run(folder: Path, ranks: int, gpus: int, mode: str = "") -> tuple[list[str], str]:
    """Return the lines of all ranks under ``matex run``, in order, and stderr."""
    (folder / "script.py").write_text(SCRIPT)
    done = run_script(ranks, LAUNCHED, str(gpus), mode, "--all-output", str(folder / "script.py"), timeout=90)
    assert done.returncode == 0, done.stderr
    return sorted(re.findall("^(?:RANK|GROWS) .*", done.stdout, re.MULTILINE)), done.stderr


def test_each_rank_takes_its_own_gpu_before_tensorflow_starts(tmp_path: Path) -> None:
    lines, stderr = _run(tmp_path, 2, 2)
    assert lines == [*["GROWS GPU:0 True"] * 2, *["GROWS GPU:1 True"] * 2, "RANK 0 ['GPU:0']", "RANK 1 ['GPU:1']"]
    assert "GPU" not in stderr


@pytest.mark.slow
def test_more_ranks_than_gpus_share_them(tmp_path: Path) -> None:
    lines, stderr = _run(tmp_path, 3, 2)
    assert lines[-3:] == ["RANK 0 ['GPU:0']", "RANK 1 ['GPU:1']", "RANK 2 ['GPU:0']"]
    assert len(re.findall("3 ranks on .* share 2 GPUs", stderr)) == 1


@pytest.mark.slow
def test_the_choice_of_the_script_stays(tmp_path: Path) -> None:
    assert _run(tmp_path, 2, 3, "script")[0] == ["RANK 0 ['GPU:1', 'GPU:2']", "RANK 1 ['GPU:1', 'GPU:2']"]


def test_a_runtime_that_has_started_is_reported(tmp_path: Path) -> None:
    lines, stderr = _run(tmp_path, 2, 2, "started")
    assert lines == ["RANK 0 ['GPU:0', 'GPU:1']", "RANK 1 ['GPU:0', 'GPU:1']"]
    assert stderr.count("cannot take a GPU of its own: TensorFlow has started") == 2


DISTRIBUTE = """
import keras
from matex_data import training

training.distribute(keras.optimizers.SGD())
training.distribute(keras.optimizers.SGD())
"""


def test_ranks_without_the_launcher_are_warned_once(tmp_path: Path) -> None:
    done = run_script(2, f"{GPUS}\n{DISTRIBUTE}", "2", "", timeout=90)
    assert done.returncode == 0, done.stderr
    assert len(re.findall("each of the 2 ranks on .* sees 2 GPUs", done.stderr)) == 1
