"""Layouts that do not fit a model raise the same error on all ranks, before the first step."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from matex_data.errors import PartitionError
from tests.support.ranks import Pool


class _OwnStep(keras.Sequential):  # type: ignore[misc]  # Keras has no types
    def train_step(self, data):
        return super().train_step(data)


def _fit(comm, layouts, constraint=None, optimizer="sgd", own_step=False, different=False, deferred=False):
    import contextlib

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
        ({"net/down/kernel": (None, "model")}, {}, "shards do not divide"),
        ({"net/down/kernel": (None, "model")}, {"deferred": True}, "shards do not divide"),
        ({"net/u./kernel": (None, "model"), "net/.p/kernel": ("model", None)}, {}, "several layouts fit"),
        ({"net/pu/kernel": (None, "model")}, {}, "fits no variable(.|\n)*net/up/kernel"),
        ({"net/up/kernel": ("model",)}, {}, "does not fit its variable"),
        ({"net/up/kernel": ("data", None)}, {}, "does not fit its variable"),
        (UP, {"constraint": "max_norm"}, None),
        ({"net/up/kernel": ("model", None)}, {"constraint": "max_norm"}, "constraint of a variable"),
        (UP, {"optimizer": "adafactor"}, "this optimizer may update"),
        (UP, {"own_step": True}, "a step of its own"),
        (UP, {"different": True}, "the shards of a model have different rows"),
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
