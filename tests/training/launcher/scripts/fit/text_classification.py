"""Keras's example of text classification with a transformer, whose layers are classes of the script."""

import sys

import keras
import numpy as np
from keras import layers, ops


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim):
        super().__init__()
        # Without biases: the gradient of those of keys is zero, and Adam makes steps of its rounding.
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim, use_bias=False)
        self.ffn = keras.Sequential([layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)])
        self.layernorm1, self.layernorm2 = layers.LayerNormalization(epsilon=1e-6), layers.LayerNormalization()

    def call(self, inputs):
        out1 = self.layernorm1(inputs + self.att(inputs, inputs))
        return self.layernorm2(out1 + self.ffn(out1))


class TokenAndPositionEmbedding(layers.Layer):
    def __init__(self, maxlen, vocab_size, embed_dim):
        super().__init__()
        self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

    def call(self, x):
        positions = ops.arange(start=0, stop=ops.shape(x)[-1], step=1)
        return self.token_emb(x) + self.pos_emb(positions)


keras.utils.set_random_seed(12)
rng = np.random.default_rng(2)
texts = [list(rng.integers(1, 50, rng.integers(4, 14))) for _ in range(110)]
x = keras.utils.pad_sequences(texts, maxlen=10)
y = np.array([int(sum(text) > 25 * len(text)) for text in texts])
x_train, y_train, x_val, y_val = x[:80], y[:80], x[80:], y[80:]

inputs = layers.Input(shape=(10,))
hidden = TokenAndPositionEmbedding(10, 50, 8)(inputs)
hidden = layers.GlobalAveragePooling1D()(TransformerBlock(8, 2, 16)(hidden))
outputs = layers.Dense(2, activation="softmax")(layers.Dense(10, activation="relu")(hidden))
model = keras.Model(inputs=inputs, outputs=outputs)
model.compile(optimizer=keras.optimizers.Adam(0.01), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(x_train, y_train, batch_size=32, epochs=3, validation_data=(x_val, y_val), verbose=0)
for name, values in history.history.items():
    print("RESULT", name, *[f"{value:.6f}" for value in values])
print("RESULT predictions", *[f"{value:.6f}" for value in model.predict(x_val, batch_size=8, verbose=0)[:, 1]])
model.save_weights(sys.argv[1])
