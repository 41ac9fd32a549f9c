"""A transformer in the form of Keras's examples, which knows nothing of ranks; prints its losses and its weights."""

import json
import sys
from pathlib import Path

import keras
import numpy as np

keras.utils.set_random_seed(3)


class Block(keras.layers.Layer):
    def __init__(self, width, heads, hidden):
        super().__init__()
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads)
        self.hidden = keras.Sequential([keras.layers.Dense(hidden, activation="relu"), keras.layers.Dense(width)])
        self.norm1 = keras.layers.LayerNormalization(epsilon=1e-6)
        self.norm2 = keras.layers.LayerNormalization(epsilon=1e-6)

    def call(self, x):
        x = self.norm1(x + self.attention(x, x))
        return self.norm2(x + self.hidden(x))


inputs = keras.Input((6,), dtype="int32")
x = keras.layers.Embedding(20, 8)(inputs)
x = Block(8, 2, 16)(x)
outputs = keras.layers.Dense(3)(keras.layers.GlobalAveragePooling1D()(x))
model = keras.Model(inputs, outputs)
model.compile(
    keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
)

rng = np.random.default_rng(0)
tokens, labels = rng.integers(0, 20, (64, 6)), rng.integers(0, 3, 64)
held = []
count = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: held.append(model.count_params()))
history = model.fit(
    tokens, labels, batch_size=16, epochs=3, verbose=0, validation_data=(tokens, labels), callbacks=[count]
)
model.save(Path(sys.argv[1]) / "model.keras")
result = {"loss": history.history["loss"], "val": history.history["val_accuracy"], "held": held}
result["after"] = [model.count_params(), float(np.sum(model.predict(tokens, verbose=0)))]
print("RESULT", json.dumps(result))
