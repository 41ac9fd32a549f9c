"""Fields of a sample, and the elements that batches are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


WEIGHT = "sample_weight"
Names = str | Sequence[str] | None


def as_list(names: Names) -> list[str]:
    """The names that are meant."""
    return [] if names is None else [names] if isinstance(names, str) else list(names)


@dataclass(frozen=True)
class ElementSpec:
    """How fields become an element: a dict of all; inputs alone; or (inputs, targets).

    Parameters
    ----------
    inputs, targets : a field name, which gives the bare value; a list of names, which gives a dict; or None.
    """

    inputs: Names = None
    targets: Names = None

    @property
    def names(self) -> list[str] | None:
        """The fields that are needed, each once; None: all."""
        if self.inputs is None and self.targets is None:
            return None
        return list(dict.fromkeys([*as_list(self.inputs), *as_list(self.targets)]))

    def assemble(self, values: Mapping[str, Any], weight: Any = None) -> Any:
        """The element made of one value per field, and of a weight per sample if there is one.

        A weight comes last in a tuple, as Keras wants it, or under the name ``sample_weight`` in a dict.
        """
        if self.inputs is None and self.targets is None:
            return dict(values) if weight is None else {**values, WEIGHT: weight}
        sides = [_side(names, values) for names in (self.inputs, self.targets) if names is not None]
        if weight is not None:
            sides.append(weight)
        return sides[0] if len(sides) == 1 else tuple(sides)


def _side(names: Names, values: Mapping[str, Any]) -> Any:
    return values[names] if isinstance(names, str) else {name: values[name] for name in as_list(names)}
