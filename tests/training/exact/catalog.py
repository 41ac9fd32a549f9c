"""One model for each of Keras's layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
from keras import layers

FEATURES, SERIES, IMAGE, VOLUME = (6,), (7, 5), (12, 12, 3), (6, 6, 6, 2)


@dataclass(frozen=True)
class Case:
    """Layer with inputs that it takes.

    Parameters
    ----------
    name : class in ``keras.layers``.
    make : makes the layer.
    shapes : shape of a sample of each input.
    unpacked : inputs are arguments of their own, rather than one list.
    """

    name: str
    make: Callable[[], Any]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    unpacked: bool = False

    def model(self) -> tuple[Any, list[Any]]:
        """Return a model of this layer alone, and its inputs."""
        inputs = [keras.Input(shape, dtype=self.dtype) for shape in self.shapes]
        layer = self.make()
        return keras.Model(inputs, layer(*inputs) if self.unpacked or len(inputs) == 1 else layer(inputs)), inputs


def _case(name: str, *arguments: Any, on: tuple[int, ...] = FEATURES, inputs: int = 1, dtype: str = "float32",
          unpacked: bool = False, **options: Any) -> Case:  # fmt: skip
    return Case(name, lambda: getattr(layers, name)(*arguments, **options), (on,) * inputs, dtype, unpacked)


def _by_dimension() -> list[Case]:
    out = []
    for n, shape, steps in ((1, SERIES, (4, 7, 3)), (2, IMAGE, (3, 8, 8, 2)), (3, VOLUME, (3, 6, 6, 6, 2))):
        out += [_case(f"{kind}{n}D", 3, 3, on=shape) for kind in ("Conv", "SeparableConv") if n < 3 or kind == "Conv"]
        out += [_case(f"DepthwiseConv{n}D", 3, on=shape)] if n < 3 else []
        out += [_case(f"Conv{n}DTranspose", 3, 3, on=shape), _case(f"ConvLSTM{n}D", 2, 3, on=steps)]
        out += [_case(f"{kind}Pooling{n}D", 2, on=shape) for kind in ("Max", "Average")]
        out += [_case(f"Adaptive{kind}Pooling{n}D", 2, on=shape) for kind in ("Max", "Average")]
        out += [_case(f"Global{kind}Pooling{n}D", on=shape) for kind in ("Max", "Average")]
        out += [_case(f"{kind}{n}D", on=shape) for kind in ("UpSampling", "ZeroPadding", "Cropping")]
        out += [_case(f"SpatialDropout{n}D", 0.3, on=shape)]
    return out


QUICK = [
    _case("Dense", 3, on=(4, 5)), _case("EinsumDense", "abc,cd->abd", output_shape=(None, 4), on=(4, 5)),
    _case("Conv2D", 3, 3, dilation_rate=2, on=IMAGE), _case("Conv1D", 3, 3, padding="causal", on=SERIES),
    _case("Conv2DTranspose", 3, 3, strides=2, on=IMAGE), _case("DepthwiseConv2D", 3, on=IMAGE),
    _case("MaxPooling2D", on=IMAGE), _case("AveragePooling1D", 2, on=SERIES), _case("UpSampling2D", on=IMAGE),
    _case("GlobalAveragePooling2D", on=IMAGE), _case("ZeroPadding2D", on=IMAGE), _case("Cropping2D", on=IMAGE),
    _case("LayerNormalization", on=SERIES), _case("GroupNormalization", 2, on=(4, 6)),
    _case("RMSNormalization", on=SERIES), _case("UnitNormalization", on=SERIES), _case("PReLU", on=SERIES),
    _case("Softmax", on=SERIES), _case("Activation", "gelu"), _case("Flatten", on=SERIES),
    _case("Reshape", (5, 7), on=SERIES), _case("Permute", (2, 1), on=SERIES), _case("RepeatVector", 3),
    _case("LSTM", 3, on=SERIES), _case("GRU", 3, return_sequences=True, on=SERIES),
    _case("Masking", on=SERIES), _case("Embedding", 5, 3, on=(7,), dtype="int32"),
    _case("MultiHeadAttention", 2, 3, on=SERIES, inputs=2, unpacked=True), _case("Attention", on=SERIES, inputs=2),
    _case("GroupQueryAttention", 4, 4, 2, on=SERIES, inputs=2, unpacked=True),
    _case("AdditiveAttention", on=SERIES, inputs=2), _case("Dot", 1, inputs=2), _case("Concatenate", inputs=2),
    _case("Multiply", inputs=2), _case("Resizing", 5, 5, on=IMAGE),
    _case("CategoryEncoding", 4, output_mode="one_hot", on=(1,), dtype="int32"),
    Case("TimeDistributed", lambda: layers.TimeDistributed(layers.Dense(3)), (SERIES,)),
    Case("Bidirectional", lambda: layers.Bidirectional(layers.LSTM(3)), (SERIES,)),
    Case("SpectralNormalization", lambda: layers.SpectralNormalization(layers.Dense(3)), (SERIES,)),
]  # fmt: skip
"""Layers without random numbers that tests compare with numbers as well."""

FACTORS = {
    "RandomCrop": {"height": 5, "width": 5}, "RandomZoom": {"height_factor": 0.2},
    "RandomTranslation": {"height_factor": 0.2, "width_factor": 0.2}, "RandomShear": {"x_factor": 0.2},
    "RandomPosterization": {"factor": 4},
    "RandomColorJitter": {f"{kind}_factor": 0.1 for kind in ("brightness", "contrast", "saturation", "hue")},
}  # fmt: skip
WITH_FACTOR = ("Rotation", "Brightness", "Contrast", "Hue", "Saturation", "Sharpness", "ColorDegeneration",
               "Perspective", "Erasing", "ElasticTransform")  # fmt: skip
OTHERS = [
    *_by_dimension(),
    *(_case(name, on=SERIES) for name in ("ReLU", "LeakyReLU", "ELU", "Identity", "BatchNormalization")),
    *(_case(name, 0.3, on=SERIES) for name in ("Dropout", "AlphaDropout", "GaussianDropout", "GaussianNoise")),
    *(_case(name, inputs=2) for name in ("Add", "Average", "Maximum", "Minimum", "Subtract")),
    _case("SimpleRNN", 3, dropout=0.2, recurrent_dropout=0.2, on=SERIES), _case("ActivityRegularization", 0.1, 0.1),
    Case("RNN", lambda: layers.RNN(layers.StackedRNNCells([layers.LSTMCell(3), layers.GRUCell(2)])), (SERIES,)),
    _case("ReversibleEmbedding", 5, 3, on=(7,), dtype="int32"), _case("Lambda", lambda x: x * 2),
    _case("Normalization", mean=0.0, variance=1.0), _case("Rescaling", 0.5), _case("CenterCrop", 5, 5, on=IMAGE),
    _case("Hashing", 3, dtype="int32"), _case("HashedCrossing", 3, on=(1,), dtype="int32", inputs=2),
    _case("Discretization", [0.0, 1.0]), _case("IntegerLookup", vocabulary=[1, 2], dtype="int64"),
    _case("StringLookup", vocabulary=["a"], dtype="string"),
    _case("TextVectorization", vocabulary=["a"], output_sequence_length=4, on=(), dtype="string"),
    _case("MelSpectrogram", fft_length=64, on=(512,)), _case("MaxNumBoundingBoxes", 2, on=IMAGE),
    _case("STFTSpectrogram", frame_length=32, frame_step=16, fft_length=32, on=(128, 1)),
    Case("Pipeline", lambda: layers.Pipeline([layers.Rescaling(0.5)]), (IMAGE,)),
]  # fmt: skip
NO_MODELS = {
    "AutoContrast", "Equalization", "ContrastLimitedAdaptiveHistogramEqualization", "RandAugment",  # in `tf.data` alone
    "Layer", "Wrapper", "InputLayer", "FlaxLayer", "JaxLayer", "TorchModuleWrapper", "TFSMLayer",
    "GRUCell", "LSTMCell", "SimpleRNNCell", "StackedRNNCells",
}  # fmt: skip
"""Base classes, layers of other libraries, and what other layers contain."""


def layer_cases() -> list[Case]:
    """Return cases for all of Keras's layers, each under one of its names."""
    cases = [*QUICK, *OTHERS]
    for name, kind in inspect.getmembers(layers, inspect.isclass):
        augments = name.startswith(("Random", "Aug", "Auto", "Mix", "Cut", "Solar"))
        if augments and issubclass(kind, layers.Layer) and name not in NO_MODELS:
            factor = {"factor": 0.2} if name.removeprefix("Random") in WITH_FACTOR else {}
            cases.append(_case(name, on=IMAGE, **FACTORS.get(name, factor)))
    return list({case.name: case for case in reversed(cases) if hasattr(layers, case.name)}.values())


def layer_classes() -> set[Any]:
    """Return Keras's layers that make a model by themselves."""
    classes = {kind for _, kind in inspect.getmembers(layers, inspect.isclass) if issubclass(kind, layers.Layer)}
    return classes - {getattr(layers, name, None) for name in NO_MODELS}
