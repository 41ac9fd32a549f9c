"""Sums of gradients over the micro-batches of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data.training.reduction.graphs import eager_variable


class GradientSums:
    """Sum of the gradients of each variable, dense, in its dtype.

    Memory is taken when the first gradient of a variable comes; variables that no gradient reaches have none.

    Parameters
    ----------
    variables : Keras variables that are trained.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        self.variables = list(variables)
        self._sums: list[Any] = [None] * len(self.variables)

    def add(self, gradients: Sequence[Any], positions: Sequence[int] | None = None) -> None:
        """Add gradients, in graphs and in eager code; None adds nothing.

        Parameters
        ----------
        positions : positions of their variables; None: they are those of all variables, in order.
        """
        for i, gradient in zip(positions or range(len(gradients)), gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                self.total(i).scatter_add(gradient)
            elif gradient is not None:
                self.total(i).assign_add(gradient, read_value=False)

    def total(self, position: int) -> Any:
        """Return the variable of TensorFlow that has the sum for the variable at a position."""
        if self._sums[position] is None:
            variable = self.variables[position].value
            self._sums[position] = eager_variable(
                np.zeros(variable.shape, variable.dtype.as_numpy_dtype), variable.dtype
            )
        return self._sums[position]

    def reached(self) -> list[tuple[Any, Any]]:
        """Return the variables that gradients have reached, each with the variable of its sum."""
        return [(v, total) for v, total in zip(self.variables, self._sums, strict=True) if total is not None]

    def clear(self) -> None:
        """Set all sums to zero."""
        for _, total in self.reached():
            total.assign(tf.zeros(total.shape, total.dtype), read_value=False)
