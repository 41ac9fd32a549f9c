"""Learning rates for larger global batches: opt-in callbacks."""

from __future__ import annotations

from typing import Any

import keras

from matex_data.training.comm.world import world


class ScaledLearningRate(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """Multiply the learning rate by ``factor``, reached step by step within the first epochs.

    The linear scaling rule with gradual warm-up (Goyal et al. 2017, arXiv:1706.02677). For batches that grow with the
    number of ranks; a global batch that stays the same needs no other learning rate.

    Parameters
    ----------
    factor : None: the number of ranks.
    warm_up : epochs in which the learning rate grows from the optimizer's own to ``factor`` times it; 0: at once.

    Raises
    ------
    ValueError : the optimizer's learning rate is a schedule.
    """

    def __init__(self, factor: float | None = None, warm_up: float = 5) -> None:
        super().__init__()
        self._factor = float(world().size if factor is None else factor)
        self._warm_up = warm_up
        self._base = 0.0
        self._epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Find the learning rate to begin with."""
        if not isinstance(self._rate(), keras.Variable):
            raise ValueError("the learning rate is a schedule: multiply the schedule itself")
        self._base = self._base or float(self._rate().numpy())

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Set it once the warm-up is over, and leave it to others from then on."""
        self._epoch = epoch
        if epoch == 0 and not self._warm_up:
            self._rate().assign(self._base * self._factor)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Grow a little."""
        steps = self.params.get("steps") or 1
        done = (self._epoch + (batch + 1) / steps) / self._warm_up if self._warm_up else 2.0
        if done < 1 + 1 / (steps * self._warm_up or 1):
            self._rate().assign(self._base * (1 + (self._factor - 1) * min(done, 1.0)))

    def _rate(self) -> Any:
        optimizer = self.model.optimizer
        return getattr(optimizer, "inner_optimizer", optimizer)._learning_rate
