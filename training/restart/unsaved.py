"""A warning of variables of the training step that checkpoints do not hold."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np

from matex_data.training.exact.digests import content_digest
from matex_data.training.exact.variables import optimizer_variables, optimizers
from matex_data.training.reduction.graphs import OWN_VARIABLE

log = logging.getLogger("matex_data.training")
LOOKED_AT = 3
"""Epochs after which the variables are looked at: each time they are copied from the device."""


class UnsavedVariables(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that warns once if the step reads variables that change and that checkpoints do not hold."""

    def __init__(self) -> None:
        super().__init__()
        self._steps, self._told = 0, False
        self._first = 0  # epoch
        self._digests: dict[Any, int] = {}  # of these variables, when it last looked

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Note the epoch with which training begins."""
        if self._steps == 0:
            self._first = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Look at the variables after the first step, and again after the second one."""
        if self._steps in (1, 2):
            self._look()
        self._steps += 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Look at the variables once more after each of the first epochs: callbacks may change them."""
        if epoch - self._first < LOOKED_AT:
            self._look()

    def _look(self) -> None:
        variables = [] if self._told else self._variables()
        before = self._digests
        self._digests = {v.ref(): content_digest(np.asarray(v.numpy())) for v in variables}
        changed = [v for v in variables if before.get(v.ref(), self._digests[v.ref()]) != self._digests[v.ref()]]
        if changed:
            self._told = True
            log.warning(
                "the checkpoint does not hold variables that training steps read and that have changed: %s\n"
                "  remedy: make them weights of the model by add_weight(..., trainable=False); otherwise a restarted "
                "run begins with their first values, unless the script or a callback sets them",
                ", ".join(map(self._described, changed)),
            )

    def _variables(self) -> list[Any]:
        """Return the variables of TensorFlow that the step reads, beside those of the model and its optimizers."""
        model = self.model
        held = [*model.variables, *model.metrics_variables, *optimizer_variables(model)]
        known = {v.value.ref() if isinstance(v, keras.Variable) else v.ref() for v in held}
        read = getattr(model.train_step, "read", [])
        return [v for v in read if v.ref() not in known and not v.name.startswith(OWN_VARIABLE)]

    def _described(self, variable: Any) -> str:
        """Return the name, dtype and shape of a variable, and the attribute that holds it if one is found."""
        names = [
            f"{name} of {type(owner).__name__}"
            for owner in (self.model, self.model.loss, *optimizers(self.model))
            for name, value in getattr(owner, "__dict__", {}).items()
            if variable is value or (isinstance(value, keras.Variable) and variable is value.value)
        ]
        return f"{names[0] if names else variable.name} ({variable.dtype.name}{list(variable.shape)})"
