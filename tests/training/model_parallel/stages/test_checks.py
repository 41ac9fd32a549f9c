"""Find out what losses are that return one number for a batch."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from matex_data.errors import PartitionError
from matex_data.training.exact.losses import DistributedLoss
from matex_data.training.model_parallel.stages.checks import find_sums

TARGETS = np.random.default_rng(0).normal(size=(7, 2)).astype("f4")
FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "distances": lambda y, p: abs(y - p),
    "signed": lambda y, p: y * p,  # zero for predictions of zero, as of weights that begin with zeros; its slope is not
    "hinge": lambda y, p: tf.nn.relu(p - 1),
}


class _OfBatch(keras.losses.Loss):
    def __init__(self, reduce: Any, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self._reduce, self._function = reduce, function

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self._reduce(self._function(y_true, y_pred))


def _sums(reduce: Any, name: str, rows: int) -> bool | None:
    loss = DistributedLoss(_OfBatch(reduce, FUNCTIONS[name]), None)
    loss.given = TARGETS[:rows], tf.zeros((rows, 2))
    find_sums([loss], rows, weighted=False)
    return loss.sums


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_show_whether_a_loss_is_a_sum_unless_it_is_zero(name: str, rows: int) -> None:
    unknown = name == "hinge"
    assert _sums(tf.reduce_sum, name, rows) is (None if unknown else True)
    assert _sums(tf.reduce_mean, name, rows) is (None if unknown else False)


def test_a_loss_that_is_neither_a_sum_nor_a_mean_is_an_error() -> None:
    with pytest.raises(PartitionError, match="one number for a batch"):
        _sums(tf.norm, "distances", 7)
