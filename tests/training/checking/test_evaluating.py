"""Evaluations and predictions that combine rows although training does not: whole, or an error on all ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from matex_data.errors import PartitionError
from tests.support import problems
from tests.support.launch import run_script
from tests.support.ranks import Pool, Pools

BATCH = 12
LAUNCHER = "from matex_data.training.launcher.run import main; main()"


def _model(kind: str) -> Any:
    import keras
    import tensorflow as tf
    from keras import ops

    class OwnLoss(keras.Sequential):  # type: ignore[misc]
        def compute_loss(
            self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, training: bool = True
        ) -> Any:
            loss = ops.mean(ops.square(ops.one_hot(y, 3) - y_pred))
            return loss if training else loss + ops.var(y_pred)

    class OwnTest(keras.Sequential):  # type: ignore[misc]
        def test_step(self, data: Any) -> Any:
            predicted = self(data[0], training=False)
            return {"rows": tf.shape(predicted)[0], "spread": ops.var(predicted), "mean": ops.mean(predicted)}

    class OwnCounts(keras.Sequential):  # type: ignore[misc]
        def test_step(self, data: Any) -> Any:
            predicted = self(data[0], training=False)
            return {"rows": tf.shape(predicted)[0], "largest": ops.max(predicted), "mean": ops.mean(predicted)}

    class Centered(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any, training: bool | None = None) -> Any:
            return x if training else x - ops.mean(x, 0)

    class Normalized(keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.BatchNormalization()

        def build(self, shape: Any) -> None:
            self.inner.build(shape)

        def call(self, x: Any) -> Any:
            return self.inner(x, training=True)

    class Noisy(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x + 0 * keras.random.normal(ops.shape(x))

    keras.utils.set_random_seed(1)
    extra = {"layer": [Centered()], "normalized": [Normalized()], "noisy": [Noisy()]}.get(kind, [])
    cls = {"loss": OwnLoss, "step": OwnTest, "counts": OwnCounts}.get(kind, keras.Sequential)
    model = cls([keras.Input((problems.FEATURES,)), keras.layers.Dense(7, "tanh"), *extra, keras.layers.Dense(3)])
    loss = {} if kind == "loss" else {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}
    model.compile(keras.optimizers.SGD(0.1), metrics=["accuracy"] if kind == "layer" else None, **loss)
    return model


def _run(comm: Any, kind: str, distributed: bool) -> Any:
    """Evaluate, train with validation, and evaluate again."""
    from matex_data import training

    model, arrays = _model(kind), problems.table(40)
    if not distributed:
        data = problems.shard(arrays, BATCH, 0, 1)
        first = model.evaluate(data, verbose=0, return_dict=True)
        history = model.fit(data, validation_data=data, epochs=2, verbose=0).history
        return [first, history, model.evaluate(data, verbose=0, return_dict=True)], problems.weights(model)
    data = problems.shard(arrays, BATCH, comm.rank, comm.size)
    first = training.evaluate(model, data, comm=comm, verbose=0, return_dict=True)
    options = {"verify": "never"} if kind == "never" else {}
    history = training.fit(model, data, validation_data=data, epochs=2, comm=comm, verbose=0, **options).history
    second = training.evaluate(model, data, comm=comm, verbose=0, return_dict=True)
    return [first, history, second], problems.weights(model)


@pytest.mark.rank_counts(3, slow=(1, 2))
@pytest.mark.parametrize("kind", ["loss", "layer", "step", "counts", "plain"])
def test_every_evaluation_is_that_of_one_process(ranks: Pools, pool: Pool, kind: str) -> None:
    (expected, weights), *_ = ranks(1).run(_run, kind, False)
    results = pool.run(_run, kind, True, timeout=120)
    problems.assert_same_weights([found for _, found in results], weights)
    for found, _ in results:
        for one, other in zip(found, expected, strict=True):
            for key, value in other.items():
                np.testing.assert_allclose(one[key], value, rtol=1e-4, atol=1e-6, err_msg=key)


def _predict(comm: Any, kind: str, distributed: bool, **options: Any) -> Any:
    from matex_data import training

    model, arrays = _model(kind), problems.table(40)
    before = problems.weights(model)
    if not distributed:
        return model.predict(problems.shard(arrays, BATCH, 0, 1), verbose=0)
    data = problems.shard(arrays, BATCH, comm.rank, comm.size)
    predicted = training.predict(model, data, gather=True, comm=comm, verbose=0, **options)
    problems.assert_same_weights([problems.weights(model)], before)
    return predicted


@pytest.mark.rank_counts(3, slow=(1, 2))
@pytest.mark.parametrize("kind", ["loss", "noisy", "plain"])
def test_rows_that_are_predicted_by_themselves(ranks: Pools, pool: Pool, kind: str) -> None:
    (expected, *_) = ranks(1).run(_predict, kind, False)
    for found in pool.run(_predict, kind, True, timeout=120):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.rank_counts(3, slow=(2,))
@pytest.mark.parametrize("kind", ["layer", "normalized"])
def test_predictions_that_need_other_rows_are_an_error(pool: Pool, kind: str) -> None:
    outcomes = pool.outcomes(_predict, kind, True, timeout=120)
    assert all(isinstance(error, PartitionError) for error in outcomes)
    assert "other rows" in str(outcomes[0])
    if kind == "layer":
        pool.run(_predict, kind, True, verify="never")


def _observed(comm: Any, eager: bool) -> Any:
    """Predict with a model whose Python code notes the batches; return what it noted, and what was said."""
    import keras
    import tensorflow as tf

    from matex_data import training
    from matex_data.training.checking import rows

    seen: list[int] = []

    class Observing(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            if eager:
                seen.append(len(x))
                return x
            found = tf.numpy_function(lambda array: (seen.append(len(array)), array)[1], [x], tf.float32)
            return tf.ensure_shape(found, x.shape)

        def compute_output_shape(self, shape: Any) -> Any:
            return shape

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((problems.FEATURES,)), keras.layers.Dense(3), Observing()])
    model.compile("sgd", "mse", run_eagerly=eager)
    seen.clear()
    said: list[str] = []
    data = problems.shard(problems.table(40), BATCH, comm.rank, comm.size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows.log, "warning", lambda text, *args: said.append(text % args))
        training.predict(model, data, comm=comm, verbose=0)
    return seen, [len(y) for _, y in data], said


@pytest.mark.rank_counts(2, slow=(1, 3))
@pytest.mark.parametrize("eager", [False, True])
def test_a_check_of_predictions_does_not_run_python_code_again(pool: Pool, eager: bool) -> None:
    for rank, (seen, batches, said) in enumerate(pool.run(_observed, eager, timeout=120)):
        assert seen == batches
        assert bool(said) == (rank == 0 and pool.size > 1)
        assert not said or "are not checked: its Python code" in said[0] or "are not checked: it calls" in said[0]


BEGIN = """
import keras, numpy as np, tensorflow as tf
from keras import ops

