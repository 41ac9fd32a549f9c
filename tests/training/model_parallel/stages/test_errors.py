"""What cannot be trained in stages is one error on all ranks before the first step; failures end all ranks."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from matex_data.errors import DataError, DecodeError, PartitionError
from matex_data.training.average.optimizer import distribute
from matex_data.training.model_parallel.mesh import Mesh
from matex_data.training.model_parallel.stages.messages import Line
from matex_data.training.replacements import replaced
from matex_data.training.trainer import fit
from tests.support.launch import run_script
from tests.support.logs import logged
from tests.support.ranks import Pools
from tests.training.model_parallel.stages.problems import build, dataset, weights_of


class _OwnStep(keras.Model):  # type: ignore[misc]  # Keras has no types
    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class _OwnCall(keras.Model):  # type: ignore[misc]  # Keras has no types
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)


def _compiled(model: Any) -> Any:
    model.compile("sgd", "mse")
    return model


def _own_step() -> Any:
    x = keras.Input((6,))
    return _compiled(_OwnStep(x, keras.layers.Dense(1)(keras.layers.Dense(6)(x))))


def _shared_state(layer: Any) -> Any:
    x = keras.Input((6,))
    y = keras.layers.Dense(6, name="middle")(layer(x))
    return _compiled(keras.Model(x, keras.layers.Dense(1, name="head")(layer(y))))


def _masked() -> Any:
    x = keras.Input((5,), dtype="int32")
    y = keras.layers.Embedding(10, 6, mask_zero=True)(x)
    return _compiled(keras.Model(x, keras.layers.Dense(1)(keras.layers.Dense(6)(y))))


def _stateful() -> Any:
    x = keras.Input(batch_shape=(4, 6))
    y = keras.layers.LSTM(4, stateful=True, name="memory")(keras.layers.Reshape((6, 1))(x))
    return _compiled(keras.Model(x, keras.layers.Dense(1)(y)))


def _trained() -> Any:
    model = build("chain")
    model.optimizer.build(model.trainable_variables)
    return model


def _averaging() -> Any:
    model = build("chain")
    distribute(model.optimizer)
    return model


def _batch_metric() -> Any:
    model = build("chain")
    model.compile("sgd", "mse", metrics=[lambda y, p: keras.ops.max(keras.ops.abs(y - p))])
    return model


class _Counting(keras.layers.Dense):  # type: ignore[misc]  # Keras has no types
    def __init__(self) -> None:
        super().__init__(6)
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x: Any) -> Any:
        self.seen.update_state(x)
        return super().call(x)


def _layer_metric() -> Any:
    return _compiled(keras.Sequential([keras.Input((6,)), _Counting(), keras.layers.Dense(1)]))


def _batch_loss(function: Callable[..., Any]) -> Any:
    model = build("several" if function is _root else "chain")
    model.compile("sgd", function)
    return model


def _root(y: Any, p: Any) -> Any:
    return keras.ops.sqrt(keras.ops.mean(keras.ops.square(y - p)))


def _mean(y: Any, p: Any) -> Any:
    return keras.ops.mean(keras.ops.square(y - p))


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "own step": (_own_step, {}, "it has a train_step of its own"),
    "own call": (lambda: _compiled(_OwnCall()), {}, "expected: a functional model"),
    "shared normalization": (
        lambda: _shared_state(keras.layers.BatchNormalization(name="shared")),
        {"split_after": ["middle"]},
        "the layer shared is called in several stages",
    ),
    "shared dropout": (
        lambda: _shared_state(keras.layers.Dropout(0.5, name="shared")),
        {"split_after": ["middle"]},
        "the layer shared is called in several stages",
    ),
    "global normalization": (lambda: build("normalized"), {"sync_batch_norm": True}, "found: sync_batch_norm=True"),
    "state of rows": (_stateful, {}, "the layer memory keeps a state of each row"),
    "unknown name": (lambda: build("chain"), {"split_after": ["dense7"]}, "the model has no \\['dense7'\\]"),
    "no micro-batch": (lambda: build("chain"), {"micro_batches": 0}, "expected: micro_batches >= 1"),
    "some micro-batches": (lambda: build("chain"), {"micro_batches": "many"}, "found: 'many'"),
    "mask": (_masked, {}, "the divisor of this loss"),
    "trained before": (_trained, {}, "the optimizer has state for other weights"),
    "average": (_averaging, {}, "found: an optimizer from training.distribute"),
    "backup": (
        lambda: build("chain"),
        {"callbacks": [keras.callbacks.BackupAndRestore("backup")]},
        "expected: fit\\(checkpoint=folder\\)",
    ),
    "metric of batches": (_batch_metric, {}, "depends on whole batches"),
    "metric of a layer": (_layer_metric, {}, "a layer has a metric that the last stage"),
    "loss of batches": (lambda: _batch_loss(_root), {}, "one half has"),
    "weighted loss of batches": (lambda: _batch_loss(_mean), {}, "found: sample weights"),
    "too many stages": (
        lambda: _compiled(keras.Sequential([keras.Input((6,)), keras.layers.Dense(1)])),
        {},
        "fewer layers",
    ),
}


def _fails(comm: Any, case: str) -> tuple[str, bool]:
    """Return the error of a case on this rank, and whether no weight has changed."""
    make, options, _ = CASES[case]
    keras.utils.set_random_seed(4)
    model = make()
    before = weights_of(model)
    data = dataset({"mask": "text", "loss of batches": "several"}.get(case, "chain"))
    if case == "mask":
        data = data.map(lambda x, y, w: (x, tf.repeat(y[:, None], 5, 1)))
    with pytest.raises(PartitionError) as caught:
        fit(model, data, verbose=0, mesh=Mesh(stages=2, comm=comm), **{"micro_batches": 3, **options})
    after = weights_of(model)
    return str(caught.value), all(np.array_equal(a, b) for a, b in zip(before, after, strict=False))


def _fails_alike(comm: Any) -> dict[str, tuple[str, bool]]:
    return {case: _fails(comm, case) for case in CASES}


@pytest.mark.openmpi
def test_errors_before_the_first_step_are_the_same_on_all_ranks(ranks: Pools) -> None:
    one, other = ranks(2).run(_fails_alike, timeout=120)
    assert one == other
    for case, (_, _, message) in CASES.items():
        text, unchanged = one[case]
        assert re.search(message, text), f"{case}: {text}"
        assert unchanged, case


@keras.saving.register_keras_serializable()
class _Failing(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Layer that raises an error in a step, on the rank that has it."""

    def call(self, x: Any) -> Any:
        counter = itertools.count()

        def fail(value: Any) -> Any:
            if next(counter) == 4:
                raise ValueError("planted failure of a layer")
            return value

        return tf.ensure_shape(tf.numpy_function(fail, [x], x.dtype), x.shape)


