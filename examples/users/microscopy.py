"""Segment cells by patches of large images: mpiexec -n 2 python examples/users/microscopy.py FOLDER."""

import sys

import keras

import matex_data as md

keras.utils.set_random_seed(1)
patches = md.open_dataset(sys.argv[1], inputs="image", targets="mask", mode="gray", patch=(48, 48))
train, test = patches.split(0.7, 0.3, seed=1)  # all patches of an image are in one set
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((48, 48, 1)),
        train.normalization("image"),
        layers.Conv2D(8, 5, padding="same", activation="silu"),
        layers.Conv2D(8, 5, padding="same", activation="silu"),
        layers.Conv2D(1, 1, activation="sigmoid"),
    ]
)
model.compile(keras.optimizers.Adam(0.01), "bce", metrics=["accuracy"])
md.training.fit(model, train, batch_size=8, epochs=4, verbose=0)
loss, accuracy = md.training.evaluate(model, test, batch_size=8, verbose=0)
if md.training.world().rank == 0:
    print(f"RESULT accuracy {accuracy:.3f} loss {loss:.3f}")
