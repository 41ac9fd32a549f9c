"""Models that are not proven: results are those of plain Python, or a message says of which steps they are not.

The scripts are the cases of ``scripts/checked.py``.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.launch import ROOT, run_script

pytestmark = pytest.mark.shares_jobs

SCRIPT = ROOT / "tests" / "training" / "launcher" / "scripts" / "checked.py"
LAUNCHER = "from matex_data.training.launcher.run import main; main()"

PROVEN, CHECKED, WHOLE = "is proven to train", "agree in the first step", "on whole batches from step 1 on"
LATER = r"on whole batches from step (?!1 )"
DOUBT = r"steps \d+ to \d+ were trained on shards: from the first one that differs on, the result is not that of"
REFUSED = "PartitionError"

EQUAL: dict[str, str] = {
    "mean_over_samples": CHECKED,
    "nested_function": CHECKED,
    "sums_and_counts": CHECKED,
    "evaluate_in_a_callback": PROVEN,
    "logs_of_evaluated_batches": PROVEN,
    "proven_on_own_shards": PROVEN,
    "test_step_that_mixes": "cannot be evaluated on shards",
    "metric_of_pairs": "cannot be evaluated on shards",
    "table_in_train_on_batch": CHECKED,
    "predictions_that_mix": "predicts all of its data on every rank",
    **dict.fromkeys(
        (
            *("small_term", "zero_head", "tf_gradients", "nested_function_mixing", "two_rows"),
            *("fewer_rows_than_ranks", "running_mean", "class_centers", "memory_queue", "largest_so_far"),
            *("eager_counter", "initialised_once", "initialised_once_eagerly", "applied_if_loss_is_large"),
            *("zeroed_if_loss_is_small", "graphs_of_several_sizes", "switched_by_compile"),
        ),
        WHOLE,
    ),
    **dict.fromkeys(("growing_term", "growing_in_train_on_batch", "term_by_label", "switched_between_fits"), LATER),
    **dict.fromkeys(("growing_in_executions", "every_third_in_executions"), LATER),
    **dict.fromkeys(("masked_mean", "switched_by_variable", "switched_by_keras_variable"), LATER),
}
"""Cases whose numbers have to be those of plain Python, and what is reported."""
LOUD: dict[str, str] = {
    "mixing_on_own_shards": "is neither proven nor checked",
    "switched_by_attribute": DOUBT,
    "switched_in_the_last_epoch": DOUBT,
    "another_order_on_each_rank": REFUSED,
    "another_order_and_mixing": REFUSED,
}
"""Cases whose numbers may differ, since the change shows after the step that it concerns; or that are refused."""

QUICK = (
    *("growing_term", "switched_by_attribute", "applied_if_loss_is_large", "another_order_and_mixing"),
    *("every_third_in_executions", "proven_on_own_shards", "sums_and_counts"),
)
MORE = tuple(name for name in (*EQUAL, *LOUD) if name not in QUICK)
GROUPS = (*(QUICK[i::2] for i in range(2)), MORE[: len(MORE) // 2], MORE[len(MORE) // 2 :])
"""Cases by the job that runs them; the first test of a group waits for it."""


class Job(NamedTuple):
    """Numbers and messages of cases, by name."""

    numbers: dict[str, Any]
    messages: dict[str, str]


@functools.cache
def job(ranks: int, names: tuple[str, ...]) -> Job:
    """Run cases in one job. 0 ranks: plain Python."""
    done = run_script(ranks, *([LAUNCHER, str(SCRIPT)] if ranks else [SCRIPT]), *names, timeout=280)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    messages = dict(part.split("\n", 1) for part in done.stderr.split("BEGIN ")[1:])
    assert len(lines) == len(names) == len(messages), done.stderr
    return Job(dict(lines), messages)


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield numbers and texts with their paths."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if items is None:
        yield name, value
    else:
        for key, item in items:
            yield from leaves(item, f"{name}/{key}")


def cases(names: dict[str, str]) -> list[Any]:
    """Return cases with numbers of ranks; mark those that do not run by default."""
    return [
        pytest.param(name, ranks, marks=() if ranks == 2 and name in QUICK else pytest.mark.slow)
        for name in names
        for ranks in (2, 3)
    ]


def both(name: str, ranks: int) -> tuple[Job, Job]:
    """Return the jobs of plain Python and of the ranks that have a case."""
    group = next(group for group in GROUPS if name in group)
    return job(0, group), job(ranks, group)


@pytest.mark.parametrize(("name", "ranks"), cases(EQUAL))
def test_numbers_are_those_of_one_process(name: str, ranks: int) -> None:
    plain, found = both(name, ranks)
    numbers, expected = (dict(leaves(done.numbers[name])) for done in (found, plain))
    assert not isinstance(plain.numbers[name], str), plain.numbers[name]
    assert list(numbers) == list(expected), found.messages[name]
    for path, value in expected.items():
        where = f"{path}\n{found.messages[name]}"
        np.testing.assert_allclose(numbers[path], value, rtol=1e-6, atol=5e-7, err_msg=where)
    assert re.search(EQUAL[name], found.messages[name]), found.messages[name]
    assert not re.search(DOUBT, found.messages[name]) or name.startswith(("switched", "growing", "masked", "every"))


@pytest.mark.parametrize(("name", "ranks"), cases(LOUD))
def test_what_may_differ_is_reported(name: str, ranks: int) -> None:
    plain, found = both(name, ranks)
    assert not isinstance(plain.numbers[name], str), plain.numbers[name]
    if LOUD[name] == REFUSED:
        assert found.numbers[name].startswith(REFUSED)
        assert "whole batches" not in found.messages[name]
        return
    assert re.search(LOUD[name], found.messages[name]), found.messages[name]


@pytest.mark.slow  # 1,000 steps; a time, so that other work on the machine may disturb it
def test_checks_take_less_the_longer_a_model_trains() -> None:
    done = run_script(2, LAUNCHER, str(SCRIPT.with_name("overhead.py")), timeout=120)
    assert done.returncode == 0, done.stderr
    assert CHECKED in done.stderr
    later, early, *_ = map(float, re.findall("^OVERHEAD (.*)", done.stdout, re.MULTILINE)[0].split())
    assert later < 2  # percent of the time of steps 501 to 1,000
    assert early < 20  # of steps 2 to 500


BATCHES_THAT_PART = """
import random
import keras, numpy as np, tensorflow as tf

