"""One training or evaluation step of a Keras model on all ranks."""
