"""Reductions over all ranks as operations of TensorFlow graphs."""
