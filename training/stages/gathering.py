"""Weights of all stages for callbacks that may read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

_READS_NO_WEIGHTS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.History,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TerminateOnNaN,
)
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")


def gathering_callbacks(gather: Callable[[], None], user_callbacks: Sequence[Any]) -> list[Any]:
    """Return the callback that gathers weights before those of the user run; none if these read no weights.

    Parameters
    ----------
    gather : gives every rank the weights of all stages. *Collective*.
    user_callbacks : callbacks of the user, on every rank those of all ranks.
    """
    readers = [callback for callback in user_callbacks if not _reads_no_weights(callback)]
    if not readers:
        return []
    in_epochs = any(_has_batch_hooks(callback) for callback in readers)
    return [_GatherAfterBatches(gather) if in_epochs else _GatherAfterEpochs(gather)]


def _reads_no_weights(callback: Any) -> bool:
    if type(callback) is keras.callbacks.EarlyStopping:
        return not callback.restore_best_weights
    return type(callback) in _READS_NO_WEIGHTS


def _has_batch_hooks(callback: Any) -> bool:
    if type(callback).__module__.startswith("keras.") and not isinstance(callback, keras.callbacks.LambdaCallback):
        return isinstance(callback, keras.callbacks.ModelCheckpoint) and callback.save_freq != "epoch"
    base = keras.callbacks.Callback
    return any(
        name in vars(callback) or getattr(type(callback), name) is not getattr(base, name) for name in _BATCH_HOOKS
    )


class _GatherAfterEpochs(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that gathers the weights of all stages at the end of each epoch. *Collective*.

    Parameters
    ----------
    gather : gives every rank the weights of all stages.
    """

    def __init__(self, gather: Callable[[], None]) -> None:
        super().__init__()
        self._gather = gather

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Gather the weights."""
        self._gather()

    def on_train_end(self, logs: Any = None) -> None:
        """Gather the weights, which the optimizer may have set to averages."""
        self._gather()


class _GatherAfterBatches(_GatherAfterEpochs):
    """Callback like ``_GatherAfterEpochs``, after each batch, too."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Gather the weights."""
        self._gather()
