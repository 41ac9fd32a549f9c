"""An error on any rank ends the job soon, with its traceback and a nonzero exit code."""

from __future__ import annotations

import pytest

from tests.support.launch import run_script

SCRIPT = """
import sys

import numpy as np
import tensorflow as tf

from matex_data import training
from matex_data.errors import FormatError

case, rank = sys.argv[1], training.world().rank


class Stop:
    batches = 0

    @classmethod
    def after_three_batches(cls):
        cls.batches += 1
        if cls.batches == 3 and case == "step" and rank == 1:
            raise ValueError("rank one fails in its step")
        return np.float32(0)


def batches():
    for i in range(8):
        if case == "data" and i == 3:
            raise FormatError("this file is broken", file="a.h5")
        yield np.ones((4, 2), np.float32), np.ones((4, 1), np.float32)


import keras

spec = (tf.TensorSpec((4, 2)), tf.TensorSpec((4, 1)))
steps = 8 + rank if case == "steps" else 8
data = tf.data.Dataset.from_generator(batches, output_signature=spec)
data = data.apply(tf.data.experimental.assert_cardinality(steps))
data = data.map(lambda x, y: (x + tf.ensure_shape(tf.numpy_function(Stop.after_three_batches, [], tf.float32), ()), y))
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
training.fit(model, data, epochs=2)
print("trained")
"""

EXPECTED = {
    "data": "matex_data.errors.FormatError: this file is broken (file 'a.h5')",
    "steps": "the ranks do not have the same number of training steps",
    "step": "ValueError: rank one fails in its step",
}


@pytest.mark.parametrize("case", ["data", "step", pytest.param("steps", marks=pytest.mark.slow)])
def test_the_job_ends_with_the_error(case: str) -> None:
    done = run_script(2, SCRIPT, case)
    assert done.returncode != 0
    assert "trained" not in done.stdout
    assert EXPECTED[case] in done.stderr
    once = "rank 1 of 2" if case == "step" else "all 2 ranks"
    assert done.stderr.count("---- uncaught error on") == 1
    assert f"---- uncaught error on {once}" in done.stderr


IMPORTS = """
import sys

import matex_data.training

print(sorted(name for name in ("tensorflow", "keras") if name in sys.modules), matex_data.training.world().size)
"""


def test_importing_the_package_imports_no_tensorflow() -> None:
    assert run_script(2, IMPORTS, forked=False).stdout.split("\n")[:2] == ["[] 2", "[] 2"]


def test_training_works_without_other_ranks() -> None:
    done = run_script(1, SCRIPT, "none")
    assert done.returncode == 0, done.stderr
    assert "samples/s" in done.stdout
    assert "trained" in done.stdout
