"""Saves of scripts: rank 0 writes the files, and every rank reads the file of its own save."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launch import run_script

LAUNCHER = "from matex_data.training.launcher.run import main; main()"
SIZES = [2, pytest.param(3, marks=pytest.mark.slow)]

SAVES = """
import os, sys, tempfile
import keras, numpy as np
from matex_data import training

rank = int(os.environ._data[b"PMI_RANK"])  # without asking for it
os.chdir(sys.argv[1])


def equal(model, other):
    return all(np.array_equal(a, b) for a, b in zip(model.get_weights(), other.get_weights(), strict=True))


def told(name, *values):
    sys.stdout.write(f"{name} {' '.join(map(str, values))}\\n")


keras.utils.set_random_seed(1)
x = np.random.normal(size=(60, 3)).astype("float32")
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse")
model.fit(x, x[:, :1], epochs=1, batch_size=20, verbose=0)

for _ in range(3):  # each overwrites the one before
    model.fit(x, x[:, :1], epochs=1, batch_size=20, verbose=0)
    model.save("model.keras")
    told("LOADED", equal(model, keras.models.load_model("model.keras")))
model.save_weights("m.weights.h5")
told("SIZE", os.path.getsize("m.weights.h5") > 1000)

folder = tempfile.mkdtemp()
model.save(folder + "/m.keras")
told("TEMPORARY", equal(model, keras.models.load_model(folder + "/m.keras")))
with tempfile.TemporaryDirectory() as folder:
    model.save_weights(os.path.join(folder, "m.weights.h5"))
    model.load_weights(os.path.join(folder, "m.weights.h5"))
    keras.saving.load_weights(model=model, filepath=os.path.join(folder, "m.weights.h5"))
    told("WITHIN", os.listdir(folder))
best = os.path.join(tempfile.mkdtemp(), "best.keras")
saving = keras.callbacks.ModelCheckpoint(best, monitor="loss", save_best_only=True)
lines = keras.callbacks.CSVLogger(os.path.join(os.path.dirname(best), "log.csv"))
model.fit(x, x[:, :1], epochs=2, batch_size=20, verbose=0, callbacks=[saving, lines])
told("BEST", equal(model, keras.models.load_model(best)), len(open(lines.filename).readlines()))

try:
    model.save("model.unknown")
except ValueError:
    told("REFUSED", True)


class Own(keras.callbacks.ModelCheckpoint):
    def on_epoch_end(self, epoch, logs=None):
        rows = self.model.predict(x, verbose=0)
        found = self.model.evaluate(x, x[:, :1], verbose=0)
        mine = float(np.mean((rows - x[:, :1]) ** 2))
        told("WHOLE", len(rows), abs(mine - found) < 1e-5, rank)
        super().on_epoch_end(epoch, logs)
        self.model.save("again.keras")

    def on_train_end(self, logs=None):
        self.model.set_weights([0 * w + 7 for w in self.model.get_weights()])


