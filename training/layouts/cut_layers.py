"""Layers of a plan that compute with parts of their variables."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from matex_data.training.keras_api import note_variables
from matex_data.training.layouts.containers import Container
from matex_data.training.layouts.plan import Plan
from matex_data.training.layouts.rules import running
from matex_data.training.layouts.shards import Shards
from matex_data.training.partition.deferred import initialize, is_absent, is_deferred
from matex_data.training.partition.parts import (
    Section,
    broadcast_in,
    cut,
    hiding_parts,
    hold_alike,
    join,
    part_of,
    slots,
)
from matex_data.training.replacements import Replacements, setting

log = logging.getLogger("matex_data.training")


class CutLayers:
    """Layers of a model, or of a stage, that compute with parts of their variables. *Collective* among the shards.

    Parameters
    ----------
    plan : their plan.
    shards : that hold the parts.
    """

    def __init__(self, plan: Plan, shards: Shards) -> None:
        self._plan, self._shards = plan, shards
        self._whole = [variable for variable, _ in plan.cuts if part_of(variable) is None]
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._replacements = Replacements()

    def install(self) -> None:
        """Give each shard its part of the variables, and let the layers compute with it."""
        self._shapes = {id(v): tuple(v.shape) for v in self._plan.variables}
        self._distribute()
        for rule in self._plan.rules:
            rule.install()
        for container in self._plan.containers:
            self._replacements.set(container.owner, "call", ContainerCall(container))

    def uninstall(self, optimizer: Any, joined: bool) -> None:
        """Undo ``install`` and ``take_optimizer``.

        Parameters
        ----------
        joined : variables that were whole, and the state of the optimizer, are whole again; otherwise they stay cut.
        """
        self._replacements.restore()
        for variable, _ in self._plan.cuts:
            if isinstance(variable.regularizer, PartRegularizer):
                variable.regularizer = variable.regularizer.original
        for rule in self._plan.rules:
            rule.uninstall()
        if joined:
            for variable in [*self._whole, *(v for v in optimizer.variables if part_of(v) is not None)]:
                join(variable)

    def take_optimizer(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build an optimizer for the parts of variables; or cut its state, if it was built for whole ones."""
        if optimizer.built:
            note_variables(optimizer, variables)
        else:
            optimizer.build(variables)
        for slot, variable in slots(optimizer, variables):
            part = part_of(variable)
            if part is None or part_of(slot) is not None:
                continue
            if tuple(slot.shape) == tuple(variable.shape):
                hold_alike(slot, variable)
            elif tuple(slot.shape) == self._shapes.get(id(variable)):
                broadcast_in(self._shards.channel, [slot])
                cut(slot, part)

    def warn_of_gathered(self) -> None:
        """Warn of layers without a rule."""
        if self._plan.gathered:
            names = ", ".join(self._plan.gathered)
            log.warning("no rule computes with parts of the weights of %s: they are gathered in every step", names)

    def _distribute(self) -> None:
        axes = {id(variable): axis for variable, axis in self._plan.cuts}
        channel = self._shards.channel
        for variable in self._plan.variables:
            if is_absent(variable):
                initialize(variable)
            if part_of(variable) is not None:
                continue
            if not is_deferred(variable):
                broadcast_in(channel, [variable])
            if id(variable) in axes:
                cut(variable, Section(channel, tuple(variable.shape), axes[id(variable)]))
        for variable, _ in self._plan.cuts:
            if variable.regularizer is not None and not isinstance(variable.regularizer, PartRegularizer):
                variable.regularizer = PartRegularizer(variable, self._shards)


class ContainerCall:
    """``call`` of a functional model or stage, within which tensors may stay cut."""

    def __init__(self, container: Container) -> None:
        self._owner = container.owner
        self._call = container.owner.call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the layers."""
        with setting(running, self._owner), hiding_parts():
            return self._call(*args, **kwargs)


class PartRegularizer:
    """Regularizer of a variable of which each shard holds a part. *Collective*."""

    def __init__(self, variable: Any, shards: Shards) -> None:
        self.original = variable.regularizer
        self._shards = shards

    def __call__(self, variable: Any) -> Any:
        """Return the penalty of the whole variable; its gradient is that of this part."""
        part = part_of(variable)
        assert isinstance(part, Section)
        with hiding_parts(False):
            return tf.autograph.experimental.do_not_convert(self._penalty)(tf.convert_to_tensor(variable), part.axis)

    def _penalty(self, value: Any, axis: int) -> Any:
        if type(self.original) in (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2):
            return self._shards.summed(self.original(value))
        return self.original(self._shards.gathered(value, axis))
