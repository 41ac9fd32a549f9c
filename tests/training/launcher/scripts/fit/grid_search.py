"""A grid search over clones of one model with the same initial weights."""

import sys

import keras
import numpy as np

keras.utils.set_random_seed(10)
x = np.random.normal(size=(80, 5)).astype("float32")
y = x[:, :1] - 2 * x[:, 1:2]
base = keras.Sequential([keras.Input((5,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
results = {}
for rate in (0.01, 0.1):
    for batch_size in (16, 30):
        model = keras.models.clone_model(base)
        model.set_weights(base.get_weights())
        model.compile(keras.optimizers.SGD(rate, momentum=0.9), "mse")
        history = model.fit(x[:60], y[:60], batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        loss = model.evaluate(x[60:], y[60:], verbose=0)
        results[rate, batch_size] = (loss, model)
        print("RESULT loss", rate, batch_size, f"{history.history['loss'][-1]:.6f} {loss:.6f}")
best = min(results, key=lambda key: results[key][0])
print("RESULT best", *best)
results[best][1].save_weights(sys.argv[1])
