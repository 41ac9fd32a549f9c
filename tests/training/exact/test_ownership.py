"""What a step writes and applies from a rank's rows alone, as its graph shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

from matex_data.training.exact.ownership import Ownership
from matex_data.training.reduction.ops import REDUCED


def _reduced(tensor: Any) -> Any:
    """Return a tensor as a reduction over the ranks gives it."""
    with tf.name_scope(REDUCED):
        out = tf.numpy_function(lambda x: x, [tensor], tensor.dtype)
    out.set_shape(tensor.shape)
    return out


def _in_cond(variable: Any, x: Any) -> None:
    tf.cond(tf.reduce_sum(x) > 0, lambda: variable.assign(1.0), lambda: variable.assign(0.0))


def _read_in_loop(variable: Any, x: Any) -> None:
    tf.while_loop(lambda i, _: i < 3, lambda i, total: (i + 1, total + variable), [0, tf.reduce_sum(x)])


def _written_in_loop(variable: Any, x: Any) -> None:
    tf.while_loop(lambda i: i < 3, lambda i: (i + tf.cast(variable.assign_add(1.0) > 0, tf.int32),), [0])


STEPS: dict[str, tuple[Callable[[Any, Any], Any], list[bool]]] = {
    "a constant": (lambda v, x: v.assign(1.0), [False]),
    "a sum of rows": (lambda v, x: v.assign(tf.reduce_sum(x)), [True]),
    "a reduced sum": (lambda v, x: v.assign(_reduced(tf.reduce_sum(x))), [False]),
    "an average times a sum": (lambda v, x: v.assign(_reduced(tf.reduce_sum(x)) * tf.reduce_max(x)), [True]),
    "by a condition": (_in_cond, [True]),
    "read in a loop": (_read_in_loop, []),
    "written in a loop": (_written_in_loop, [False]),
    "the number of rows": (lambda v, x: v.assign_add(tf.cast(tf.shape(x)[0], tf.float32)), [True]),
}


@pytest.mark.parametrize("name", STEPS)
def test_writes(name: str) -> None:
    variable, (step, expected) = tf.Variable(2.0), STEPS[name]
    function = tf.function(lambda x: step(variable, x), autograph=False)
    concrete = function.get_concrete_function(tf.TensorSpec([None]))
    ownership = Ownership(concrete.graph, concrete.inputs[:1])
    assert [own.rows for _, own in ownership.writes()] == expected
