"""Proofs of compiled models: losses, regularizers, state, Python attributes, and what a proof leaves behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from matex_data.training.comm.channel import open_channel
from matex_data.training.distributed_model import DistributedModel
from matex_data.training.proof.model import Proof, prove

X, Y = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 3])


def _compiled(*inner: Any, loss: Any = "mse", kind: Any = keras.Sequential, **options: Any) -> Any:
    model = kind([keras.Input((6,)), *inner, layers.Dense(3)])
    model.compile("sgd", loss, **options)
    return _built(model, X, Y)


def _built(model: Any, x: Any, y: Any) -> Any:
    model._symbolic_build(data_batch=(x, y))
    return model


def _proof(*inner: Any, loss: Any = "mse", weight: Any = None, **options: Any) -> Proof:
    return prove(_compiled(*inner, loss=loss, **options), X, Y, weight)


def _operations(proof: Proof) -> set[str]:
    return {reason.operation for reason in proof.reasons}


class _Called(layers.Layer):  # type: ignore[misc]
    """Layer that calls a function of itself and of its input."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.function = function
        self.memory = self.add_weight(shape=(6,), trainable=False, initializer="zeros", name="memory")
        self.calls = 0
        self.seen: list[int] = []

    def call(self, x: Any) -> Any:
        return self.function(self, x)


def test_a_plain_model_is_proven() -> None:
    proof = _proof(layers.Dense(6, "gelu", kernel_regularizer="l2"), layers.LayerNormalization())
    assert (proof.reasons, proof.batch_statistics, proof.draws) == ((), (), False)
    assert proof.proven


def test_draws_and_batch_statistics_are_named() -> None:
    proof = _proof(layers.BatchNormalization(name="norm"), layers.Dropout(0.5), layers.BatchNormalization(name="last"))
    assert proof.proven
    assert [scope.rpartition("/")[2] for scope in proof.batch_statistics] == ["norm", "last"]
    assert proof.draws


def test_frozen_batch_normalization_has_no_batch_statistics() -> None:
    norm = layers.BatchNormalization()
    norm.trainable = False
    assert _proof(norm).batch_statistics == ()


@pytest.mark.parametrize("loss", ["mse", keras.losses.MeanSquaredError("sum"), keras.losses.Huber(reduction="mean"),
                                  keras.losses.MeanSquaredError("mean_with_sample_weight")])  # fmt: skip
@pytest.mark.parametrize("weight", [None, tf.TensorSpec([None])], ids=["plain", "weighted"])
def test_reductions_that_ranks_weigh(loss: Any, weight: Any) -> None:
    assert _proof(loss=loss, weight=weight).proven


def _mean(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p))


def _mean_by_rows(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(y - p)) / ops.cast(ops.shape(p)[0], "float32")


def _masked(y: Any, p: Any) -> Any:
    mask = ops.cast(y > 0, "float32")
    return ops.sum(mask * ops.square(y - p)) / ops.sum(mask)


def _pairs(y: Any, p: Any) -> Any:
    return ops.mean(ops.relu(1 - (p[:, None, 0] - p[None, :, 0]) * ops.sign(y[:, None, 0] - y[None, :, 0])), -1)


def test_functions_that_return_a_mean_are_proven() -> None:
    assert _proof(loss=_mean).proven
    assert _proof(loss=_mean_by_rows).proven


def test_a_mean_with_sample_weights_is_not() -> None:
    assert not _proof(loss=_mean, weight=tf.TensorSpec([None])).proven


@pytest.mark.parametrize("loss", [
    _masked, _pairs, lambda y, p: ops.sum(ops.square(y - p)), lambda y, p: ops.sqrt(ops.mean(ops.square(y - p))),
    lambda y, p: ops.mean(ops.square(p - ops.flip(p, 0)), -1), keras.losses.MeanSquaredError(None), "dice",
    lambda y, p: ops.log(ops.mean(ops.exp(p))),
], ids=["masked", "pairs", "sum", "root", "flipped", "unreduced", "dice", "log of a mean"])  # fmt: skip
def test_losses_of_the_whole_batch_are_not_proven(loss: Any) -> None:
    assert not _proof(loss=loss).proven


def test_terms_that_layers_add() -> None:
    def adds(term: Callable[[Any], Any]) -> Proof:
        def call(layer: Any, x: Any) -> Any:
            layer.add_loss(term(x))
            return x

        return _proof(_Called(call))

    assert adds(lambda x: ops.mean(ops.square(x))).proven
    assert _proof(layers.Dense(6, activity_regularizer="l1")).proven  # divided by the number of rows
    assert _operations(adds(lambda x: ops.sum(ops.square(x)))) == {"Sum"}
    assert _operations(adds(lambda x: ops.square(ops.mean(x)))) == {"Mean"}
    assert _operations(adds(lambda x: x[:, 0])) == {"add_loss"}


def test_state_and_python_attributes() -> None:
    def averaged(layer: Any, x: Any) -> Any:
        layer.memory.assign(0.9 * layer.memory + 0.1 * ops.mean(x, 0))
        return x - layer.memory

    def counted(layer: Any, x: Any) -> Any:
        layer.calls += 1
        layer.seen.append(layer.calls)
        return x

    def drawn(layer: Any, x: Any) -> Any:
        return x * random.random() + np.random.random()

    assert "AssignVariableOp" in _operations(_proof(_Called(averaged)))
    assert _operations(_proof(_Called(counted))) == {"calls", "seen"}
    assert [reason.operation for reason in _proof(_Called(drawn)).reasons] == ["call"]