keras.utils.set_random_seed(1)
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
y, options = x[:, :1], {"batch_size": 12, "shuffle": False, "epochs": 2, "verbose": 0}
"""

COMBINED = """
class Centered(keras.layers.Layer):
    def call(self, x, training=None):
        return x if training else x - ops.mean(x, 0)

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), Centered(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
history = model.fit(x, y, validation_data=(x, y), **options).history
evaluated = model.evaluate(x, y, batch_size=48, verbose=0)
print("NUMBERS", *history["val_loss"], evaluated, np.abs(model.predict(x, batch_size=48, verbose=0)).sum())
"""

TEXTS = """
word = keras.Input((1,), dtype="string")  # texts of a model that is checked, since it may count over the rows
lookup = keras.layers.StringLookup(vocabulary=list("abcd"), output_mode="multi_hot")
texts = keras.Model(word, keras.layers.Dense(1)(lookup(word)), name="texts")
texts.compile("sgd", "mse")
words = np.array(list("abcd"))[np.arange(96) % 4][:, None]
data = tf.data.Dataset.from_tensor_slices((words, y)).batch(24)
texts.fit(data, verbose=0)
print("NUMBERS", texts.evaluate(data, verbose=0))
"""

APART = """
def spread(true, predicted):
    return ops.ones_like(true) * ops.max(predicted)

plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="plain")
plain.compile("sgd", "mse", metrics=["mae"])
plain.fit(x, y, **options)
plain.save("plain.keras")
loaded = keras.models.load_model("plain.keras")
numbers = loaded.evaluate(x, y, batch_size=48, verbose=0)
pairs = tf.data.Dataset.from_tensor_slices((x, y)).batch(48)
numbers += keras.models.load_model("plain.keras").evaluate(pairs, verbose=0)

