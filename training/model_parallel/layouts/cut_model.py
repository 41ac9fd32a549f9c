"""Layers that compute with parts of their variables, and ``CutModel``, which consists of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.locks import setting
from matex_data.training.exact.variables import inner_optimizer
from matex_data.training.keras_api import get_keras_mask, note_variables, set_keras_mask
from matex_data.training.model_parallel.deferred import initialize, is_absent, is_deferred
from matex_data.training.model_parallel.graph import called_once, containers
from matex_data.training.model_parallel.layouts.entropy import CutEntropy, takes_cut_logits
from matex_data.training.model_parallel.layouts.plan import Plan, plans
from matex_data.training.model_parallel.layouts.ranks import ModelRanks
from matex_data.training.model_parallel.layouts.rules import Gathered, Units, running
from matex_data.training.model_parallel.mesh import Mesh, RankLayoutMap
from matex_data.training.partition.parts import (
    AxisPart,
    all_leave,
    broadcast_in,
    cut,
    hiding_parts,
    hold_alike,
    join_variable,
    part_of,
    slots,
)
from matex_data.training.reduction.graphs import disable_xla
from matex_data.training.replacements import Replacements, replaced
from matex_data.training.zero.optimizer import PartOptimizer, check_elementwise

log = logging.getLogger("matex_data.training")


class CutLayers:
    """Layers of a model, or of a stage, that compute with parts of their variables. *Collective* among their ranks."""

    def __init__(self, plan: Plan, ranks: ModelRanks) -> None:
        self._plan, self._ranks = plan, ranks
        self._whole = [variable for variable, _ in plan.cuts if part_of(variable) is None]
        self._shapes: dict[int, tuple[int, ...]] = {}
        self._replacements = Replacements()

    def install(self) -> None:
        """Give each rank its part of the variables, and let the layers compute with it."""
        self._shapes = {id(v): tuple(v.shape) for v in self._plan.variables}
        self._distribute()
        for rule in self._plan.rules:
            rule.install()
        for container in self._plan.containers:
            self._replacements.set(container.owner, "call", HidingCall(container.owner.call, container.owner))

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
        for variable in [*self._whole, *optimizer.variables] if joined else ():
            part = part_of(variable)
            if part is not None and part.channel is self._ranks.channel:
                join_variable(variable)

    def take_optimizer(self, optimizer: Any, variables: Sequence[Any]) -> None:
        """Build an optimizer for the parts of variables; or cut its state, if it was built for whole ones."""
        if not optimizer.built:
            optimizer.build(variables)
        elif self._plan.cuts:
            note_variables(optimizer, variables)
        for slot, variable in slots(optimizer, variables) if self._plan.cuts else ():
            part = part_of(variable)
            if part is None or part_of(slot) is not None:
                continue
            if tuple(slot.shape) == tuple(variable.shape):
                hold_alike(slot, variable)
            elif tuple(slot.shape) == self._shapes.get(id(variable)):
                broadcast_in(self._ranks.channel, [slot])
                cut(slot, part)

    def warn_of_gathered(self) -> None:
        """Warn of layers without a rule."""
        names = ", ".join(rule.layer.path for rule in self._plan.rules if isinstance(rule, Gathered))
        if names:
            log.warning("no rule computes with parts of the weights of %s: they are gathered in every step", names)

    def _distribute(self) -> None:
        axes = {id(variable): axis for variable, axis in self._plan.cuts}
        channel = self._ranks.channel
        for variable in self._plan.variables:
            if is_absent(variable):
                initialize(variable)
            if part_of(variable) is not None:
                continue
            if not is_deferred(variable):
                broadcast_in(channel, [variable])
            if id(variable) in axes:
                cut(variable, AxisPart(channel, tuple(variable.shape), axes[id(variable)]))
        for variable, _ in self._plan.cuts:
            if variable.regularizer is not None and not isinstance(variable.regularizer, PartRegularizer):
                variable.regularizer = PartRegularizer(variable, self._ranks)


class HidingCall:
    """Method whose own code must not take parts of weights for wholes.

    Parameters
    ----------
    container : functional model or stage that it calls, within which tensors may stay cut; None: as around it.
    """

    def __init__(self, wrapped: Callable[..., Any], container: Any = None) -> None:
        self.wrapped, self._container = wrapped, container

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        container = running.get() if self._container is None else self._container
        with setting(running, container), hiding_parts():
            return self.wrapped(*args, **kwargs)


class PartRegularizer:
    """Regularizer of a variable of which each rank holds a part. *Collective*."""

    def __init__(self, variable: Any, ranks: ModelRanks) -> None:
        self.original = variable.regularizer
        self._ranks = ranks

    def __call__(self, variable: Any) -> Any:
        """Return the penalty of the whole variable; its gradient is that of this part."""
        part = part_of(variable)
        assert isinstance(part, AxisPart)
        with hiding_parts(False):
            return tf.autograph.experimental.do_not_convert(self._penalty)(tf.convert_to_tensor(variable), part.axis)

    def _penalty(self, value: Any, axis: int) -> Any:
        if type(self.original) in (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2):
            return self._ranks.summed(self.original(value))
        return self.original(self._ranks.gathered(value, axis))


def cut_model(model: Any, mesh: Mesh, element_spec: Any, owned: bool = False) -> CutModel:
    """Return the context manager of a model on a mesh; that of an earlier training, if it is still in parts.

    Raises
    ------
    PartitionError : on all ranks, if the layouts do not fit the model, or if it is in parts on another mesh.
    """
    found: CutModel = vars(model).get("_matex_cut_model") or CutModel(model, mesh, element_spec)
    if found.ranks.mesh is not mesh:
        raise another_mesh(mesh.shape)
    found.owned = owned
    return found


def another_mesh(shape: tuple[int, ...]) -> PartitionError:
    """Return the error of a model that is in parts on another mesh than that of this shape."""
    return PartitionError(
        "this model is in parts on another mesh",
        expected="the mesh with which it was trained",
        found=f"another one, of shape {shape}",
        remedy="give the same mesh; or write a checkpoint, and resume from it with a new model",
    )


class CutModel:
    """Context manager: each rank holds its part of the weights of a built model, and computes with it. *Collective*.

    A model that was built whole is whole again afterwards. One that was deferred stays in parts, and its layers keep
    their rules, so that ``evaluate`` and ``predict`` work on all ranks.

    Parameters
    ----------
    model : built Keras model; its optimizer is not built, or was built for these parts.

    Attributes
    ----------
    owned : the state of the optimizer is about to be cut over the replicas, too.

    Raises
    ------
    PartitionError : on all ranks, if the layouts do not fit the model.
    """

    owned = False

    def __init__(self, model: Any, mesh: Mesh, element_spec: Any) -> None:
        _check_step(model)
        self.model = model
        self.ranks = ModelRanks(mesh)
        layers = list(model._flatten_layers())
        groups = [(layers, containers(layers))]
        (self._plan,) = plans(model, groups, layouts_of(mesh), self.ranks, element_spec)
        self._layers = CutLayers(self._plan, self.ranks)
        self._kept = any(is_deferred(variable) for variable, _ in self._plan.cuts)
        check_elementwise(model.optimizer)
        self._entropy = Replacements()

    def __enter__(self) -> CutModel:
        if "_matex_cut_model" in vars(self.model):  # still in parts
            if self._inner is not inner_optimizer(self.model.optimizer):  # compiled again
                self._take_optimizer()
            self._entropy.restore()
            self._leave_logits_cut()
            return self
        if self.ranks.mesh.world.rank == 0:
            self._layers.warn_of_gathered()
        self._layers.install()
        self._take_optimizer()
        call, loss = _checked(self.model.call, self.ranks), HidingCall(self.model.compute_loss)
        self._replacements = replaced(self.model, call=call, compute_loss=loss, _matex_cut_model=self)
        disable_xla(self.model, self.ranks.mesh.world.rank, self._replacements)
        self._leave_logits_cut()
        self._forget_functions()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._kept or not all_leave(self.ranks.channel, kind):
            return
        self._entropy.restore()
        self._replacements.restore()
        self._optimizer.__exit__()
        self._layers.uninstall(self.model.optimizer, joined=True)
        note_variables(self.model.optimizer, self.model.trainable_variables)
        self._forget_functions()

    def _forget_functions(self) -> None:
        """Let Keras trace the steps of the model again: variables and layers have changed."""
        for name in ("train_function", "test_function", "predict_function"):
            object.__setattr__(self.model, name, None)

    def _leave_logits_cut(self) -> None:
        """Let the loss take the logits of each rank, if the model's output is theirs and is used for nothing else."""
        functional = getattr(self.model, "_functional", self.model)
        calls = [call for c in self._plan.containers if c.owner is functional for call in c.calls]
        ends = [call for call in calls if -1 in call.users]
        made = {id(rule.layer): rule for rule in self._plan.rules}
        single = (
            len(ends) == 1 and ends[0].users == (-1,) and id(ends[0].operation) in called_once(self._plan.containers)
        )
        rule = made.get(id(ends[0].operation)) if single else None
        steps_are_own = "train_step" in vars(self.model)  # those of matex run
        if isinstance(rule, Units) and not steps_are_own and takes_cut_logits(self.model):
            linear = rule.layer.activation in (None, keras.activations.linear)
            if linear and rule.can_give_cut and rule.layer.activity_regularizer is None:
                rule.gives_logits, rule.container = True, functional
                self._entropy = CutEntropy(self.model, self.ranks).installed()

    def _take_optimizer(self) -> None:
        """Build the optimizer for the parts, unless replicas own sections of them; or cut its state. *Collective*."""
        optimizer = self.model.optimizer
        self._inner, self._optimizer = inner_optimizer(optimizer), PartOptimizer(optimizer, self.ranks.totals())
        if optimizer.built or not self.owned:
            self._layers.take_optimizer(optimizer, self.model.trainable_variables)
        self._optimizer.__enter__()


