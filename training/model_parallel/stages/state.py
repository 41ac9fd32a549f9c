"""State of a run in stages: the checkpoint that any run has, whole variables by name, which any mesh can resume.

Rank 0 gets one variable at a time from the stage that holds it, and each stage takes its own of those that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.training.comm.channel import open_channel
from matex_data.training.exact.batch_norm import average_moving_statistics
from matex_data.training.model_parallel.mesh import Mesh
from matex_data.training.model_parallel.stages.micro_batches import CHOICE
from matex_data.training.model_parallel.stages.stage import StageLayers
from matex_data.training.partition.parts import Part
from matex_data.training.partition.whole import WholeVariables, at_root, whole_optimizer
from matex_data.training.restart.checkpoint import (
    Checkpoint,
    ModelState,
    names_of,
    rank_variables,
    restore_rank_variables,
    restore_replicated,
)


class StagedState(ModelState):
    """State of a model that is trained in stages.

    Parameters
    ----------
    mesh : ranks; the first rank of a stage in the first replica sends wholes.
    holders : stages that hold a variable, by id.
    """

    def __init__(self, model: Any, layers: StageLayers, mesh: Mesh, holders: Mapping[int, Sequence[int]]) -> None:
        super().__init__(model, open_channel(mesh.data), open_channel(mesh.world))
        self._layers, self._mesh, self._holders = layers, mesh, holders

    def capture(self, exact: bool = False) -> tuple[Iterator[tuple[str, Array]], dict[str, Any]]:
        """Return the variables of all stages on rank 0, and their names, as of any ``ModelState``. *Collective*.

        Moving statistics of replicas are averaged in any case. Metrics are summed over the replicas, and seeds stacked.
        The facts have the number of micro-batches that was chosen, too.
        """
        average_moving_statistics(self._layers, self._channel)
        described, held = self._variables()
        stored = {"metrics": self._model.metrics_variables, "own": rank_variables(self._model)}
        names = {kind: [v.path for v in variables] for kind, variables in stored.items()}
        chosen = vars(self._model).get(CHOICE, [])
        facts = {**names, "common": names_of(self._model, described), "moving": [], "micro_batches": chosen}
        return self._wholes(stored, described, held), facts

    def _wholes(
        self, stored: Mapping[str, Sequence[Any]], described: Sequence[Any], held: Sequence[Any]
    ) -> Iterator[tuple[str, Array]]:
        (_, stages, parts), own = self._mesh.shape, self._mesh.coordinates
        for kind, variables in stored.items():
            for i, variable in enumerate(variables):
                stage = self._holders.get(id(variable), (stages - 1,))[0]  # metrics are on the last one
                stack = None
                if (own.stage, own.part) == (stage, 0):
                    stack = self._channel.host.gather_at_root(np.array(variable.value.numpy()))
                stack = at_root(self._world, stage * parts, stack, variable, (self._channel.size,))
                if stack is not None:
                    total = kind == "metrics"
                    yield f"{kind}{i}", np.asarray(stack.sum(0, dtype=stack.dtype)) if total else stack
        yield from ((f"common{i}", whole) for i, whole in WholeVariables(self._world, described, held).wholes())

    def restore(self, found: Checkpoint) -> None:
        """Set the variables of this stage; raise ``PartitionError`` if the checkpoint has others. *Collective*."""
        object.__setattr__(self._model, CHOICE, found.facts["micro_batches"])
        restore_replicated(found, self._model, *self._variables())
        restore_rank_variables(found, self._model)

    def _seen_parts(self) -> list[Part | None]:
        """Return None for each of the weights, which callbacks see whole."""
        return [None] * len(self._model.weights)

    def _variables(self) -> tuple[list[Any], list[Any]]:
        """Return the replicated variables of the whole model, in the order of one process, and those that are here."""
        model, stage = self._model, self._mesh.coordinates.stage
        own = {v.path: v for v in model.optimizer.variables}
        states = whole_optimizer(model.optimizer, model.trainable_variables).variables
        held = [v if stage in self._holders.get(id(v), (0,)) else None for v in model.weights]
        return [*model.weights, *states], [*held, *(own.get(v.path) for v in states)]
