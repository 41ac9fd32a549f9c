"""Tell photographs apart with plain Keras: matex run -n 2 examples/users/photos.py FOLDER."""

import sys

import keras

keras.utils.set_random_seed(1)
options = {"validation_split": 0.25, "seed": 1, "image_size": (24, 32), "batch_size": 12, "verbose": False}
train, test = keras.utils.image_dataset_from_directory(sys.argv[1], subset="both", label_mode="binary", **options)
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((24, 32, 3)),
        layers.Rescaling(1 / 255),
        layers.Conv2D(8, 3, strides=2, activation="relu"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(1, "sigmoid"),
    ]
)
model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
model.fit(train, epochs=8, verbose=0)
loss, accuracy = model.evaluate(test, verbose=0)
model.save("photos.keras")
print(f"RESULT accuracy {accuracy:.3f} loss {loss:.3f}")
