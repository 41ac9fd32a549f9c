"""``ShardedModel``: a Keras model whose layers compute on all shards of a mesh."""

from __future__ import annotations

import logging
from typing import Any

from matex_data.training.keras_api import note_variables
from matex_data.training.layouts.containers import Container
from matex_data.training.partition.optimizer import PartOptimizer, inner_optimizer
from matex_data.training.layouts.plan import Plan, plan
from matex_data.training.layouts.rules import running
from matex_data.training.layouts.shards import Shards
from matex_data.training.mesh import Mesh
from matex_data.training.partition.deferred import initialize, is_absent, is_deferred
from matex_data.training.partition.parts import (
    Section,
    cut,
    hiding_parts,
    hold_alike,
    part_of,
    restore,
    slots,
    whole_on_all,
)
from matex_data.training.partition.values import broadcast_in

log = logging.getLogger("matex_data.training")


class ShardedModel:
    """Context manager: each shard holds its part of the weights of a built model, and computes with it. *Collective*.

    A model that was built whole is whole again afterwards. One that was deferred stays in parts, and its layers keep
    their rules, so that ``evaluate`` and ``predict`` work on all ranks.

    Parameters
    ----------
    model : built Keras model; its optimizer is not built, or was built for these parts.
    mesh : ranks, and the layouts of the model.

    Raises
    ------
    PartitionError : on all ranks, if the layouts do not fit the model.
    """

    def __init__(self, model: Any, mesh: Mesh) -> None:
        self.model = model
        self.shards = Shards(mesh)
        self._plan: Plan = plan(model, mesh.layouts or mesh.layout_map(auto=True), self.shards)
        self._kept = any(is_deferred(variable) for variable, _ in self._plan.cuts)
        self._inner = inner_optimizer(model.optimizer)
        self._optimizer = PartOptimizer(model.optimizer, self.shards.total)
        self._whole = [variable for variable, _ in self._plan.cuts if part_of(variable) is None]

    def __enter__(self) -> ShardedModel:
        made = self._plan
        if vars(self.model).get("_matex_sharded"):
            return self
        if made.gathered and self.shards.mesh.world.rank == 0:
            log.warning(
                "no rule computes with parts of the weights of %s: they are gathered in every step", ", ".join(made.gathered)
            )
        before = {id(v): tuple(v.shape) for v in self.model.variables}
        self._distribute()
        self._distribute_slots(before)
        for rule in made.rules:
            rule.install()
        for container in made.containers:
            object.__setattr__(container.functional, "call", ContainerCall(container))
        if not isinstance(vars(self.model).get("call"), ContainerCall):
            object.__setattr__(self.model, "call", HidingCall(self.model))
        self._optimizer.__enter__()
        if self.model.jit_compile:
            self._disable_xla()
        object.__setattr__(self.model, "_matex_sharded", self)
        return self

    def __exit__(self, *_: object) -> None:
        if self._kept:
            return
        object.__delattr__(self.model, "_matex_sharded")
        for container in self._plan.containers:
            object.__delattr__(container.functional, "call")
        vars(self.model).pop("call", None)
        for rule in self._plan.rules:
            rule.uninstall()
        self._optimizer.__exit__()
        for variable in [*self._whole, *(slot for slot, _ in self._slots)]:
            restore(variable, whole_on_all(variable))
        note_variables(self._inner, self.model.trainable_variables)

    def _disable_xla(self) -> None:
        if self.shards.mesh.world.rank == 0:
            log.warning("XLA cannot compile communication: %s trains without jit_compile", self.model.name)
        object.__setattr__(self.model, "_jit_compile", False)

    def _distribute(self) -> None:
        """Give each shard its part of the variables."""
        axes = {id(variable): axis for variable, axis in self._plan.cuts}
        channel = self.shards.channel
        for variable in self.model.variables:
            if is_absent(variable):
                initialize(variable)
            if part_of(variable) is not None:
                continue
            if not is_deferred(variable):
                broadcast_in(channel, [variable])
            if id(variable) in axes:
                cut(variable, Section(channel, tuple(variable.shape), axes[id(variable)]))


    def _distribute_slots(self, shapes: dict[int, tuple[int, ...]]) -> None:
        """Build the optimizer for the parts; or cut its state, if it was built for whole variables.

        Parameters
        ----------
        shapes : of the variables before they were cut, by id.
        """
        trainable = [v for v in self.model.trainable_variables if part_of(v) is not None]
        if self._inner.built:
            note_variables(self._inner, self.model.trainable_variables)
        else:
            self.model.optimizer.build(self.model.trainable_variables)
        self._slots = []
        for slot, variable in slots(self.model.optimizer, trainable):
            part, shape = part_of(variable), tuple(slot.shape)
            if part is None or part_of(slot) is not None or shape not in (tuple(variable.shape), shapes[id(variable)]):
                continue
            self._slots.append((slot, variable))
            if shape == tuple(variable.shape):
                hold_alike(slot, variable)
            else:
                broadcast_in(self.shards.channel, [slot])
                cut(slot, part)


class ContainerCall:
    """``call`` of a functional model, within which tensors may stay cut."""

    def __init__(self, container: Container) -> None:
        self._functional = container.functional
        self._call = container.functional.call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layers of the model."""
        token = running.set(self._functional)
        try:
            with hiding_parts():
                return self._call(*args, **kwargs)
        finally:
            running.reset(token)


class HidingCall:
    """``call`` of a model of the user's own, whose code must not take parts for wholes."""

    def __init__(self, model: Any) -> None:
        self._call = model.call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        with hiding_parts():
            return self._call(*args, **kwargs)
