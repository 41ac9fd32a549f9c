"""State of a run in stages: the checkpoint that any run has, whole variables by name, which any mesh can resume.

Rank 0 gets one variable at a time from the stage that holds it, and each stage takes its own of those that it reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from matex_data._types import Array
from matex_data.training.comm.channel import Channel
from matex_data.training.exact.batch_norm import average_moving_statistics
from matex_data.training.partition.parts import part_of, whole_of_replicas
from matex_data.training.partition.whole_optimizer import whole_optimizer
from matex_data.training.restart.checkpoint import (
    Checkpoint,
    RankValues,
    check_variables,
    names_of,
    positions_of,
    rank_variables,
    restore_rank_variables,
)
from matex_data.training.stages.messages import ACTIVATIONS, Line
from matex_data.training.stages.micro_batches import CHOICE
from matex_data.training.stages.stage import StageLayers

_STATE = 0
"""Number of the messages that carry a state, in place of a micro-batch."""


class _Held(NamedTuple):
    """Variable of the whole model.

    Attributes
    ----------
    described : variable with its path, shape and dtype.
    stage : number of the stage that has its value.
    variable : Keras variable on the ranks that hold it; elsewhere None.
    """

    described: Any
    stage: int
    variable: Any


class StagedState:
    """State of a model that is trained in stages.

    Parameters
    ----------
    model : compiled model.
    layers : layers of this stage.
    messages : between the stages.
    shard : number of this rank among those that hold parts of the layers of a stage; the first one sends wholes.
    replicas : replicas of this stage.
    holders : stages that hold a variable, by id.
    """

    def __init__(
        self,
        model: Any,
        layers: StageLayers,
        messages: Line,
        shard: int,
        replicas: Channel,
        holders: Mapping[int, Sequence[int]],
    ) -> None:
        self._model, self._layers, self._messages, self._replicas = model, layers, messages, replicas
        self._shard, self._holders = shard, holders

    def capture(self, exact: bool = False) -> tuple[Iterator[tuple[str, Array]], dict[str, Any]]:
        """Return the variables of all stages, and their names. *Collective*, and so is each step of the iterator.

        Moving statistics are averaged first. Metrics and seeds, which differ between replicas, are stacked over these.

        Parameters
        ----------
        exact : has no effect: moving statistics of replicas are averaged in any case.

        Returns
        -------
        arrays : names and arrays on rank 0; nothing on the others.
        facts : names of the variables, and the number of micro-batches that was chosen.
        """
        average_moving_statistics(self._layers, self._replicas)
        names = names_of(self._model, [x.described for x in self._held()])
        own = [v.path for v in rank_variables(self._model)]
        chosen = vars(self._model).get(CHOICE, [])
        return self._arrays(), {"common": names, "own": own, "moving": [], "micro_batches": chosen}

    def _arrays(self) -> Iterator[tuple[str, Array]]:
        for i, variable in enumerate(rank_variables(self._model)):
            stage = self._stage_of(variable)
            stack = self._stacked(variable) if stage == self._messages.stage else None
            yield from self._named(f"own{i}", self._at_first_stage(stage, stack))
        for i, (_, stage, variable) in enumerate(self._held()):
            mine = stage == self._messages.stage
            value = whole_of_replicas(variable, self._replicas) if mine else None
            yield from self._named(f"common{i}", self._at_first_stage(stage, value))

    def _named(self, name: str, array: Array | None) -> Iterator[tuple[str, Array]]:
        if array is not None and self._messages.stage == self._shard == self._replicas.rank == 0:
            yield name, array

    def restore(self, found: Checkpoint) -> RankValues:
        """Set the variables of this stage; return the values of those that differ between replicas. *Collective*.

        Raises
        ------
        PartitionError : the checkpoint belongs to another model or optimizer.
        """
        object.__setattr__(self._model, CHOICE, found.facts["micro_batches"])
        held = list(self._held())
        described = [x.described for x in held]
        positions = positions_of(found, names_of(self._model, described))
        check_variables(found, described, positions)
        for (_, _, variable), i in zip(held, positions, strict=True):
            array = found.pop(f"common{i}")
            if variable is not None:
                part = part_of(variable)
                variable.assign(array if part is None else part.own(array))
        stacks = [found.pop(f"own{i}") for i in range(len(found.facts["own"]))]
        same = all(len(stack) == self._replicas.size for stack in stacks)
        return RankValues([self._of_replica(stack, same) for stack in stacks], same)

    def restore_rank_variables(self, values: RankValues) -> None:
        """Set the metrics and seeds of this replica."""
        restore_rank_variables(self._model, values)

    def _held(self) -> Iterator[_Held]:
        """Yield the replicated variables of the whole model, in the order of one process."""
        for variable in self._model.weights:
            stages = self._holders.get(id(variable), (0,))
            yield _Held(variable, stages[0], variable if self._messages.stage in stages else None)
        optimizer = self._model.optimizer
        own = {v.path: v for v in optimizer.variables}
        first = {v.path.replace("/", "_"): self._stage_of(v) for v in self._model.trainable_variables}
        for variable in whole_optimizer(optimizer, self._model.trainable_variables).variables:
            slot = variable.path.rpartition("/")[2]
            reference = max((path for path in first if slot.startswith(f"{path}_")), key=len, default=None)
            yield _Held(variable, first.get(reference or "", 0), own.get(variable.path))

    def _stage_of(self, variable: Any) -> int:
        """Return the first stage that holds a variable; metrics are on the last one."""
        return self._holders.get(id(variable), (self._messages.stages - 1,))[0]

    def _stacked(self, variable: Any) -> Array | None:
        value = np.array(variable.value.numpy())
        return self._replicas.host.gather_at_root(value) if self._replicas.size > 1 else value[None]

    def _of_replica(self, stack: Array, same: bool) -> Array:
        if same:
            return np.asarray(stack[self._replicas.rank])
        return np.asarray(stack.sum(0, dtype=stack.dtype) if self._replicas.rank == 0 else np.zeros_like(stack[0]))

    def _at_first_stage(self, stage: int, array: Array | None) -> Array | None:
        """Return an array of a stage on the first stage of the first replica. *Collective* among the stages."""
        if self._replicas.rank or self._shard or stage == 0:
            return array
        if self._messages.stage == stage and array is not None:
            self._messages.send(0, ACTIVATIONS, _STATE, (array.shape, array.dtype), [np.ascontiguousarray(array)])
            self._messages.finish()
        if self._messages.stage:
            return None
        shape, dtype = self._messages.receive_header(stage, ACTIVATIONS, _STATE)
        received = np.empty(shape, dtype)
        self._messages.receive(stage, ACTIVATIONS, _STATE, received)
        return received
