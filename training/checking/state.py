"""State that a check leaves as it was: variables, and random numbers. For attributes, see ``exact.attributes``."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Context manager: restore the random numbers of Python and NumPy."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


@contextlib.contextmanager
def kept_variables(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Context manager: restore variables of TensorFlow; yields their values before.

    The values are tensors, of which TensorFlow copies those that are written.
    """
    before = [tf.identity(variable.read_value()) for variable in variables]
    try:
        yield before
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value, read_value=False)
