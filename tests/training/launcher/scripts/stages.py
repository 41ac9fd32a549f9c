"""Train a small network by fit, with validation and a callback that reads the weights; print what comes out."""

import keras
import numpy as np

keras.utils.set_random_seed(1)
random = np.random.default_rng(0)
x = random.normal(size=(48, 6)).astype("float32")
y = random.normal(size=(48, 1)).astype("float32")
layers = [keras.layers.Dense(8, activation="tanh") for _ in range(4)]
model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
norms = []
reading = keras.callbacks.LambdaCallback(
    on_epoch_end=lambda epoch, logs: norms.append(float(sum(np.square(w).sum() for w in model.get_weights())))
)
history = model.fit(
    x, y, batch_size=16, epochs=2, validation_data=(x[:20], y[:20]), callbacks=[reading], verbose=0
).history
print("norms", *(f"{norm:.4f}" for norm in norms))
print("history", *(f"{key}={value[-1]:.4f}" for key, value in sorted(history.items())))
print("evaluate", *(f"{value:.4f}" for value in model.evaluate(x, y, verbose=0)))
print("predict", f"{model.predict(x, verbose=0).sum():.4f}")
