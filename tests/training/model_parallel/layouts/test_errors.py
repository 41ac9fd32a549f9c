"""Layouts that do not fit a model raise the same error on all ranks, before the first step."""

from __future__ import annotations

import contextlib

import keras
import numpy as np
import pytest

from matex_data.errors import PartitionError
from tests.support.ranks import Pool, Pools


class _OwnStep(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    def train_step(self, data):
        return super().train_step(data)


def _fit(comm, layouts, constraint=None, optimizer="sgd", own_step=False, different=False, deferred=False):
    import tensorflow as tf

    from matex_data import training

    mesh = training.Mesh(model=2, comm=comm)
    made = mesh.layout_map()
    for key, axes in layouts.items():
        made[key] = axes
    kind = _OwnStep if own_step else keras.Sequential
    with training.deferred(made) if deferred else contextlib.nullcontext():
        layers = [keras.Input((4,)), keras.layers.Dense(6, kernel_constraint=constraint, name="up")]
        model = kind([*layers, keras.layers.Dense(3, name="down")], name="net")
    model.compile(optimizer, "mse", jit_compile=False)
    x = np.ones((4, 4), np.float32) * (comm.rank if different else 1)
    data = tf.data.Dataset.from_tensors((x, np.ones((4, 3), np.float32)))
    training.fit(model, data, mesh=mesh, verbose=0)


UP = {"net/up/kernel": (None, "model")}


@pytest.mark.rank_counts(2)
@pytest.mark.parametrize(
    ("layouts", "options", "text"),
    [
        ({}, {}, "no layout cuts a variable"),
        ({"net/down/kernel": (None, "model")}, {}, "number of parts does not divide"),
        ({"net/down/kernel": (None, "model")}, {"deferred": True}, "number of parts does not divide"),
        ({"net/u./kernel": (None, "model"), "net/.p/kernel": ("model", None)}, {}, "several layouts fit"),
        ({"net/pu/kernel": (None, "model")}, {}, "fits no variable(.|\n)*net/up/kernel"),
        ({"net/up/kernel": ("model",)}, {}, "does not fit its variable"),
        ({"net/up/kernel": ("data", None)}, {}, "does not fit its variable"),
        (UP, {"constraint": "max_norm"}, None),
        ({"net/up/kernel": ("model", None)}, {"constraint": "max_norm"}, "constraint of a variable"),
        (UP, {"optimizer": "adafactor"}, "this optimizer may update"),
        (UP, {"own_step": True}, "a step of its own"),
        (UP, {"different": True}, "the ranks of one replica have different rows"),
    ],
)
def test_errors(pool: Pool, layouts: dict, options: dict, text: str | None) -> None:
    outcomes = pool.outcomes(_fit, layouts, timeout=60, **options)
    if text is None:
        assert outcomes == [None, None]
        return
    assert [type(outcome) for outcome in outcomes] == [PartitionError] * 2
    assert str(outcomes[0]) == str(outcomes[1])
    with pytest.raises(PartitionError, match=text):
        raise outcomes[0]


def _interrupted(comm, axis):
    """Return the shapes of the weights, and how far those of the ranks differ, after a callback has ended ``fit``."""
    import tensorflow as tf

    from matex_data import training

    mesh = training.Mesh(**{axis: 2}, comm=comm)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="up"), keras.layers.Dense(3, name="down")])
    model.compile("adam", "mse", jit_compile=False)
    rows = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((rows, rows[:, :3])).batch(2)

    def stop(batch, logs):
        if batch == 2:
            raise KeyboardInterrupt

    before = [w.copy() for w in model.get_weights()]
    with contextlib.suppress(KeyboardInterrupt):
        callback = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
        training.fit(model, data, mesh=mesh, callbacks=[callback], verbose=0)
    weights = model.get_weights()
    changed = all(np.any(a != b) for a, b in zip(before, weights, strict=True)) if axis == "stages" else True
    return [w.shape for w in weights], changed, [w.tolist() for w in weights]


