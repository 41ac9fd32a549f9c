"""Layers of a stage as one layer of Keras."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from matex_data.training.keras_api import get_keras_mask, set_keras_mask
from matex_data.training.layouts.containers import Call as ChainCall
from matex_data.training.layouts.containers import Container
from matex_data.training.partition.cut import StagePlan


def stage_container(plan: StagePlan, outputs: Sequence[int], owner: Any) -> Container:
    """Return the calls of a stage in the form of a functional model; see ``Container``.

    Parameters
    ----------
    outputs : numbers of the tensors that leave the stage.
    owner : what runs the stage.
    """
    maker = {number: i for i, call in enumerate(plan.calls) for number in call.outputs}
    users: list[list[int]] = [[] for _ in plan.calls]
    for i, call in enumerate(plan.calls):
        for number in call.inputs:
            if number in maker:
                users[maker[number]].append(i)
    for number in outputs:
        if number in maker:
            users[maker[number]].append(-1)
    calls = [
        ChainCall(call.operation, tuple(maker.get(number, -1) for number in call.inputs), tuple(users[i]))
        for i, call in enumerate(plan.calls)
    ]
    return Container(owner, calls)


class StageLayers(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Layers of a stage, which share their variables with the model.

    Parameters
    ----------
    plan : calls of the stage, and the tensors that it exchanges.
    outputs : numbers of the tensors to return: those that the stage sends, or the outputs of the model.
    regularized : variables whose regularizers count here: those that no stage before this one has.
    """

    def __init__(self, plan: StagePlan, outputs: Sequence[int], regularized: Sequence[Any]) -> None:
        super().__init__(name=f"stage{plan.number}", autocast=False)
        self._matex_plan, self._matex_outputs = plan, tuple(outputs)
        self._matex_regularized = {id(variable) for variable in regularized}
        operations = {id(call.operation): call.operation for call in plan.calls}
        self.layers = [operation for operation in operations.values() if isinstance(operation, keras.layers.Layer)]
        self._matex_masked: tuple[int, ...] = ()
        self.built = True

    def set_masked(self, positions: Sequence[int]) -> None:
        """Set the positions of the received tensors that have masks."""
        object.__setattr__(self, "_matex_masked", tuple(positions))

    def call(self, tensors: Sequence[Any], training: bool = False) -> tuple[list[Any], list[Any]]:
        """Return the outputs, and their masks, which may be None.

        Parameters
        ----------
        tensors : the inputs of the model that the stage takes, the tensors that it receives, and masks of these.
        """
        plan = self._matex_plan
        numbers = (*plan.inputs, *plan.receives)
        values = dict(zip(numbers, tensors, strict=False))
        for position, mask in zip(self._matex_masked, tensors[len(numbers) :], strict=True):
            set_keras_mask(values[plan.receives[position]], mask)
        for call in plan.calls:
            call.run(values, training)
        outputs = [values[number] for number in self._matex_outputs]
        return outputs, [get_keras_mask(output) for output in outputs]

    def own_loss(self) -> Any:
        """Return the sum of the losses that the latest call has added, and of regularizers; None if there is none."""
        losses = [loss for layer in self._flatten_layers() for loss in layer._get_own_losses()]
        regularized = [v for v in self.trainable_weights if id(v) in self._matex_regularized]
        losses += [v.regularizer(v) for v in regularized if v.regularizer is not None]
        floats = [keras.ops.sum(keras.ops.cast(loss, "float32")) for loss in losses]
        return sum(floats[1:], floats[0]) if floats else None

    def changing_variables(self) -> list[Any]:
        """Return the variables that a call may change: seeds, moving statistics, states; not frozen weights."""
        frozen = {id(v) for layer in self._flatten_layers() for v in layer._trainable_variables}
        return [v for v in self.non_trainable_variables if id(v) not in frozen]
