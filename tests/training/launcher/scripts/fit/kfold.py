"""Cross validation with scikit-learn's KFold: a new model for each fold."""

import sys

import keras
import numpy as np
from sklearn.model_selection import KFold

keras.utils.set_random_seed(9)
x = np.random.normal(size=(75, 4)).astype("float32")
y = (x**2).sum(axis=1)


def build_model():
    model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(1)])
    model.compile(optimizer="rmsprop", loss="mse", metrics=["mae"])
    return model


scores = []
for train, test in KFold(n_splits=3, shuffle=True, random_state=1).split(x):
    model = build_model()
    model.fit(x[train], y[train], epochs=3, batch_size=16, verbose=0)
    scores.append(model.evaluate(x[test], y[test], verbose=0))
print("RESULT scores", *[f"{value:.6f}" for score in scores for value in score])
print("RESULT mean", *[f"{value:.6f}" for value in np.mean(scores, axis=0)])
model.save_weights(sys.argv[1])
