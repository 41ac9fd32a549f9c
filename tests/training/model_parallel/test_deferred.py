"""Models that are built without allocating them whole."""

from __future__ import annotations

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from matex_data.errors import PartitionError
from tests.support.ranks import Pools


def _model():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(6, "relu", name="up")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, keras.layers.Dense(2, name="down")(keras.layers.Dropout(0.5)(x)))


def _values(comm, parts):
    from matex_data import training
    from matex_data.training.partition.parts import whole_on_all

    keras.backend.clear_session()
    random.seed(7 + comm.rank)  # all ranks draw the seeds of rank 0
    layouts = training.Mesh(model=parts, comm=comm).layout_map()
    if parts > 1:
        layouts["up/kernel"] = (None, "model")
    with training.deferred(layouts):
        model = _model()
    parts = [tuple(v.value.shape) for v in model.variables]
    return parts, [whole_on_all(v) for v in model.variables]


def test_initial_values_are_those_of_one_process(ranks: Pools) -> None:
    keras.backend.clear_session()
    random.seed(7)
    expected = [v.numpy() for v in _model().variables]
    for parts, values in [*ranks(1).run(_values, 1), *ranks(2).run(_values, 2)]:
        assert parts[0] in ((4, 6), (4, 3)) and parts[1] == (6,)
        for value, whole in zip(values, expected, strict=True):
            np.testing.assert_array_equal(value, whole)


def _absent(comm):
    from matex_data import training

    with training.deferred():
        model = _model()
    with pytest.raises(PartitionError, match=r"no values of a variable \(field 'up/kernel'\)"):
        model.layers[1].kernel.numpy()
    with pytest.raises(PartitionError, match=r"training\.save"):
        model.get_weights()
    assert model.count_params() == 4 * 6 + 6 + 4 * 6 + 6 * 2 + 2  # shapes are known
    layer = keras.layers.Dense(3)  # later layers are not deferred
    layer.build((None, 2))
    assert layer.kernel.numpy().shape == (2, 3)


def _predicted_in_parts(comm):
    from matex_data import training

    layouts = training.Mesh(model=2, comm=comm).layout_map()
    layouts["up/kernel"] = (None, "model")
    with training.deferred(layouts):
        model = _model()
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((np.ones((8, 4), "float32"), np.ones((8, 2), "float32"))).batch(4)
    for use in (training.predict, training.evaluate):
        with pytest.raises(PartitionError, match="train it first"):
            use(model, training.shard(data, comm=comm), comm=comm)


def test_predicting_with_parts_before_training_raises(ranks: Pools) -> None:
    ranks(2).run(_predicted_in_parts)


def test_reading_before_training_raises(ranks: Pools) -> None:
    ranks(1).run(_absent)


def _assigned(comm):
    from matex_data import training

    layouts = training.Mesh(comm=comm).layout_map()
    with training.deferred(layouts):
        embedding = keras.layers.Embedding(3, 2, weights=np.arange(6.0).reshape(3, 2))
    return embedding.embeddings.numpy()


def test_values_that_are_assigned_within_stay(ranks: Pools) -> None:
    (value,) = ranks(1).run(_assigned)
    np.testing.assert_array_equal(value, np.arange(6).reshape(3, 2))


def _compiled_within(comm):
    from matex_data import training

    with training.deferred():
        model = _model()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=[keras.metrics.AUC()])
    data = tf.data.Dataset.from_tensors((np.ones((8, 4), "float32"), np.eye(2)[[0, 1] * 4]))
    data = data.apply(tf.data.experimental.assert_cardinality(1))
    return training.fit(model, data, comm=comm, verbose=0).history


def test_metrics_and_optimizers_made_within_have_their_values(ranks: Pools) -> None:
    (logs,) = ranks(1).run(_compiled_within)
    assert logs.keys() == {"loss", "auc"}
