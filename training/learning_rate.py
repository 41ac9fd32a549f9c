"""Callbacks that adapt the learning rate to larger global batches."""

from __future__ import annotations

from typing import Any

import keras

from matex_data.arguments import check_arguments
from matex_data.training.comm.world import world
from matex_data.training.exact.variables import learning_rate


class ScaledLearningRate(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Callback that multiplies the learning rate by ``factor``, after a gradual warm-up.

    The linear scaling rule with warm-up of Goyal et al. 2017, arXiv:1706.02677. Use it if the global batch grows with
    the number of ranks; a global batch of constant size needs no other learning rate.

    Parameters
    ----------
    factor : multiple of the optimizer's learning rate after the warm-up; None: the number of ranks.
    warm_up : number of epochs, which may be a fraction, in which the learning rate grows linearly, after each batch;
        0: multiply it at once. If the number of batches is not known, it is that of the epoch before, and the rate does
        not grow within the first one. A training that begins after these epochs goes on with the rate that it has.

    Raises
    ------
    ValueError : when training begins, if the learning rate is a schedule.

    Examples
    --------
    >>> import keras, numpy as np, matex_data as md
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    >>> model.compile(keras.optimizers.SGD(0.125), "mse")
    >>> x = np.zeros((8, 1))
    >>> scale = md.training.ScaledLearningRate(factor=4, warm_up=2)
    >>> history = model.fit(x, x, batch_size=2, epochs=3, callbacks=[scale], verbose=0)
    >>> float(model.optimizer.learning_rate.numpy())
    0.5
    """

    def __init__(self, factor: float | None = None, warm_up: float = 5) -> None:
        check_arguments(ScaledLearningRate.__init__, locals(), "training.ScaledLearningRate")
        super().__init__()
        self._factor = float(world().size if factor is None else factor)
        self._warm_up = warm_up
        self._base = self._done = 0.0
        self._epoch = self._batches = self._latest = 0
        self._begins = True

    def on_train_begin(self, logs: Any = None) -> None:
        """Keep the optimizer's learning rate as the base."""
        if self._rate() is None:
            raise ValueError(
                "ScaledLearningRate cannot scale a learning rate schedule\n  remedy: multiply the schedule itself"
            )
        self._base = self._base or float(self._rate().numpy())
        self._begins = True

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Multiply the learning rate in the first epoch, if there is no warm-up."""
        begins, self._begins, self._epoch = self._begins, False, epoch
        if begins and not self._done and epoch and epoch >= self._warm_up:
            self._done = 1.0  # and the rate is that of a training before
        if not self._warm_up:
            self._grow(1.0)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the learning rate of this batch during the warm-up; other callbacks may change it afterwards."""
        steps, self._latest = self.params.get("steps") or self._batches, batch
        if self._warm_up:
            self._grow(min((self._epoch + ((batch + 1) / steps if steps else 0)) / self._warm_up, 1.0))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Keep the number of batches, which is not known: Keras begins one more, and finds the end of the data."""
        self._batches = self._latest

    def _grow(self, done: float) -> None:
        """Set the learning rate for a fraction of the warm-up, unless it has been set for more."""
        if done > self._done:
            self._done = done
            self._rate().assign(self._base * (1 + (self._factor - 1) * done))

    def _rate(self) -> Any:
        return learning_rate(self.model.optimizer)