def _run(comm: Any, fault: str) -> str:
    """Return the error of a run with a fault in stage 1, on this rank; afterwards train without it."""
    mesh = Mesh(stages=2, comm=comm)
    keras.utils.set_random_seed(4)
    layers = [keras.layers.Dense(6, name="first"), keras.layers.Dense(6, name="second")]
    layers += [_Failing(name="failing")] if fault == "layer" else []
    model = _compiled(keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)]))
    data = dataset("chain")
    if fault == "data" and comm.rank == 1:
        data = data.map(lambda x, y, w: (x + 1.0, y, w))
    if fault == "chunk" and comm.rank == 1:
        batches = list(data)

        def damaged() -> Iterator[Any]:
            yield batches[0]
            without_location = DecodeError("a chunk is damaged", found="checksum 1")
            raise without_location.at("x.h5", "x") from without_location

        data = tf.data.Dataset.from_generator(damaged, output_signature=data.element_spec)
        data = data.apply(tf.data.experimental.assert_cardinality(len(batches)))
    if fault == "short" and comm.rank == 1:
        data = tf.data.Dataset.from_generator(lambda: dataset("chain").take(2), output_signature=data.element_spec)
    error, options = "none", {"steps_per_epoch": 3} if fault == "short" else {}
    try:
        fit(model, data, verbose=0, mesh=mesh, micro_batches=3, split_after=["first"], epochs=2, **options)
    except Exception as caught:  # of whatever class
        error = f"{type(caught).__name__}: {caught}"
    fit(build("chain"), dataset("chain"), verbose=0, mesh=mesh, micro_batches=2)
    return error


