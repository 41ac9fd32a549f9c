"""TensorFlow's configuration, folders, checkpoints and the end of scripts on all ranks, as in plain Python."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launch import run_script

LAUNCHER = "from matex_data.training.launcher.run import main; main()"
SIZES = [2, pytest.param(3, marks=pytest.mark.slow)]

CONFIGURES = """
import tensorflow as tf
from tensorflow.python.eager import context

print("INITIALIZED", context.context()._initialized)
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
for gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(gpu, True)
tf.config.set_visible_devices([], "GPU")
one = tf.config.LogicalDeviceConfiguration()
tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], [one, one])
print("DEVICES", len(tf.config.list_logical_devices("CPU")), tf.config.threading.get_intra_op_parallelism_threads())

import keras
import numpy as np

keras.utils.set_random_seed(1)
x = np.random.normal(size=(60, 3)).astype("float32")
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(x, x[:, :1], epochs=2, batch_size=20, verbose=0)
print("LOSS", *[f"{loss:.4f}" for loss in history.history["loss"]])
"""


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_script_configures_tensorflow(size: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CONFIGURES)
    plain = run_script(0, tmp_path / "script.py", timeout=120)
    done = run_script(size, LAUNCHER, str(tmp_path / "script.py"), timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert done.stdout.startswith("INITIALIZED False\nDEVICES 2 1\nLOSS ")


FILES = """
import os, pathlib, sys, time
import keras, numpy as np, tensorflow as tf
from matex_data import training

rank = int(os.environ._data[b"PMI_RANK"])  # without asking for it
os.chdir(sys.argv[1])


def told(name, *values):
    sys.stdout.write(f"{name} {' '.join(map(str, values))}\\n")


def refused(make, *args, **kwargs):
    try:
        make(*args, **kwargs)
    except FileExistsError:
        return "refused"
    return "made"


time.sleep(0.2 * rank)
os.makedirs("out/weights")
os.mkdir("mkdir")
pathlib.Path("a/b").mkdir(parents=True)
told("NEW", *map(os.path.isdir, ("out/weights", "mkdir", "a/b")))
told("AGAIN", refused(os.makedirs, "out/weights"), refused(os.mkdir, "mkdir"), refused(pathlib.Path("a/b").mkdir))
told("OLDER", refused(os.makedirs, "older"), refused(os.mkdir, "older"), refused(pathlib.Path("older").mkdir))
told("LENIENT", refused(os.makedirs, "older", exist_ok=True), refused(pathlib.Path("older").mkdir, exist_ok=True))
told("LOOP", *[refused(os.mkdir, "loop") for _ in range(2)])
if rank == 1:
    os.makedirs("of rank 1")
    told("LONE", os.path.isdir("of rank 1"), refused(os.mkdir, "of rank 1"))

v = tf.Variable(1.0)
checkpoint = tf.train.Checkpoint(v=v)
manager = tf.train.CheckpointManager(checkpoint, "checkpoints", max_to_keep=2)
told("START", manager.restore_or_initialize())
for step in range(4):
    v.assign_add(1.0)
    path = manager.save()
    told("PATH", path)
    told("THERE", os.path.exists(path + ".index"), tf.train.latest_checkpoint("checkpoints") == path)
    training.allreduce([1.0])
told("KEPT", manager.latest_checkpoint, *manager.checkpoints)
v.assign(0.0)
checkpoint.restore(manager.latest_checkpoint).assert_consumed()
told("RESTORED", v.numpy(), checkpoint.save_counter.numpy())
training.allreduce([1.0])
told("FOUND", *sorted(name for name in os.listdir("checkpoints") if name.endswith("index")))
path = checkpoint.save("saved/ckpt")
v.assign(0.0)
checkpoint.restore(path)
told("SAVED", path, v.numpy())
v.assign(3.0)
path = checkpoint.write("written/ckpt")
v.assign(0.0)
checkpoint.read(path)
told("WRITTEN", path, v.numpy())
if rank == 0:
    told("ALONE", checkpoint.save("alone/ckpt"))


def numbers():
    for i in range(6):
        told("READ", i)
        yield float(i)


