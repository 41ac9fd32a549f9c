"""What a traced step writes or applies from this rank's rows alone, past the average over the ranks.

All ranks hold one model only if what they write is equal on all of them. So the graph of the step is followed from the
batch on: whatever is computed from it is the rank's own, until a reduction over the ranks replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from matex_data.training.reduction.ops import REDUCED
from matex_data.training.steps.step import STAND_IN_GUARD

_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ScatterNdUpdate")
"""Types of operations that write a variable, or beginnings of them."""
_CONDITIONS = ("If", "StatelessIf", "Case", "StatelessCase", "While", "StatelessWhile")


class Own(NamedTuple):
    """Whether a tensor is computed from this rank's rows, and whether from an average over the ranks."""

    rows: bool
    averages: bool


class Ownership:
    """Dependence of each tensor of a graph on this rank's rows.

    Parameters
    ----------
    graph : function graph of a step.
    batch : its inputs that hold the batch.
    """

    def __init__(self, graph: Any, batch: Iterable[Any]) -> None:
        self._own: dict[int, Own] = {id(tensor): Own(True, False) for tensor in batch}
        self._operations = list(graph.get_operations())
        for op in self._operations:
            if op.type != "Placeholder":
                self._follow(op)

    def _follow(self, op: Any) -> None:
        inputs = [self.of(tensor) for tensor in op.inputs]
        reduced = REDUCED in op.name and op.type in ("PyFunc", "EagerPyFunc")
        rows = not reduced and any(own.rows for own in inputs)
        averages = reduced or any(own.averages for own in inputs)
        for output in op.outputs:
            self._own[id(output)] = Own(rows, averages)

    def of(self, tensor: Any) -> Own:
        """Return what a tensor of the graph is computed from."""
        return self._own.get(id(tensor), Own(False, False))

    def writes(self) -> Iterator[tuple[Any, Own]]:
        """Yield handles of variables that the graph writes, and what the values are computed from."""
        for op in self._operations:
            handles = [tensor for tensor in op.inputs if tensor.dtype.name == "resource"]
            if op.type.startswith(_WRITES):
                values = [self.of(tensor) for tensor in op.inputs if tensor.dtype.name != "resource"]
                for handle in handles:
                    yield handle, _union(values)
            elif op.type in _CONDITIONS and STAND_IN_GUARD not in op.name:
                values = [self.of(tensor) for tensor in op.inputs]
                for handle in handles:
                    yield handle, _union(values)

    def guarded(self) -> Iterator[Any]:
        """Yield handles of variables that a rank without rows puts back."""
        for op in self._operations:
            if op.type in _CONDITIONS and STAND_IN_GUARD in op.name:
                yield from (tensor for tensor in op.inputs if tensor.dtype.name == "resource")


def _union(owns: Iterable[Own]) -> Own:
    owns = list(owns)
    return Own(any(own.rows for own in owns), any(own.averages for own in owns))
