"""A script with arguments, functions and a main guard."""

import argparse
import sys
from pathlib import Path

import keras
import numpy as np


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=20)
    return parser.parse_args(arguments)


def load():
    rng = np.random.default_rng(13)
    x = rng.normal(size=(70, 3)).astype("float32")
    return x, x.sum(axis=1, keepdims=True) > 0


def main():
    options = parse()
    keras.utils.set_random_seed(13)
    model = keras.Sequential([keras.layers.Dense(5, activation="relu"), keras.layers.Dense(1, activation="sigmoid")])
    model.compile(keras.optimizers.Nadam(0.01), "binary_crossentropy", metrics=["accuracy"])
    history = model.fit(*load(), epochs=options.epochs, batch_size=options.batch_size, verbose=0)
    print("RESULT history", *[f"{v:.6f}" for v in history.history["loss"]])
    model.save_weights(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