class OwnTest(keras.Model):
    def test_step(self, data):
        error = ops.mean(ops.abs(self(data[0]) - data[1]), -1)
        noise = 0 * ops.mean(keras.random.normal(ops.shape(error)))
        return {"error": ops.mean(error) + noise, "largest": ops.max(error)}

own = OwnTest(plain.inputs, plain.outputs, name="averaging")
own.compile("sgd", "mse")
numbers += own.evaluate(x, y, batch_size=48, verbose=0, return_dict=True).values()
numbers += own.fit(x, y, validation_data=(x, y), **options).history["val_error"]

measured = keras.Sequential(plain.layers, name="measured")
measured.compile("sgd", "mse", metrics=[spread])
numbers += measured.evaluate(pairs, verbose=0)
print("NUMBERS", *numbers)
"""


@pytest.mark.parametrize(
    "models",
    [
        pytest.param(COMBINED, id="combined"),
        pytest.param(TEXTS, id="texts", marks=pytest.mark.slow),
        pytest.param(APART, id="apart"),
    ],
)
def test_an_unchanged_script_evaluates_as_one_process(tmp_path: Path, models: str) -> None:
    def numbers(done: Any) -> list[float]:
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("NUMBERS")]
        return [float(number) for number in line.split()[1:]]

    text = f"import os; os.chdir({str(tmp_path)!r})\n{BEGIN}{models}"
    plain = run_script(0, text, timeout=60)
    script = tmp_path / "script.py"
    script.write_text(text)
    found = run_script(2, LAUNCHER, str(script), timeout=120)
    np.testing.assert_allclose(numbers(found), numbers(plain), rtol=1e-5)
    whole = [line.split()[1] for line in found.stderr.splitlines() if "cannot be evaluated on shards" in line]
    assert whole == (["sequential"] if models is COMBINED else [])
    assert ("cannot predict shards" in found.stderr) == (models is COMBINED)
    agreeing = "of averaging on shards and on whole batches agree (up to random numbers"
    assert found.stderr.count(agreeing) == (models is APART)


OBSERVING = """
import keras, numpy as np, tensorflow as tf

seen = []

def note(array):
    seen.append(float(len(array)))
    return array

class Observing(keras.layers.Layer):
    def call(self, x, training=None):
        return x if training else tf.ensure_shape(tf.numpy_function(note, [x], tf.float32), x.shape)

    def compute_output_shape(self, shape):
        return shape

keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((4,)), Observing(), keras.layers.Dense(1)])
model.compile("sgd", "mse")
x = np.random.default_rng(0).normal(size=(96, 4)).astype("float32")
model.fit(x, x[:, :1], batch_size=12, verbose=0)
seen.clear()
print("NUMBERS", np.abs(model.predict(x, batch_size=40, verbose=0)).sum(), *seen)
"""


@pytest.mark.slow
def test_python_code_in_predictions_of_an_unchanged_script_sees_whole_batches_once(tmp_path: Path) -> None:
    plain = run_script(0, OBSERVING, timeout=60)
    script = tmp_path / "script.py"
    script.write_text(OBSERVING)
    found = run_script(2, LAUNCHER, str(script), timeout=120)
    assert [float(word) for word in found.stdout.split()[1:]] == pytest.approx(
        [float(word) for word in plain.stdout.split()[1:]], rel=1e-5
    ), found.stderr
    assert "cannot predict shards of a batch: it calls Python code" in found.stderr
