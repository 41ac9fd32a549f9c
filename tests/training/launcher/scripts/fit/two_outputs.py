"""A functional model with two inputs and two outputs, losses and metrics by name, and the history of each."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(1)
rng = np.random.default_rng(1)
text, tags = rng.normal(size=(95, 5)).astype("float32"), rng.integers(0, 2, size=(95, 3)).astype("float32")
priority = text[:, :1] * 2 - tags[:, :1]
department = (text[:, 1] > 0).astype("int64") + (tags[:, 1] > 0)

first, second = keras.Input((5,), name="text"), keras.Input((3,), name="tags")
hidden = keras.layers.concatenate([keras.layers.Dense(8, activation="tanh")(first), second])
outputs = {
    "priority": keras.layers.Dense(1, name="priority")(hidden),
    "department": keras.layers.Dense(3, name="department")(hidden),
}
model = keras.Model([first, second], outputs)
model.compile(
    keras.optimizers.RMSprop(0.01),
    loss={"priority": "mse", "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True)},
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"priority": ["mae"], "department": ["accuracy"]},
)
history = model.fit(
    {"text": text, "tags": tags},
    {"priority": priority, "department": department},
    epochs=3,
    batch_size=20,
    verbose=0,
)
for name in sorted(history.history):
    print("RESULT", name, *[f"{value:.6f}" for value in history.history[name]])
model.save_weights(sys.argv[1])