class Every(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        self.model.save(f"epoch_{epoch}.keras")
        told("EVERY", equal(self.model, keras.models.load_model(f"epoch_{epoch}.keras")))


history = model.fit(
    x, x[:, :1], epochs=2, batch_size=20, verbose=0, validation_data=(x, x[:, :1]),
    callbacks=[Own("own_{epoch}.keras"), Every()],
)
told("FILES", sorted(name for name in os.listdir() if name.startswith(("own", "epoch", "again"))))
told("SET", {float(v) for w in model.get_weights() for v in w.ravel()})
assert training.world().rank == rank
model.save(f"of_rank_{rank}.keras")
told("OWN", equal(model, keras.models.load_model(f"of_rank_{rank}.keras")))
if rank == 0:
    model.save("alone.keras")
told("ERROR", *[f"{value:.5f}" for value in history.history["val_loss"]])
"""


@pytest.mark.parametrize("size", SIZES)
def test_saves(size: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SAVES)
    done = run_script(
        size,
        LAUNCHER,
        "--all-output",
        str(tmp_path / "script.py"),
        str(tmp_path),
        timeout=200,
        env={"MATEX_TIMEOUT": "30"},
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for name, values in re.findall("^([A-Z]+) (.*)", done.stdout, re.MULTILINE):
        found.setdefault(name, []).append(values)
    whole = found.pop("WHOLE")
    assert whole == ["60 True 0"] * 2  # on rank 0 alone
    assert found.pop("LOADED") == ["True"] * 3 * size
    assert found.pop("EVERY") == ["True"] * 2 * size
    assert len(set(found.pop("ERROR"))) == 1
    files = "['again.keras', 'epoch_0.keras', 'epoch_1.keras', 'own_1.keras', 'own_2.keras']"
    assert found == {
        "SIZE": ["True"] * size,
        "TEMPORARY": ["True"] * size,
        "WITHIN": ["['m.weights.h5']"] * size,
        "OWN": ["True"] * size,
        "BEST": ["True 3"] * size,
        "REFUSED": ["True"] * size,
        "FILES": [files] * size,
        "SET": ["{7.0}"] * size,
    }
    assert (tmp_path / "alone.keras").exists()


LONE = """
import sys, keras, numpy as np
from matex_data import training

model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
if training.world().rank == int(sys.argv[2]):
    model.predict(np.ones((4, 3)), verbose=0) if sys.argv[1] == "predict" else model.save(sys.argv[1])
"""


def test_a_save_on_one_rank_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LONE)
    done = run_script(2, LAUNCHER, str(script), str(tmp_path / "lone.keras"), "1", timeout=150)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "lone.keras").exists()


@pytest.mark.slow
def test_error_names_a_call_on_one_rank_alone(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(LONE)
    done = run_script(2, LAUNCHER, str(script), "predict", "0", timeout=150, env={"MATEX_TIMEOUT": "12"})
    assert done.returncode != 0
    assert "every rank calls predict(), " in done.stderr
    assert f"this rank is at {script}, line 7" in done.stderr


LONE_IN_A_CALLBACK = """
import sys, keras, numpy as np
from matex_data import training

x = np.ones((64, 3))
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")


class Lone(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        if training.world().rank == 0:
            getattr(self.model, sys.argv[1])(x, verbose=0)


model.fit(x, x[:, :1], epochs=2, verbose=0, callbacks=[Lone()])
"""


@pytest.mark.slow
@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_error_names_a_call_in_a_callback_of_one_rank_alone(call: str, tmp_path: Path) -> None:
    """MPI ended the job, by messages of another length than the other rank waited for."""
    script = tmp_path / "script.py"
    script.write_text(LONE_IN_A_CALLBACK)
    done = run_script(2, LAUNCHER, str(script), call, timeout=150, env={"MATEX_TIMEOUT": "60"})
    assert done.returncode != 0
    assert "the ranks wait for one another in different calls" in done.stderr
    assert f"this rank is at {script}, line 13" in done.stderr


LATE = """
import os, sys, time, keras
from matex_data import training

os.chdir(sys.argv[1])
rank = int(os.environ._data[b"PMI_RANK"])
early, late = (2 * rank * (sys.argv[2] == when) for when in ("early", "late"))
model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])
training.allreduce([1.0])
time.sleep(2 * early)
for i in range(3):
    model.set_weights([0 * weights + i for weights in model.get_weights()])
    model.save("model.keras")
    time.sleep(late)
    sys.stdout.write(f"LOADED {i} {float(keras.models.load_model('model.keras').get_weights()[1][0])}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["early", "late"])
def test_a_late_rank_loads_what_rank_0_has_loaded(when: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LATE)
    arguments = ["--all-output", str(tmp_path / "script.py"), str(tmp_path), when]
    done = run_script(2, LAUNCHER, *arguments, timeout=150)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall("^LOADED .*", done.stdout, re.MULTILINE)) == sorted(
        [f"LOADED {i} {i}.0" for i in range(3)] * 2
    )
