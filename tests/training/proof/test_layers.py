"""Layers, losses and applications of Keras: what is proven, and that it holds."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from matex_data.training.proof.model import Proof, prove
from tests.training.proof.catalog import QUICK, Case, layer_cases, layer_classes

LAYERS_NOT_PROVEN = {
    "AugMix", "CutMix", "HashedCrossing", "MelSpectrogram", "MixUp", "RandomCrop", "RandomElasticTransform",
    "RandomGaussianBlur", "TextVectorization",
}  # fmt: skip
LOSSES_NOT_PROVEN = {"CTC", "Circle", "Dice", "Hinge", "SquaredHinge", "Tversky"}
ROWS = [3, 1]
"""Rows of the shard that is compared with the batch."""


def _proof(case: Case, model: Any) -> Proof:
    return prove(model, [tf.TensorSpec([None, *shape], case.dtype) for shape in case.shapes])


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.name)
def test_a_proven_layer_computes_each_row_by_itself(case: Case) -> None:
    model, inputs = case.model()
    proof = _proof(case, model)
    assert (proof.reasons, proof.draws) == ((), False)
    rng = np.random.default_rng(0)
    batch = [rng.normal(size=(4, *x.shape[1:])) if case.dtype == "float32" else rng.integers(0, 4, (4, *x.shape[1:]))
             for x in inputs]  # fmt: skip
    whole = np.asarray(model([x.astype(case.dtype) for x in batch]))
    shard = np.asarray(model([x[ROWS].astype(case.dtype) for x in batch]))
    np.testing.assert_allclose(shard, whole[ROWS], rtol=1e-4, atol=1e-5)


@pytest.mark.slow  # models of 120 layers take a minute
def test_all_layers() -> None:
    cases = layer_cases()
    assert {getattr(keras.layers, case.name) for case in cases} == layer_classes()
    proofs = {}
    for case in cases:
        model, _ = case.model()
        proofs[case.name] = _proof(case, model)
    assert {name for name, proof in proofs.items() if not proof.proven} == LAYERS_NOT_PROVEN


def _losses() -> list[Any]:
    kinds = [kind for _, kind in inspect.getmembers(keras.losses, inspect.isclass)]
    return [kind for kind in kinds if issubclass(kind, keras.losses.Loss) and kind is not keras.losses.Loss]


@pytest.mark.slow  # 22 losses, each with a model
@pytest.mark.parametrize("kind", _losses(), ids=lambda kind: kind.__name__)
def test_losses(kind: Any) -> None:
    name = kind.__name__
    classes = name.startswith(("Sparse", "Circle", "CategoricalGeneralized"))
    x = tf.TensorSpec([None, 4] if classes else [None, 7, 4])
    y = tf.TensorSpec([None], tf.int32) if classes else tf.TensorSpec([None, 5], tf.int32) if name == "CTC" else x
    model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(4, "sigmoid")])
    model.compile("sgd", kind())
    model._symbolic_build(data_batch=(x, y))
    assert prove(model, x, y).proven == (name not in LOSSES_NOT_PROVEN)


APPLICATIONS = (
    "ConvNeXtTiny", "DenseNet121", "EfficientNetB0", "EfficientNetV2B0", "InceptionResNetV2", "InceptionV3",
    "MobileNet", "MobileNetV2", "MobileNetV3Small", "NASNetMobile", "ResNet50", "ResNet50V2", "VGG16", "Xception",
)  # fmt: skip
"""The smallest network of each family; the others have more of the same layers."""


@pytest.mark.slow  # networks of hundreds of layers take seconds each
@pytest.mark.parametrize("name", APPLICATIONS)
def test_applications(name: str) -> None:
    size = {"InceptionV3": 75, "InceptionResNetV2": 75, "Xception": 71}.get(name, 32)
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=10)
    model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = tf.TensorSpec([None, size, size, 3]), tf.TensorSpec([None], tf.int32)
    model._symbolic_build(data_batch=(x, y))
    proof = prove(model, x, y)
    norms = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]
    assert proof.reasons == ()
    assert len(proof.batch_statistics) == len(norms)
