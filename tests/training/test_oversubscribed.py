"""Many more ranks than cores: they train alike, and a rank that waits leaves its core to the others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launch import run_script

LAUNCHER = "from matex_data.training.launcher.run import main; main()"
PAUSE = 5.0
SCRIPT = f"""
import hashlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from matex_data import training

rank, used = training.world().rank, []


def pause():
    used.append(time.process_time())
    if rank == 0:
        time.sleep({PAUSE})


class Pause(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 5:
            pause()
        elif batch == 6:
            used.append(time.process_time())


x = np.random.default_rng(0).normal(size=(4800, 32)).astype("float32")
model = keras.Sequential([keras.Input((32,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)])
model.compile("adam", "mse")
begin = time.monotonic()
model.fit(x, x[:, :1], batch_size=48, epochs=2, verbose=0, callbacks=[Pause()])
seconds = time.monotonic() - begin - 2 * {PAUSE}
reduced = tf.function(lambda: training.allreduce(tf.ones(1000)))
reduced()
pause()
reduced()
used.append(time.process_time())
waits = [end - start for start, end in zip(used[::2], used[1::2])]
digest = hashlib.sha256(b"".join(weight.tobytes() for weight in model.get_weights())).hexdigest()
sys.stdout.write(f"RANK {{rank}} {{digest}} {{seconds:.2f}} {{max(waits):.3f}}\\n")
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", [8, 16])
def test_many_ranks_train_alike_and_do_not_spin(size: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run_script(size, LAUNCHER, "--all-output", str(tmp_path / "script.py"), timeout=400)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"^RANK (\d+) (\w+) (\S+) (\S+)$", done.stdout, re.MULTILINE)
    assert sorted(int(rank) for rank, *_ in found) == list(range(size))
    assert len({digest for _, digest, *_ in found}) == 1
    assert max(float(cpu) for *_, cpu in found) < PAUSE / 20, found
    assert max(float(seconds) for *_, seconds, _ in found) < 10 * size, found  # 200 steps and the tracing of all ranks
