"""Fields of a sample, and the structure of the elements that batches consist of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Field:
    """Named quantity of a sample.

    Parameters
    ----------
    name : for example ``"run1/images"``.
    shape : of one sample, without the sample axis.
    dtype : as delivered, in native byte order. ``object``: byte strings of any length. A structured dtype: compound
        data, which are available as NumPy arrays only.
    ragged : each sample is a 1-D array of ``dtype`` of its own length; a batch of them is an object array.
    attributes : of the field in the file (units, names, ...).

    Examples
    --------
    >>> image = Field("image", (28, 28), np.dtype("u1"))
    >>> image.row_bytes, image.empty(10).shape
    (784, (10, 28, 28))
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    ragged: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict, compare=False)

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Dtype of an array of samples."""
        return np.dtype(object) if self.ragged else self.dtype

    @property
    def row_bytes(self) -> int:
        """Size of one sample in memory, in bytes; of an object, that of its reference."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.array_dtype.itemsize

    def empty(self, rows: int) -> np.ndarray[Any, Any]:
        """Return an uninitialized array for ``rows`` samples."""
        return np.empty((rows, *self.shape), self.array_dtype)

    def blank(self, samples: np.ndarray[Any, Any]) -> None:
        """Overwrite samples with padding: zeros, empty strings, empty arrays."""
        if self.ragged:
            for i in range(len(samples)):
                samples[i] = np.empty(0, self.dtype)
        elif len(samples):
            samples[...] = b"" if self.dtype == object else np.zeros((), self.dtype)


Schema = Mapping[str, Field]
"""Fields by name."""


WEIGHT = "sample_weight"
"""Name of the sample weights in a dict element."""
MASK = "{}_mask"
"""Name of the field that marks missing numbers of another field, or the elements of a padded one."""
Names = str | Sequence[str] | None
"""Field names: a single one, a list, or none."""


def as_list(names: Names) -> list[str]:
    """Return the names as a list."""
    return [] if names is None else [names] if isinstance(names, str) else list(names)


@dataclass(frozen=True)
class ElementSpec:
    """Structure of an element: a dict of all fields; inputs only; or (inputs, targets).

    Parameters
    ----------
    inputs, targets : a field name, for a single array; a list of names, for a dict; or None.
    weights : name of the field with the sample weights; None: each sample counts 1.

    Examples
    --------
    >>> ElementSpec("x", ["y"]).assemble({"x": 1, "y": 2})
    (1, {'y': 2})
    """

    inputs: Names = None
    targets: Names = None
    weights: str | None = None

    @property
    def names(self) -> list[str] | None:
        """Names of the fields of an element, without duplicates; None: all fields."""
        if self.inputs is None and self.targets is None:
            return None
        return list(dict.fromkeys([*as_list(self.inputs), *as_list(self.targets)]))

    @property
    def required(self) -> list[str] | None:
        """Names of the fields of an element and of its weights, without duplicates; None: all fields."""
        return None if self.names is None else list(dict.fromkeys([*self.names, *as_list(self.weights)]))

    def assemble(self, values: Mapping[str, Any], weight: Any = None) -> Any:
        """Return the element with the given values.

        Parameters
        ----------
        values : by field name.
        weight : sample weights. They become the last item of a tuple, as in Keras, or ``sample_weight`` of a dict.
        """
        if self.inputs is None and self.targets is None:
            return dict(values) if weight is None else {**values, WEIGHT: weight}
        sides = [_side(names, values) for names in (self.inputs, self.targets) if names is not None]
        if weight is not None:
            sides.append(weight)
        return sides[0] if len(sides) == 1 else tuple(sides)


def _side(names: Names, values: Mapping[str, Any]) -> Any:
    return values[names] if isinstance(names, str) else {name: values[name] for name in as_list(names)}