data = tf.data.Dataset.from_generator(numbers, output_signature=tf.TensorSpec((), tf.float32)).cache("cached")
training.allreduce([1.0])
told("EPOCHS", *[float(sum(value.numpy() for value in data)) for _ in range(2)])
"""


@pytest.mark.parametrize("size", SIZES)
def test_files_of_several_ranks(size: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(FILES)
    (tmp_path / "older").mkdir()
    arguments = ["--all-output", str(tmp_path / "script.py"), str(tmp_path)]
    done = run_script(size, LAUNCHER, *arguments, timeout=200, env={"MATEX_TIMEOUT": "30"})
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = {}
    for name, values in re.findall("^([A-Z]+) (.*)", done.stdout, re.MULTILINE):
        found.setdefault(name, []).append(values)
    paths = [f"checkpoints/ckpt-{i}" for i in range(1, 5)]
    assert sorted(found.pop("PATH")) == sorted(paths * size)
    assert len(found.pop("READ")) == 6 * size  # once on each rank; then from its cache
    assert found.pop("ALONE") == ["alone/ckpt-6"]
    assert found.pop("LONE") == ["True refused"]
    expected = {
        "NEW": "True True True",
        "AGAIN": "refused refused refused",
        "OLDER": "refused refused refused",
        "LENIENT": "made made",
        "LOOP": "made refused",
        "START": "None",
        "KEPT": "checkpoints/ckpt-4 checkpoints/ckpt-3 checkpoints/ckpt-4",
        "RESTORED": "5.0 4",
        "FOUND": "ckpt-3.index ckpt-4.index",
        "SAVED": "saved/ckpt-5 5.0",
        "WRITTEN": "written/ckpt 3.0",
        "EPOCHS": "15.0 15.0",
    }
    assert found.pop("THERE") == ["True True"] * 4 * size
    assert found == {name: [values] * size for name, values in expected.items()}
    assert sorted(path.name for path in tmp_path.glob("cached*")) == ["cached.data-00000-of-00001", "cached.index"]


ENDS = """
import atexit, sys, time
from matex_data import training

atexit.register(lambda: print("handler ran", file=open(f"{sys.argv[1]}/{training.world().rank}", "w")))
try:
    if sys.argv[2] == "all" or training.world().rank == 1:
        sys.exit(3)
    time.sleep(60)
finally:
    print("finally", flush=True)
"""


@pytest.mark.parametrize("ranks", [pytest.param("all", marks=pytest.mark.slow), "one"])
def test_exit_handlers_run(ranks: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(ENDS)
    arguments = ["--all-output", str(tmp_path / "script.py"), str(tmp_path), ranks]
    done = run_script(2, LAUNCHER, *arguments, timeout=120, forked=ranks == "one")
    assert done.returncode == 3, done.stderr
    assert done.stdout.count("finally") == (2 if ranks == "all" else 1)
    assert [path.read_text() for path in sorted(tmp_path.glob("[01]"))] == ["handler ran\n"] * (
        2 if ranks == "all" else 1
    )


SPEAKS = """
import logging, os, sys, threading, warnings
from matex_data import training

rank = training.world().rank
logging.basicConfig(level="INFO")
logging.info("logged")
warnings.warn("warned")
sys.stderr.write("progress\\n")
os.write(2, b"from C++\\n")
logging.getLogger("matex_data").warning("own warning")
if rank == 1:
    thread = threading.Thread(target=lambda: 1 / 0)
    thread.start()
    thread.join()
    sys.stderr.write("muted again\\n")
    raise KeyError("on rank 1")
training.allreduce([1.0])
"""


@pytest.mark.parametrize("option", [[], pytest.param(["--all-output"], marks=pytest.mark.slow)])
def test_rank_0_prints_and_all_ranks_print_errors(option: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SPEAKS)
    done = run_script(2, LAUNCHER, *option, str(tmp_path / "script.py"), timeout=60)
    assert done.returncode == 1
    for text in ("logged", "warned", "progress", "from C++"):
        assert done.stderr.count(f"{text}\n") == 1 + len(option), text
    assert ("muted again" in done.stderr) == bool(option)
    assert "own warning" in done.stderr
    assert "ZeroDivisionError" in done.stderr
    assert "KeyError: 'on rank 1'" in done.stderr
    assert "---- uncaught error on rank 1 of 2" in done.stderr
