"""Training loops of scripts under ``matex run``: what each optimizer and each gradient gets from the other ranks."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.launch import run_script

LAUNCHER = "from matex_data.training.launcher.run import main; main()"


def _numbers(code: str, folder: Path, ranks: int = 2, *options: str) -> list[list[float]]:
    """Run a script under the launcher; return the numbers of the lines ``RESULT ...`` of all ranks."""
    (folder / "script.py").write_text(code)
    done = run_script(ranks, LAUNCHER, "--all-output", *options, str(folder / "script.py"), timeout=90)
    assert done.returncode == 0, done.stderr
    found = re.findall("^RESULT (.*)", done.stdout, re.MULTILINE)
    return [[float(word) for word in line.split()] for line in found]


SHORT_LIVED = """
import gc
import keras, tensorflow as tf
from matex_data import training

gc.freeze()  # a collection takes 0.4 s otherwise
rank = training.world().rank
data = training.shard(tf.data.Dataset.from_tensor_slices(tf.ones(12)).batch(4, drop_remainder=True))
ids, weights = [], []
for run in range(20):
    weight = keras.Variable(10.0 * run + rank)
    optimizer = keras.optimizers.SGD(0.5)
    ids.append(id(optimizer))
    for batch in data:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(batch) * weight.value
        optimizer.apply([tape.gradient(loss, weight.value)], [weight])
    weights.append(float(weight.numpy()))
    del optimizer
    gc.collect()
print("RESULT", len(set(ids)), *weights)
"""


@pytest.mark.slow
def test_every_optimizer_begins_with_the_weights_of_rank_0(tmp_path: Path) -> None:
    """An optimizer may get the address of an earlier one, which was deleted."""
    by_rank = _numbers(SHORT_LIVED, tmp_path)
    assert len(by_rank) == 2
    for addresses, *weights in by_rank:
        assert addresses < 20
        np.testing.assert_array_equal(weights, [10.0 * run - 1.5 for run in range(20)])


SESSION = """
import numpy as np, tensorflow as tf
from matex_data import training

v1, rank = tf.compat.v1, training.world().rank
training.shard(tf.data.Dataset.from_tensor_slices(tf.ones(12)).batch(4))
rows = [np.array([[1.0, 2.0]]), np.array([[3.0, 5.0], [4.0, 12.0], [8.0, 21.0]])][rank]
with tf.Graph().as_default():
    x = v1.placeholder(tf.float32, [None, 2])
    a, b, c = (v1.Variable(0.0) for _ in range(3))
    sgd = v1.train.GradientDescentOptimizer(1.0)
    loss = tf.reduce_mean(x[:, 0]) * a + tf.reduce_mean(x[:, 1]) * b
    (first, _), *_ = sgd.compute_gradients(loss, [a])
    (second,) = tf.gradients(loss, b)
    clipped, _ = tf.clip_by_global_norm([first], 2.0)
    step = sgd.apply_gradients([(clipped[0], a), (second, b), (tf.reduce_mean(x), c)])
    with v1.Session() as session:
        session.run(v1.global_variables_initializer())
        session.run(step, {x: rows})
        print("RESULT", *session.run([a, b, c]))
"""


def test_gradients_of_a_session_are_weighted_by_the_rows_that_it_feeds(tmp_path: Path) -> None:
    """Of the optimizer and clipped, of ``tf.gradients``, and computed by hand."""
    for found in _numbers(SESSION, tmp_path):
        np.testing.assert_allclose(found, [-2.0, -10.0, -7.0], rtol=1e-6)
