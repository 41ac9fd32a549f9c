"""Models of Keras's own layers that need no check: each class against its own rows, and what is not among them."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from matex_data.training.exact.listed import BROADCASTING, INNER, LAYERS, LOSSES, Proof, prove
from tests.training.exact.catalog import QUICK, Case, layer_cases, layer_classes

ROWS = [3, 1]
"""Rows of the shard that is compared with the batch."""
X, Y = tf.TensorSpec([None, 6]), tf.TensorSpec([None, 3])


def _compiled(*inner: Any, loss: Any = "mse", kind: Any = keras.Sequential, **options: Any) -> Any:
    model = kind([keras.Input((6,)), *inner, layers.Dense(3)])
    model.compile("sgd", loss, **options)
    model._symbolic_build(data_batch=(X, Y))
    return model


def _proof(*inner: Any, **options: Any) -> Proof:
    return prove(_compiled(*inner, **options), [X, Y], [True, True])


def _of_tensors(function: Any, shape: tuple[int, ...] = (6,), **options: Any) -> Proof:
    x = keras.Input(shape, **options)
    model = keras.Model(x, function(x))
    return prove(model, [tf.TensorSpec([None, *shape])], [True])


def _batch(case: Case, inputs: list[Any]) -> list[Any]:
    rng = np.random.default_rng(0)
    if case.dtype == "string":
        return [rng.choice(["a", "b"], (4, *x.shape[1:])) for x in inputs]
    numbers = [rng.normal(size=(4, *x.shape[1:])) if case.dtype == "float32" else rng.integers(0, 4, (4, *x.shape[1:]))
               for x in inputs]  # fmt: skip
    return [x.astype(case.dtype) for x in numbers]


CASES = {getattr(layers, case.name).__name__: case for case in layer_cases()}


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in {c.name for c in QUICK} else pytest.mark.slow) for name in sorted(LAYERS)
])  # fmt: skip
def test_a_listed_layer_computes_each_row_by_itself(name: str) -> None:
    if name not in CASES:
        pytest.skip(f"Keras {keras.__version__} has no {name}")
    case = CASES[name]
    model, inputs = case.model()
    specs = [tf.TensorSpec([None, *shape], case.dtype) for shape in case.shapes]
    assert prove(model, specs, [True] * len(specs)).reasons == ()
    batch = [tf.convert_to_tensor(x) for x in _batch(case, inputs)]
    for training in (False, True):
        random = training and prove(model, specs, [True] * len(specs)).draws
        if random or (training and name in ("BatchNormalization", "SpectralNormalization")):
            continue
        whole = np.asarray(model(batch, training=training))
        shard = np.asarray(model([tf.gather(x, ROWS) for x in batch], training=training))
        np.testing.assert_allclose(shard, whole[ROWS], rtol=1e-4, atol=1e-5)


def test_each_layer_of_keras_is_listed_or_known_not_to_be() -> None:
    names = {kind.__name__ for kind in layer_classes()} | {name for name in dir(layers) if name.endswith("Cell")}
    augmented = {name for name in names if name.startswith(("Random", "Aug", "Auto", "Mix", "Cut", "Solar"))}
    others = {"CategoryEncoding", "HashedCrossing", "Lambda", "MaxNumBoundingBoxes", "MelSpectrogram", "Pipeline",
              "STFTSpectrogram", "TextVectorization"}  # fmt: skip
    assert names - LAYERS - INNER - augmented == others & names


def test_losses_of_keras_are_listed_or_known_not_to_be() -> None:
    kinds = {kind for _, kind in inspect.getmembers(keras.losses, inspect.isclass)} - {keras.losses.Loss}
    of_batch = {"CTC", "Circle", "Dice", "Hinge", "SquaredHinge", "Tversky"}
    assert {kind.__name__ for kind in kinds if issubclass(kind, keras.losses.Loss)} - LOSSES == of_batch


def test_metrics_that_compare_each_output_with_all_targets_are_checked() -> None:
    kinds = [kind for _, kind in inspect.getmembers(keras.metrics, inspect.isclass)]
    y, p = np.float32([0.1, 0.2, 0.3]), np.float32([[0.6], [0.5], [0.9]])
    found = set()
    for kind in kinds:
        if issubclass(kind, keras.metrics.MeanMetricWrapper) and kind is not keras.metrics.MeanMetricWrapper:
            function = kind()._fn
            with contextlib.suppress(ValueError, tf.errors.InvalidArgumentError):  # these refuse such shapes
                rows = np.concatenate([np.atleast_1d(function(y[i : i + 1], p[i : i + 1])) for i in range(3)])
                found |= {function.__name__} if np.any(np.abs(function(y, p) - rows) > 1e-5) else set()
    assert "poisson" in found <= BROADCASTING
    model = _compiled(metrics=["poisson"])
    assert prove(model, [X, tf.TensorSpec([None, 4])], [True, True]).proven
    assert not prove(model, [X, tf.TensorSpec([None])], [True, True]).proven


def test_a_plain_model_is_listed() -> None:
    proof = _proof(layers.Dense(6, "gelu", kernel_regularizer="l2"), layers.LayerNormalization())
    assert (proof.reasons, proof.draws) == ((), False)
    assert _proof(layers.Dense(6, tf.nn.relu), layers.Dropout(0.5)).draws


@pytest.mark.parametrize("loss", ["mse", "categorical_crossentropy", keras.losses.MeanSquaredError("sum"),
                                  keras.losses.Huber(reduction="mean"), keras.losses.log_cosh])  # fmt: skip
def test_losses_that_ranks_weigh(loss: Any) -> None:
    assert _proof(loss=loss).reasons == ()


def _own_loss(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(p - ops.flip(p, 0)), -1)


@pytest.mark.parametrize("loss", [_own_loss, "dice", keras.losses.MeanSquaredError(None), keras.losses.Tversky(),
                                  *(keras.losses.CosineSimilarity(axis=axis) for axis in (0, -2))])  # fmt: skip
def test_other_losses_are_checked(loss: Any) -> None:
    assert not _proof(loss=loss).proven


class _Own(layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        return x - ops.mean(x, 0)


class _OwnActivation:
    def __call__(self, x: Any) -> Any:
        return x - ops.mean(x, 0)


@pytest.mark.parametrize("inner", [
    _Own, lambda: layers.Lambda(lambda x: x), lambda: layers.Dense(4, lambda x: x - ops.mean(x, 0)),
    lambda: layers.Dense(4, _OwnActivation()), lambda: layers.Dense(4, ops.flip),
    lambda: layers.Dropout(0.5, noise_shape=(1, 6)), lambda: layers.Softmax(0), lambda: layers.UnitNormalization(0),
    lambda: layers.EinsumDense("ab,ac->bc", (6, 4)), lambda: layers.Softmax(-2),
    lambda: layers.Dense(4, activity_regularizer=lambda x: ops.var(x)),
], ids=range(11))  # fmt: skip
def test_layers_with_code_or_axes_of_the_user_are_checked(inner: Any) -> None:
    try:
        assert not _proof(inner()).proven
    except ValueError:  # Keras refuses an equation without rows
        assert inner().__class__ is layers.EinsumDense


def test_graphs_of_operations() -> None:
    assert _of_tensors(lambda x: layers.Dense(2)(x) * 2 + 1).proven
    assert not _of_tensors(lambda x: x * np.ones((4, 1))).proven
    assert _of_tensors(lambda x: layers.Add()([x, layers.Dense(6)(x)])).proven
    assert not _of_tensors(lambda x: x - ops.mean(x, 0)).proven
    assert not _of_tensors(lambda x: layers.BatchNormalization()(x, training=True)).proven
    assert not _of_tensors(lambda x: layers.Concatenate(0)([x, x])).proven
    assert not _of_tensors(lambda x: layers.Concatenate(-1)([x, x]), ()).proven
    assert not _of_tensors(lambda x: layers.Dense(2)(x), batch_size=4).proven
    masked = lambda x: layers.Dense(2)(layers.LSTM(3)(layers.Masking()(x)))  # noqa: E731
    assert _of_tensors(masked, (4, 3)).proven
    embedded = lambda x: layers.LSTM(3)(layers.Embedding(9, 2, mask_zero=True)(x))  # noqa: E731
    assert _of_tensors(embedded, dtype="int32").proven
    assert _of_tensors(lambda x: ops.where(ops.any(x > 0, 1, keepdims=True), x, 0)).proven
    assert not any(_of_tensors(lambda x, axis=axis: x * ops.sum(x, axis)).proven for axis in (None, 0, -2))
    assert not _of_tensors(lambda x: layers.TimeDistributed(layers.Softmax(-2))(x), (4, 3)).proven


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (lambda x: layers.Dense(2)(ops.expand_dims(x, -1)), True),
        (lambda x: layers.Dense(2)(ops.expand_dims(x, 1)), True),
        (lambda x: layers.Dense(2)(ops.stack([x, x], axis=-1)), True),
        (lambda x: layers.Dense(2)(ops.one_hot(ops.cast(x, "int32"), 3)), True),
        (lambda x: ops.stack([x, x], axis=0) * 2, False),
        (lambda x: ops.stack([x, x], axis=-2) * 2, False),
        (lambda x: ops.expand_dims(x, 0) * 2, False),
        (lambda x: ops.expand_dims(x, -2) * 2, False),
    ],
)
def test_operations_that_add_an_axis_to_single_numbers(function: Any, known: bool) -> None:
    """Those of a column of a table."""
    proof = _of_tensors(function, ())
    assert proof.proven == known
    assert any("computes along the axis of the rows" in reason for reason in proof.reasons) != known


def test_losses_have_to_be_built_only_where_they_count() -> None:
    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])
    model.compile("sgd", "mse")
    assert prove(model, [X], [True], losses=False).proven
    assert prove(model, [X, Y], [True, True]).reasons == (f"{model.name}: its losses are built by its first step",)


def test_reasons_name_what_the_script_has() -> None:
    class Own(layers.Layer):  # type: ignore[misc]
        def call(self, x: Any) -> Any:
            return x

    class Steps(keras.Model):  # type: ignore[misc]
        def __init__(self, inner: Any) -> None:
            super().__init__(name="steps")
            self.inner = inner

        def train_step(self, data: Any) -> Any:
            return {}

    x = keras.Input((6,))
    inner = keras.Model(x, layers.Dense(2)(Own(name="own")(x)))
    reason = "own: Own is not known to compute each row by itself"
    assert prove(inner, [X], [True], losses=False).reasons == (reason,)
    model = Steps(inner)
    model.built = True
    reasons = prove(model, [X], [True], losses=False).reasons
    assert reasons == (
        "steps: train_step is a method of the model's own",
        "steps: Steps calls its layers in methods of its own",
        reason,
    )


@pytest.mark.parametrize("method", ["call", "compute_loss", "train_step", "add_loss"])
def test_methods_of_the_models_own_are_checked(method: str) -> None:
    kind = type(
        "Own", (keras.Sequential,), {method: lambda self, *a, **k: getattr(keras.Sequential, method)(self, *a, **k)}
    )
    assert any(f"{method} is a method" in reason for reason in _proof(kind=kind).reasons)
    assert not _proof(run_eagerly=True).proven


def test_data_without_a_row_for_each_sample_are_checked() -> None:
    model = _compiled()
    assert not prove(model, [X, Y], [True, False]).proven
    assert not prove(model, [X, None, Y], [True, None, None]).proven
    assert not prove(model, [tf.RaggedTensorSpec([None, 6]), Y], [True, True]).proven


def test_models_that_differ_have_another_mark() -> None:
    marks = {_proof(layers.Dense(4, kind)).mark for kind in ("relu", "tanh")}
    assert len(marks) == 2
    assert _proof(layers.Dense(4)).mark == _proof(layers.Dense(4)).mark


def test_a_model_that_loads_weights_has_the_same_mark(tmp_path: Path) -> None:
    """Rank 0 alone may load them, as ``BackupAndRestore`` does."""
    before, model = _proof(layers.Dense(4)).mark, _compiled(layers.Dense(4))
    model.save_weights(tmp_path / "model.weights.h5")
    model.load_weights(tmp_path / "model.weights.h5")
    assert prove(model, [X, Y], [True, True]).mark == before


@pytest.mark.slow  # networks of hundreds of layers take seconds each
@pytest.mark.parametrize("name", ["ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "EfficientNetV2B0", "MobileNet",
    "MobileNetV2", "MobileNetV3Small", "NASNetMobile", "ResNet50", "ResNet50V2", "VGG16"])  # fmt: skip
def test_applications_are_listed(name: str) -> None:
    model = getattr(keras.applications, name)(weights=None, input_shape=(32, 32, 3), classes=10)
    model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = tf.TensorSpec([None, 32, 32, 3]), tf.TensorSpec([None], tf.int32)
    model._symbolic_build(data_batch=(x, y))
    assert prove(model, [x, y], [True, True]).reasons == ()
