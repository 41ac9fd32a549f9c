"""A script for MaTEx from 2018."""

import sys

import tensorflow as tf
import tensorflow.compat.v1 as tf1

mnist = tf.DataSet("MNIST", normalize=255.0)
X_train = mnist.training_data
y_train = mnist.training_labels
X_test = mnist.testing_data
y_test = tf1.DataSet("MNIST", normalize=255.0).testing_labels  # of scripts that import TensorFlow 1

X_train = X_train.reshape(-1, 28, 28, 1)
X_test = X_test.reshape(-1, 28, 28, 1)

model = tf.keras.models.Sequential()
model.add(tf.keras.layers.Conv2D(6, (5, 5), activation="tanh", padding="same"))
model.add(tf.keras.layers.AveragePooling2D((2, 2)))
model.add(tf.keras.layers.Conv2D(16, (5, 5), activation="tanh"))
model.add(tf.keras.layers.AveragePooling2D((2, 2)))
model.add(tf.keras.layers.Flatten())
model.add(tf.keras.layers.Dense(84, activation="tanh"))
model.add(tf.keras.layers.Dense(10, activation="softmax"))
model.compile("SGD", loss="categorical_crossentropy", metrics=["categorical_accuracy"])
history = model.fit(X_train, y_train, validation_data=(X_test, y_test), epochs=5, batch_size=8, verbose=2)
print(f"ROWS {len(X_train)} {len(X_test)} {history.params['steps']} {X_train.max():.3f}")
print(f"RESULT {history.history['val_categorical_accuracy'][-1]:.4f}")
model.save_weights(sys.argv[1])
