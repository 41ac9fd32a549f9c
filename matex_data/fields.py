"""What a sample is made of: named fields of a shape and a dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Field:
    """One named quantity of a sample.

    Parameters
    ----------
    name : as the user writes it, for example ``"run1/images"``.
    shape : of one sample, without the sample axis.
    dtype : as delivered, in native byte order. ``object`` stands for byte strings of any length;
        a structured dtype for compound data, which only the NumPy side can deliver.
    ragged : each sample is a 1-D array of ``dtype`` with a length of its own; it arrives in an
        object array.
    attributes : what the file says about the field (units, names, ...).
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ragged: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Dtype of the NumPy array that holds many samples."""
        return np.dtype(object) if self.ragged else self.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample in memory; of an object, the size of its reference."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.array_dtype.itemsize

    def empty(self, rows: int) -> np.ndarray[Any, Any]:
        """An array for that many samples; its contents are undefined."""
        return np.empty((rows, *self.shape), self.array_dtype)

    def blank(self, samples: np.ndarray[Any, Any]) -> None:
        """Make padding of samples: zeros, empty strings, arrays without elements."""
        if self.ragged:
            for i in range(len(samples)):
                samples[i] = np.empty(0, self.dtype)
        elif len(samples):
            samples[...] = b"" if self.dtype == object else np.zeros((), self.dtype)


Schema = Mapping[str, Field]
"""Fields by name."""