@pytest.mark.openmpi
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("layer", "planted failure of a layer"),
        pytest.param("data", "the stages have read different batches", marks=pytest.mark.slow),
        ("chunk", "DecodeError: a chunk is damaged (file 'x.h5', field 'x')\n  found: checksum 1"),
        ("short", "some ranks have a further batch"),
    ],
)
def test_a_failure_of_one_stage_is_the_error_of_all(ranks: Pools, fault: str, message: str) -> None:
    one, other = ranks(2).run(_run, fault, timeout=60)
    assert message in one
    assert message.removeprefix("DecodeError: ") in other
    assert issubclass(PartitionError, DataError)


def _said_of_slices(comm: Any) -> list[bool]:
    """Return whether rank 0 says that stages add up sparse gradients, by optimizers."""
    found = []
    for name, optimizer in (("text", "sgd"), ("text", "adam"), ("text", "clipped"), ("chain", "adam")):
        with logged() as said:
            fit(build(name, optimizer), dataset(name), verbose=0, mesh=Mesh(stages=2, comm=comm), micro_batches=1)
        found.append(any("same index" in line for line in said))
    return found


def test_sums_of_sparse_gradients_are_said_where_they_matter(ranks: Pools) -> None:
    assert ranks(2).run(_said_of_slices, timeout=120) == [[False, True, True, False], [False] * 4]


def _after_an_interrupt(comm: Any) -> list[Any]:
    """Return the weights of a run after one that was interrupted with messages under way, and of another one."""
    calls, original = itertools.count(1), Line.receive

    def receive(line: Any, way: int) -> Any:
        if next(calls) == (1 if comm.rank == 0 else 4):  # which two errors of stage 1 are for
            raise KeyboardInterrupt
        return original(line, way)

    def trained() -> Any:
        model = build("chain")
        fit(model, dataset("chain"), verbose=0, mesh=Mesh(stages=2, comm=comm), micro_batches=4)
        return weights_of(model)

    with replaced(Line, receive=receive), contextlib.suppress(KeyboardInterrupt):
        trained()
    assert next(calls) <= 5
    comm.Barrier()
    return [trained(), trained()]


def test_messages_of_an_interrupted_step_are_not_those_of_the_next_run(ranks: Pools) -> None:
    for after, expected in ranks(2).run(_after_an_interrupt, timeout=60):
        for one, other in zip(after, expected, strict=True):
            np.testing.assert_array_equal(one, other)


SCRIPT = """
import os, sys, time, keras, tensorflow as tf, matex_data as md
from tests.training.model_parallel.stages.problems import build, dataset
mesh = md.training.Mesh(stages=2)
def rows():
    for i, batch in enumerate(dataset("chain")):
        if i == 1 and mesh.world.rank == 1:
            {fault}
        yield batch
def end(epoch, logs):
    if epoch and mesh.world.rank == 1:
        {in_callback}
data = tf.data.Dataset.from_generator(rows, output_signature=dataset("chain").element_spec)
data = data.apply(tf.data.experimental.assert_cardinality(3))
callback = keras.callbacks.LambdaCallback(on_epoch_begin=end)
md.training.fit(build("chain"), data, verbose=0, mesh=mesh, epochs=3, micro_batches=2, callbacks=[callback])
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("in_callback", "in_data", "message"),
    [
        ("raise ValueError('planted')", "pass", "ValueError: planted"),
        ("sys.exit(3)", "pass", ""),
        ("os._exit(3)", "pass", ""),
        ("pass", "time.sleep(600)", "another rank does not take part"),
        ("pass", "os._exit(3)", ""),
    ],
)
def test_a_job_ends_when_a_stage_does_not_go_on(in_callback: str, in_data: str, message: str) -> None:
    script = SCRIPT.format(in_callback=in_callback, fault=in_data)
    done = run_script(2, script, timeout=60, env={"MATEX_TIMEOUT": "6"})
    assert done.returncode != 0
    assert message in done.stderr
    assert "done" not in done.stdout
