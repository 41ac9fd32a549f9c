"""Models that ranks build by name, and data to train them on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np

from matex_data._types import Array

ROWS = 16


def mlp() -> Any:
    """Return two pairs of Dense layers with dropout and normalization between them."""
    x = inputs = keras.Input((6,))
    for i in range(2):
        penalty = keras.regularizers.L2(0.03)  # a loss of an early stage
        x = keras.layers.Dense(8, activation="relu", kernel_regularizer=penalty, name=f"up_{i}")(x)
        x = keras.layers.Dropout(0.25, seed=7 + i)(x)
        x = keras.layers.LayerNormalization(name=f"norm_{i}")(x)
        x = keras.layers.Dense(6, name=f"down_{i}")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(x), name="mlp")


def convolutions() -> Any:
    """Return two convolutions with batch normalization and pooling between them."""
    x = inputs = keras.Input((6, 6, 2))
    x = keras.layers.Conv2D(4, 3, padding="same", name="up_conv")(x)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.MaxPooling2D()(keras.layers.ReLU()(x))
    x = keras.layers.Conv2D(6, 3, name="down_conv", activation="relu")(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(keras.layers.Flatten()(x)), name="convolutions")


class Block(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Transformer block in the form of Keras's examples."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads, dropout=0.1, seed=3)
        self.hidden = keras.Sequential([keras.layers.Dense(hidden, activation="relu"), keras.layers.Dense(width)])
        self.norm1 = keras.layers.LayerNormalization(epsilon=1e-6)
        self.norm2 = keras.layers.LayerNormalization(epsilon=1e-6)

    def call(self, x: Any) -> Any:
        """Return the output of the block."""
        x = self.norm1(x + self.attention(x, x))
        return self.norm2(x + self.hidden(x))


def transformer() -> Any:
    """Return a small transformer with masked tokens."""
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(12, 8, mask_zero=True, name="tokens")(inputs)
    x = Block(8, 2, 16)(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(3, name="out")(x), name="transformer")


def vocabulary() -> Any:
    """Return logits over a vocabulary for each token."""
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(12, 8, name="tokens")(inputs)
    return keras.Model(inputs, keras.layers.Dense(4, name="logits")(x), name="vocabulary")


class Tied(keras.layers.Embedding):  # type: ignore[misc]  # Keras has no types
    """Embedding that computes logits by the same weights."""

    def call(self, inputs: Any, reverse: bool = False) -> Any:
        """Return embeddings of tokens, or their logits."""
        if not reverse:
            return super().call(inputs)
        return keras.ops.matmul(inputs, keras.ops.transpose(self.embeddings))

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """Return the specs of what ``call`` returns."""
        return keras.layers.Layer.compute_output_spec(self, *args, **kwargs)


def tied() -> Any:
    """Return logits by the weights of an embedding, beside one that is cut along its features."""
    inputs = keras.Input((5,), dtype="int32")
    tokens = Tied(12, 8, name="tokens")
    x = keras.layers.Add()([tokens(inputs), keras.layers.Embedding(12, 8, name="features")(inputs)])
    return keras.Model(inputs, tokens(x, reverse=True), name="tied")


class Logits(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Layer that reads the weights of another one."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = embedding

    def call(self, inputs: Any) -> Any:
        """Return logits of tokens."""
        return keras.ops.matmul(inputs, keras.ops.transpose(self.embedding.embeddings))


def tied_layers() -> Any:
    """Return logits by the weights of another layer, for which no layout can be proposed."""
    inputs = keras.Input((5,), dtype="int32")
    embedding = keras.layers.Embedding(12, 8, name="tokens")
    x = keras.layers.Dense(16, activation="relu", name="up")(embedding(inputs))
    x = keras.layers.Dense(8, name="down")(x)
    return keras.Model(inputs, Logits(embedding)(x), name="tied_layers")


def looked_up() -> Any:
    """Return logits over embeddings of a layer without a rule."""
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(Tied(12, 8, name="tokens")(inputs))
    return keras.Model(inputs, keras.layers.Dense(4, name="logits")(x), name="looked_up")


def arrays(name: str) -> tuple[Array, Array]:
    """Return inputs and targets for a model of this module."""
    rng = np.random.default_rng(1)
    each = name in ("vocabulary", "tied", "tied_layers")  # token has a target
    y = rng.integers(0, 4 if each else 3, (ROWS, 5) if each else ROWS)
    if each or name in ("transformer", "looked_up"):
        return rng.integers(0, 12, (ROWS, 5)).astype("int32"), y
    shape = (6,) if name == "mlp" else (6, 6, 2)
    return rng.normal(size=(ROWS, *shape)).astype("float32"), y


LAYOUTS: dict[str, dict[str, tuple[str | None, ...]]] = {
    "mlp": {"up_./kernel": (None, "model"), "down_./kernel": ("model", None), "out/bias": (None,)},
    "tied": {"tokens/embeddings": ("model", None), "features/embeddings": (None, "model")},
    "looked_up": {"tokens/embeddings": ("model", None)},
    "vocabulary": {"tokens/embeddings": ("model", None), "logits/kernel": (None, "model")},
    "convolutions": {
        "up_conv/kernel": (None, None, None, "model"),
        "down_conv/kernel": (None, None, "model", None),
    },
}
"""Layouts of each model; the others are proposed."""


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Context manager: new layers and variables are of this dtype. Keras keeps the policy that it makes of it."""
    before = keras.config.floatx()
    keras.config.set_floatx(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before)
        keras.config.set_dtype_policy(before)
