"""Shards of the layers of a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matex_data.mpi.polling import poll
from matex_data.training.model_parallel.graph import Container, containers
from matex_data.training.model_parallel.layouts.cut_model import CutLayers, another_mesh, layouts_of
from matex_data.training.model_parallel.layouts.plan import plans
from matex_data.training.model_parallel.layouts.ranks import ModelRanks
from matex_data.training.model_parallel.mesh import Mesh
from matex_data.training.model_parallel.stages.checks import layers_of
from matex_data.training.model_parallel.stages.cut import StagePlan
from matex_data.training.model_parallel.stages.stage import StageLayers
from matex_data.training.partition.parts import LEAVE_SECONDS, all_leave, part_of
from matex_data.training.zero.optimizer import Totals, check_elementwise


class StageShards:
    """Ranks that compute the layers of a stage together, each its part. *Collective* among them.

    If the mesh has one shard, nothing is cut.

    Parameters
    ----------
    mesh : ranks, and the layouts of the model.

    Attributes
    ----------
    rank, size : number of this shard, and of all.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._shards = ModelRanks(mesh) if mesh.shape[2] > 1 else None
        self.rank, self.size = mesh.coordinates.shard, mesh.shape[2]
        self._layers: CutLayers | None = None
        self._installed = False

    def plan(self, model: Any, stages: Sequence[StagePlan], layers: StageLayers, outputs: Sequence[int]) -> None:
        """Plan how the layers of all stages are cut, which all ranks do alike.

        Parameters
        ----------
        stages : stages of the model.
        layers : layers of the stage of this rank.
        outputs : numbers of the outputs of the model.

        Raises
        ------
        PartitionError : the layouts or the optimizer do not fit the model, or it is in parts on another mesh.
        """
        if self._shards is None:
            return
        check_elementwise(model.optimizer)
        for variable in model.variables:
            part = part_of(variable)
            if part is not None and part.channel is not self._shards.channel:
                raise another_mesh(self._mesh.shape)
        groups: list[tuple[list[Any], list[Container]]] = []
        for stage in stages:
            inner = [x for layer in layers_of(stage) for x in layer._flatten_layers()]
            owner = layers if stage.number == self._mesh.coordinates.stage else stage
            leaving = outputs if stage is stages[-1] else stage.sends
            calls = [(call.operation, call.inputs, call.outputs) for call in stage.calls]
            groups.append((inner, [Container.linked(owner, calls, leaving), *containers(inner)]))
        made = plans(model, groups, layouts_of(self._mesh), self._shards)
        self._layers = CutLayers(made[self._mesh.coordinates.stage], self._shards)
        if self._mesh.coordinates.replica == self.rank == 0:
            self._layers.warn_of_gathered()

    def install(self) -> None:
        """Give each shard its part of the variables of the stage, and let the layers compute with it."""
        if self._layers is not None:
            self._layers.install()
            self._installed = True

    def uninstall(self, optimizer: Any, joined: bool) -> None:
        """Undo ``install`` and ``take_optimizer``.

        Parameters
        ----------
        joined : variables are whole again; otherwise they stay in parts.
        """
        if self._layers is not None and self._installed:
            self._layers.uninstall(optimizer, joined)
            self._installed = False

    def take_optimizer(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build an optimizer for the variables of the stage, or for their parts."""
        if self._layers is not None:
            self._layers.take_optimizer(optimizer, variables)
        elif not optimizer.built:
            optimizer.build(variables)

    def totals(self) -> Totals:
        """Return the sums over the shards, for an optimizer of parts."""
        return [] if self._shards is None else [(self._shards.channel, self._shards.total)]

    def check_rows(self, digest: int) -> None:
        """Raise an error if the shards have different batches.

        Parameters
        ----------
        digest : checksum of the batch of this rank.

        Raises
        ------
        PartitionError : on all shards.
        """
        if self._shards is not None:
            self._shards.check_digest(digest, self._shards.channel.host)

    def all_leave(self, kind: type[BaseException] | None) -> bool:
        """Return whether all shards leave a context; see ``parts.all_leave``."""
        return self._shards is None or all_leave(self._shards.channel, kind)

    def all_failed(self) -> bool:
        """Return whether all shards have failed, which then can agree on an error; one that waits in a graph cannot."""
        if self._shards is None:
            return True
        return poll(self._shards.channel.host.comm.Ibarrier().Test, LEAVE_SECONDS)
