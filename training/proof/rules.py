"""Registry of the rules, each of which says what the results of operations depend on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf

from matex_data.training.proof.axes import (
    Independent,
    Listed,
    Mixed,
    PerSample,
    Reason,
    RowCount,
    Shape,
    State,
    Total,
    Values,
)
from matex_data.training.proof.sizes import MAYBE_NEGATIVE, Size, name_size

LARGEST = 2.0**53
"""Numbers below it are whole numbers exactly, as float64 as well."""
MOST_VALUES = 64
"""Largest tensor of integers whose elements are followed; shapes, permutations and paddings are smaller."""


class Node:
    """Operation with the dependences of its inputs, and what a rule needs to compute those of its outputs.

    Parameters
    ----------
    op : ``tf.Operation``.
    inputs : dependence of each input.
    path : calls of functions that lead to the operation, from the outermost on.
    """

    def __init__(self, op: Any, inputs: Sequence[State], path: tuple[str, ...] = ()) -> None:
        self.op = op
        self.inputs = inputs
        self.path = path
        self.draws = False
        self.reason_of_effect: Reason | None = None

    def attribute(self, name: str) -> Any:
        """Return an attribute of the operation; bytes as text."""
        value = self.op.get_attr(name)
        return value.decode() if isinstance(value, bytes) else value

    def reason(self, why: str) -> Reason:
        """Return the reason why this operation is not proven."""
        names = [*self.path, self.op.name]
        scope = "/".join(name.rpartition("/")[0] or "" for name in names)
        return Reason(re.sub("/+", "/", scope).strip("/") or "model", self.op.type, why)

    def mixed(self, why: str) -> list[State]:
        """Return outputs that are mixed for one reason."""
        return [Mixed((self.reason(why),)) for _ in self.op.outputs]

    def uses(self, total: Total) -> list[State]:
        """Return outputs that are mixed, since the operation is not linear in a sum over rows."""
        reason = replace(total.reason, why=f"{total.reason.why}, and the result enters {self.op.type}")
        return [Mixed((reason,)) for _ in self.op.outputs]

    def effect(self, why: str) -> list[State]:
        """Return outputs that are mixed, of an operation that counts even if nothing uses its outputs."""
        self.reason_of_effect = self.reason(why)
        return self.mixed(why)

    def new_axis(self, axis: int, output: int = 0) -> Size:
        """Return the size of an axis of an output: the one that TensorFlow has inferred, else a new name."""
        shape = self.op.outputs[output].shape if output < len(self.op.outputs) else tf.TensorShape(None)
        known = shape[axis] if shape.rank is not None and axis < shape.rank else None
        return Size(known) if known is not None else name_size(f"{self._name(output)}[{axis}]")

    def new_shape(self, output: int = 0) -> Shape | None:
        """Return the shape of an output that all shards have in common; None if its rank is unknown."""
        rank = self.op.outputs[output].shape.rank
        return None if rank is None else tuple(self.new_axis(axis, output) for axis in range(rank))

    def independent(self, output: int = 0, values: Values | None = None) -> Independent:
        """Return the dependence of an output that all shards have in common."""
        tensor = self.op.outputs[output]
        count = tensor.shape.num_elements()
        if values is None and tensor.dtype.is_integer and count is not None and count <= MOST_VALUES:
            values = tuple(name_size(f"{MAYBE_NEGATIVE}{self._name(output)}:{i}") for i in range(count))
        return Independent(self.new_shape(output), values)

    def integers(self, position: int) -> tuple[int, ...] | None:
        """Return the elements of an input, if all of them are known; else None."""
        values = self.values(position)
        known = None if values is None else [None if v is None else v.integer for v in values]
        return None if known is None or None in known else tuple(v for v in known if v is not None)

    def values(self, position: int) -> Values | None:
        """Return the elements of an input, as far as they are known; None if it is no small tensor of numbers."""
        state = self.inputs[position]
        return state.values if isinstance(state, Independent | RowCount) else None

    def _name(self, output: int) -> str:
        return "|".join([*self.path, f"{self.op.name}:{output}"])  # no name of an operation has this character


Rule = Callable[[Node], list[State]]


@dataclass(frozen=True)
class Entry:
    """Rule with the positions of inputs that may depend on the number of rows, and what else it accepts.

    Parameters
    ----------
    sizes : positions of inputs that are sizes, such as a shape; negative ones count from the end.
    linear : the rule accepts sums over the rows.
    lists : the rule accepts lists of tensors.
    """

    rule: Rule
    sizes: tuple[int, ...] = ()
    linear: bool = False
    lists: bool = False

    def accepts(self, node: Node) -> bool:
        """Return whether the rule knows what to do with the kinds of the inputs."""
        sizes = {position % len(node.inputs) for position in self.sizes} if node.inputs else set()
        return all(
            isinstance(state, Independent | PerSample)
            or (isinstance(state, RowCount) and position in sizes)
            or (isinstance(state, Total) and self.linear)
            or (isinstance(state, Listed) and self.lists)
            for position, state in enumerate(node.inputs)
        )


RULES: dict[str, Entry] = {}
VALUES: dict[str, Callable[[Node], Values | None]] = {}
"""Functions that compute the elements of small tensors of integers, as of shapes, by type of operation."""


def rule(*types: str, sizes: tuple[int, ...] = (), linear: bool = False, lists: bool = False) -> Callable[[Rule], Rule]:
    """Return a decorator: register the rule of operations."""

    def register(function: Rule) -> Rule:
        RULES.update({kind: Entry(function, sizes, linear, lists) for kind in types})
        return function

    return register


def values_of(*types: str) -> Callable[[Callable[[Node], Values | None]], Callable[[Node], Values | None]]:
    """Return a decorator: register the function that computes the elements of small tensors."""

    def register(function: Callable[[Node], Values | None]) -> Callable[[Node], Values | None]:
        VALUES.update(dict.fromkeys(types, function))
        return function

    return register


def samples(node: Node) -> list[PerSample]:
    """Return the inputs that are per sample."""
    return [state for state in node.inputs if isinstance(state, PerSample)]


def unaligned(node: Node) -> list[State]:
    """Return mixed outputs of an operation whose inputs have their samples along different axes."""
    return node.mixed("combines rows: its inputs have the samples along different axes")


def static_values(array: Any) -> Values | None:
    """Return the elements of a small array of whole numbers; else None."""
    array = np.asarray(array)
    if array.size > MOST_VALUES or array.dtype.kind not in "iuf" or not (np.abs(array) < LARGEST).all():
        return None
    return tuple(Size(int(value)) for value in array.ravel()) if (array == np.round(array)).all() else None
