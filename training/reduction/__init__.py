"""The average over ranks as operations of a TensorFlow graph."""