def layouts_of(mesh: Mesh) -> RankLayoutMap:
    """Return the layouts of a mesh; if it has none, a map that proposes them."""
    return mesh.layout_map(auto=True) if mesh.layouts is None else mesh.layouts


def _check_step(model: Any) -> None:
    """Raise ``PartitionError`` if a model has a step of its own, which would take parts of gradients for wholes."""
    for name in ("train_step", "test_step"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise PartitionError(
                "a model with a step of its own cannot be cut over ranks: the step may compute with parts of gradients",
                field=f"{type(model).__name__}.{name}",
                expected="the step of keras.Model; losses and metrics given to compile()",
                found=f"{name} of {type(model).__module__}",
                remedy="leave it out, or train on the rows of each rank, without a mesh",
            )


def _checked(call: Callable[..., Any], ranks: ModelRanks) -> Callable[..., Any]:
    """Return ``call`` of the whole model for inputs that are equal on all ranks, whose code takes no part for a whole.

    It is *collective*.
    """
    check_equal = tf.autograph.experimental.do_not_convert(ranks.check_equal)

    def checked(inputs: Any, *args: Any, **kwargs: Any) -> Any:
        leaves = keras.tree.flatten(inputs)
        numbers = [i for i, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor) and leaf.dtype != tf.string]
        with tf.control_dependencies([check_equal([leaves[i] for i in numbers])] if numbers else []):
            copies = {i: tf.identity(leaves[i]) for i in numbers}
        for i, copy in copies.items():
            set_keras_mask(copy, get_keras_mask(leaves[i]))
        inputs = keras.tree.pack_sequence_as(inputs, [copies.get(i, leaf) for i, leaf in enumerate(leaves)])
        with hiding_parts():
            return call(inputs, *args, **kwargs)

    return checked