keras.utils.set_random_seed(0)
own = random.SystemRandom()

def batches():
    for i in range(40):
        x = np.full((12, 4), i, "float32") + (own.random() if i > 6 else 0)
        yield x.astype("float32"), x[:, :1].astype("float32")

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(1e-5), "mse")
spec = (tf.TensorSpec((None, 4)), tf.TensorSpec((None, 1)))
model.fit(tf.data.Dataset.from_generator(batches, output_signature=spec), verbose=0)
"""


DRAWN_IN_PARALLEL = """
import os
import keras, tensorflow as tf

keras.utils.set_random_seed(0)
own = float(os.getpid() % 1000)  # of this rank, as is the order in which threads draw

def noisy(x):
    x = x + own + 0 * tf.random.uniform(())
    return x, x[:1]

ASKS
data = tf.data.Dataset.from_tensor_slices(tf.zeros((50, 4))).map(noisy, num_parallel_calls=2).batch(12)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
given = keras.metrics.MeanMetricWrapper(lambda y, p: y, name="given")
model.compile(keras.optimizers.SGD(1e-9), "mse", metrics=[given])
print("GIVEN", own, model.fit(data, epochs=3, verbose=0).history["given"])
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_random_numbers_that_threads_draw_are_those_of_rank_0(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(DRAWN_IN_PARALLEL.replace("ASKS", ""))
    done = run_script(ranks, LAUNCHER, str(script), timeout=120)
    assert done.returncode == 0, done.stderr
    own, *given = map(float, re.findall(r"[\d.]+", done.stdout.partition("GIVEN")[2]))
    assert given == pytest.approx([own] * 3)
    assert done.stderr.count("trains on its rows of rank 0's batches") == 1
    assert "batches of step 1 of fit() differ" in done.stderr and "whole batches" not in done.stderr


def test_a_script_that_asks_for_its_rank_may_have_read_other_data(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(DRAWN_IN_PARALLEL.replace("ASKS", "from mpi4py import MPI; MPI.COMM_WORLD.Get_rank()"))
    done = run_script(2, LAUNCHER, str(script), timeout=120)
    assert done.returncode != 0
    assert "the ranks give fit() different data" in done.stderr


def test_batches_that_differ_later_are_an_error(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BATCHES_THAT_PART)
    done = run_script(2, LAUNCHER, str(script), timeout=120)
    assert done.returncode != 0
    assert re.search(r"the ranks give step (8|9|1\d) of fit\(\) different data", done.stderr), done.stderr


IN_ORDER_OF_THREADS = """
import time
import keras, numpy as np, tensorflow as tf

def late(i):
    waited = tf.py_function(lambda: time.sleep(0.002 * np.random.default_rng().integers(3)) or 0, [], tf.int64)
    return i + tf.reshape(waited, ())

options = tf.data.Options()
options.deterministic = False
source = tf.data.Dataset.range(4).interleave(
    lambda i: tf.data.Dataset.range(6 * i, 6 * i + 6).map(late, num_parallel_calls=2, deterministic=False),
    cycle_length=4, num_parallel_calls=4, deterministic=False,
).with_options(options)
data = source.map(lambda i: (tf.ones(1), tf.cast([i], "float32"))).batch(8, num_parallel_calls=2, deterministic=False)
model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
given = keras.metrics.MeanMetricWrapper(lambda y, p: y**2, name="given")
model.compile(keras.optimizers.SGD(1e-9), "mse", metrics=[given])
print("GIVEN", model.fit(data, verbose=0, validation_data=data).history)
from mpi4py import MPI
orders = MPI.COMM_WORLD.allgather([int(i) for i in source])
print("ORDERS", len({tuple(order) for order in orders}))
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_pipelines_give_their_elements_in_order(tmp_path: Path, ranks: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_ORDER_OF_THREADS)
    done = run_script(ranks, LAUNCHER, str(script), timeout=120)
    assert done.returncode == 0, done.stderr
    given = re.findall(r"given': \[(.*?)\]", done.stdout)
    assert [float(x) for x in given] == pytest.approx([np.mean(np.arange(24.0) ** 2)] * 2, rel=1e-5)
    assert "ORDERS 1" in done.stdout
