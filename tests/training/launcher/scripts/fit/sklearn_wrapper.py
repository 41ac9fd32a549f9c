"""Keras's wrapper for scikit-learn, in a pipeline with a scaler."""

import sys

import keras
import numpy as np
from keras.wrappers import SKLearnClassifier
from sklearn.datasets import make_classification
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler


def dynamic_model(X, y, loss):  # noqa: N803
    inputs = keras.Input(shape=X.shape[1:])
    outputs = keras.layers.Dense(y.shape[1] if y.ndim > 1 else 1, activation="softmax")(
        keras.layers.Dense(6, activation="relu")(inputs)
    )
    model = keras.Model(inputs, outputs)
    model.compile(loss=loss, optimizer=keras.optimizers.Adam(0.02))
    return model


keras.utils.set_random_seed(15)
x, y = make_classification(n_samples=90, n_features=6, random_state=15)
classifier = SKLearnClassifier(
    model=dynamic_model,
    model_kwargs={"loss": "categorical_crossentropy"},
    fit_kwargs={"batch_size": 20, "epochs": 3, "verbose": 0},
)
pipeline = make_pipeline(StandardScaler(), classifier)
pipeline.fit(x[:70], y[:70])
predicted = pipeline.predict(x[70:])
print("RESULT predicted", *np.asarray(predicted).ravel())
print("RESULT score", f"{np.mean(np.ravel(predicted) == y[70:]):.6f}")
np.savez(sys.argv[1] + ".npz", *classifier.model_.get_weights())