@pytest.mark.parametrize("axis", ["model", "stages"])
def test_weights_are_whole_after_an_interrupt(ranks: Pools, axis: str) -> None:
    one, other = ranks(2).run(_interrupted, axis, timeout=60)
    assert one == other
    assert one[:2] == ([(4, 6), (6,), (6, 3), (3,)], True)


def _refused(comm):
    """Return for each combination of options the error that this rank raises."""
    import tensorflow as tf

    from matex_data import training

    parts, replicas = training.Mesh(model=2, comm=comm), training.Mesh(comm=comm)
    for mesh in (parts, replicas):
        mesh.layout_map()["net/up/kernel"] = (None, "model")
    data = tf.data.Dataset.from_tensors((np.ones((4, 4), np.float32), np.ones((4, 3), np.float32)))
    options = {"shard_optimizer": True, "mesh": replicas}
    cases = [
        ({"comm": comm, "mesh": parts}, {}),
        ({"micro_batches": 2, "mesh": parts}, {}),
        ({**options, "callbacks": [keras.callbacks.SwapEMAWeights()]}, {}),
        (options, {"constraint": "max_norm"}),
        (options, {"optimizer": "adafactor"}),
    ]
    found = []
    for given, made in cases:
        keras.utils.set_random_seed(1)  # equal weights on both ranks, which a broadcast does not change
        layers = [keras.Input((4,)), keras.layers.Dense(6, kernel_constraint=made.get("constraint"), name="up")]
        model = keras.Sequential([*layers, keras.layers.Dense(3, name="down")], name="net")
        model.compile(made.get("optimizer", "sgd"), "mse", jit_compile=False)
        before = [v.numpy() for v in model.weights]
        try:
            training.fit(model, data, verbose=0, **given)
        except (PartitionError, ValueError) as error:
            found.append(str(error))
        assert all((v.numpy() == value).all() for v, value in zip(model.weights, before, strict=True))
    return found


def _on_another_mesh(comm):
    import tensorflow as tf

    from matex_data import training

    mesh = training.Mesh(model=2, comm=comm)
    layouts = mesh.layout_map()
    layouts["net/up/kernel"] = (None, "model")
    with training.deferred(layouts):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="up")], name="net")
    model.compile("sgd", "mse", jit_compile=False)
    data = tf.data.Dataset.from_tensors((np.ones((4, 4), np.float32), np.ones((4, 6), np.float32)))
    training.fit(model, data, mesh=mesh, verbose=0)
    training.fit(model, data, mesh=training.Mesh(model=2, comm=comm), verbose=0)


def _loop_after_fit(comm):
    import tensorflow as tf

    from matex_data import training

    mesh = training.Mesh(model=2, comm=comm)
    layouts = mesh.layout_map()
    layouts["net/up/kernel"] = (None, "model")
    with training.deferred(layouts):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, name="up")], name="net")
    model.compile("sgd", "mse", jit_compile=False)
    x = np.ones((4, 4), np.float32)
    training.fit(model, tf.data.Dataset.from_tensors((x, np.ones((4, 6), np.float32))), mesh=mesh, verbose=0)
    optimizer = training.distribute(keras.optimizers.SGD(), comm)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x))
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)


def test_a_loop_does_not_average_parts(ranks: Pools) -> None:
    outcomes = ranks(2).outcomes(_loop_after_fit)
    assert [type(outcome) for outcome in outcomes] == [PartitionError] * 2
    assert str(outcomes[0]).startswith("the ranks that average gradients hold different parts of a variable")


def test_options_that_do_not_combine(ranks: Pools) -> None:
    expected = [
        "give comm or mesh, not both",
        "micro_batches is an option of training in stages",
        "SwapEMAWeights needs whole moving averages",
        "a constraint of a variable may depend on elements that another rank has",
        "this optimizer may update an element of a weight depending on others",
    ]
    for texts in ranks(2).run(_refused):
        assert [text.startswith(start) for text, start in zip(texts, expected, strict=True)] == [True] * 5, texts
    outcomes = ranks(2).outcomes(_on_another_mesh)
    assert [type(outcome) for outcome in outcomes] == [PartitionError] * 2
    assert str(outcomes[0]).startswith("this model is in parts on another mesh")
