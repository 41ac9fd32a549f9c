"""Private names of Keras and TensorFlow."""

from __future__ import annotations

from keras.src.backend import random as keras_random
from tensorflow.python.data.ops.iterator_ops import OwnedIterator as DatasetIterator
from tensorflow.python.eager.record import could_possibly_record as is_recording

__all__ = ["DatasetIterator", "is_recording", "keras_random"]