def test_a_proof_leaves_no_trace() -> None:
    def counted(layer: Any, x: Any) -> Any:
        layer.calls += 1
        layer.seen.append(layer.calls)
        layer.new = random.random()
        layer.memory.assign(x[0])
        return layer.inner(x)

    called = _Called(counted)
    called.inner = layers.Dense(6, activity_regularizer="l2")
    model = _compiled(called, layers.BatchNormalization(), layers.Dropout(0.5))
    objects = [model, *model._flatten_layers(), *(entry.loss for entry in model._compile_loss._flat_losses)]
    attributes = [dict(vars(owner)) for owner in objects]
    items = [list(called.seen), list(model._compile_loss._flat_losses), random.getstate()[1]]
    values = [v.numpy() for v in model.variables]
    prove(model, X, Y)
    assert items == [list(called.seen), list(model._compile_loss._flat_losses), random.getstate()[1]]
    for owner, before in zip(objects, attributes, strict=True):
        assert vars(owner).keys() == before.keys()
        assert [name for name, value in vars(owner).items() if value is not before[name]] == []
    for variable, value in zip(model.variables, values, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


class OwnStep(keras.Sequential):  # type: ignore[misc]
    """Model with a step of its own."""

    def train_step(self, data: Any) -> Any:
        return super().train_step(data)


class OwnLoss(keras.Sequential):  # type: ignore[misc]
    """Model with a loss of its own."""

    def compute_loss(self, *args: Any, **options: Any) -> Any:
        return super().compute_loss(*args, **options)


class RootOfSum(keras.losses.MeanSquaredError):  # type: ignore[misc]
    """Loss that changes what Keras has reduced."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return ops.sqrt(super().__call__(*args, **options))


def test_a_loss_that_reduces_by_itself_is_named() -> None:
    assert _operations(_proof(loss=RootOfSum(reduction="sum"))) == {"__call__"}


def test_methods_of_the_models_own_are_named() -> None:
    assert _operations(_proof(kind=OwnStep)) == {"train_step"}
    assert _operations(_proof(kind=OwnLoss)) == {"compute_loss"}
    assert _operations(_proof(run_eagerly=True)) == {"run_eagerly"}
    model = _compiled()
    object.__setattr__(model, "train_step", lambda data: {})
    assert _operations(prove(model, X, Y)) == {"train_step"}


def test_steps_that_this_package_wraps_are_looked_into() -> None:
    channel = open_channel()
    model = _compiled()
    with DistributedModel(model, channel):
        assert prove(model, X, Y).proven
    object.__setattr__(model, "train_step", lambda data: {})
    with DistributedModel(model, channel):
        assert _operations(prove(model, X, Y)) == {"train_step"}


def test_a_model_that_was_not_built_is_not_proven() -> None:
    model = keras.Sequential([layers.Dense(3)])
    model.compile("sgd", "mse")
    assert _operations(prove(model, X, Y)) == {"build"}
    assert model.variables == []


def test_a_model_that_needs_a_known_number_of_rows_is_not_proven() -> None:
    called = _Called(lambda layer, x: x)
    model = _compiled(called)
    called.function = lambda layer, x: x / x.shape[0]
    assert _operations(prove(model, X, Y)) == {"call"}


def test_tables_are_declared() -> None:
    """Inputs that are no samples, such as a table of ten rows, are the same for all shards."""
    keys, table = keras.Input((), dtype="int32"), keras.Input((3,))
    model = keras.Model([keys, table], layers.Dense(3)(ops.take(table, keys, axis=0)))
    model.compile("sgd", "mse")
    x = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([10, 3])]
    _built(model, x, Y)
    assert prove(model, x, Y, per_sample=[True, False, True]).proven
    assert not prove(model, x, Y).proven
    assert _operations(prove(model, x, Y, per_sample=[True, None, True])) == {"input"}


def test_masks_of_embeddings_and_several_outputs() -> None:
    x = keras.Input((7,), dtype="int32")
    hidden = layers.LSTM(4, return_sequences=True)(layers.Embedding(9, 4, mask_zero=True)(x))
    steps, last = (
        layers.Dense(3, name="steps")(hidden),
        layers.Dense(1, name="last")(layers.GlobalMaxPooling1D()(hidden)),
    )
    model = keras.Model(x, {"steps": steps, "last": last})
    ignoring = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    model.compile("sgd", {"steps": ignoring, "last": "mse"}, loss_weights={"steps": 0.5, "last": 2.0})
    y = {"steps": tf.TensorSpec([None, 7], tf.int32), "last": tf.TensorSpec([None, 1])}
    x = tf.TensorSpec([None, 7], tf.int32)
    assert prove(_built(model, x, y), x, y).proven


def test_a_subclass_in_float16_is_proven() -> None:
    class Model(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(dtype="mixed_float16")
            self.inner = layers.Dense(3, dtype="mixed_float16")

        def call(self, x: Any, training: bool = False) -> Any:
            return {"out": self.inner(tf.nn.silu(x))}

    model = Model()
    model.compile("sgd", {"out": "mae"})
    assert prove(_built(model, X, {"out": Y}), X, {"out": Y}).proven
