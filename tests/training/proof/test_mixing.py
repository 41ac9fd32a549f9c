"""Computations that combine the samples of a batch, or depend on its size: none is proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from matex_data.training.proof.axes import Mixed, PerSample
from matex_data.training.proof.propagate import follow
from tests.training.proof.soundness import followed

SPEC = tf.TensorSpec([None, 6])
IMAGES = tf.TensorSpec([None, 8, 8, 4])
PERMUTED = np.random.default_rng(0).permutation(6).tolist()


def _rows(x: Any) -> Any:
    return tf.shape(x)[0]


def _loop_over_rows(x: Any) -> Any:
    return tf.map_fn(lambda row: row / tf.norm(row), x)


def _discriminated(x: Any) -> Any:
    """Return minibatch discrimination (Salimans et al. 2016)."""
    distances = tf.reduce_sum(tf.abs(x[:, None] - x[None]), -1)
    return tf.concat([x, tf.reduce_sum(tf.exp(-distances), 1, keepdims=True)], 1)


def _deviation(x: Any) -> Any:
    """Return the standard deviation of the batch as a feature, as in progressive GANs (Karras et al. 2018)."""
    deviation = tf.reduce_mean(tf.math.reduce_std(x, 0))
    return tf.concat([x, tf.fill([_rows(x), 1], deviation)], 1)


def _virtual(x: Any) -> Any:
    """Return virtual batch normalization: groups of two rows."""
    groups = tf.reshape(x, [-1, 2, 6])
    return tf.reshape(groups - tf.reduce_mean(groups, 1, keepdims=True), [-1, 6])


def _while_sum(x: Any) -> Any:
    return tf.while_loop(lambda z: tf.reduce_sum(z) > 1.0, lambda z: (z / 2,), [x])[0]


def _mean_in_loop(x: Any) -> Any:
    return tf.while_loop(lambda i, z: i < 2, lambda i, z: (i + 1, z - tf.reduce_mean(z, 0)), [0, x])[1]


def _late_mean_in_loop(x: Any) -> Any:
    """Return a loop whose second variable takes over the first, which is mixed one step later."""
    step = lambda i, a, b, c: (i + 1, b, c, c - tf.reduce_mean(c, 0))  # noqa: E731
    return tf.while_loop(lambda i, a, b, c: i < 3, step, [0, x, x, x])[1]


MIXING: dict[str, Callable[[Any], Any]] = {
    "mean of the batch": lambda x: x - tf.reduce_mean(x, 0),
    "variance": lambda x: x / tf.math.reduce_std(x, 0),
    "largest of the batch": lambda x: x / tf.reduce_max(x),
    "pairs": lambda x: tf.matmul(x, x, transpose_b=True),
    "pairs by broadcasting": lambda x: x[:, None] - x,
    "covariance": lambda x: tf.matmul(x, tf.matmul(x, x, transpose_a=True)),
    "negatives in the batch": lambda x: tf.nn.log_softmax(tf.einsum("ik,jk->ij", x, x)),
    "rows and columns": lambda x: x[:, :1] + tf.transpose(x[:, :1]),
    "normalized by everything": lambda x: tf.math.l2_normalize(x),
    "softmax over rows": lambda x: tf.nn.softmax(x, axis=0),
    "mean of a mask": lambda x: tf.reduce_sum(x * tf.cast(x > 0, x.dtype)) / tf.reduce_sum(tf.cast(x > 0, x.dtype)),
    "minibatch discrimination": _discriminated,
    "deviation as a feature": _deviation,
    "virtual batch normalization": _virtual,
    "reversed rows": lambda x: tf.reverse(x, [0]),
    "reversed rows by a slice": lambda x: x[::-1],
    "every second row": lambda x: x[::2],
    "all rows but one": lambda x: tf.concat([x[1:], x[:1]], 0),
    "first row": lambda x: x - x[0],
    "first row, gathered": lambda x: x - tf.gather(x, [0]),
    "last row": lambda x: x - x[-1:],
    "row by its number": lambda x: tf.gather_nd(x, tf.stack([tf.range(_rows(x)), tf.range(_rows(x))], 1)),
    "rolled rows": lambda x: tf.roll(x, 1, 0),
    "running sum of rows": lambda x: tf.cumsum(x, 0),
    "sorted rows": lambda x: tf.sort(x, axis=0),
    "shuffled rows": lambda x: tf.random.shuffle(x),
    "folded rows": lambda x: tf.reshape(x, [-1, 12]),
    "rows as features": lambda x: tf.reshape(x, [6, -1]),
    "rows and features exchanged": lambda x: tf.reshape(tf.transpose(x), [-1, 6]),
    "flat": lambda x: tf.sort(tf.reshape(x, [-1])),
    "without axes of one": lambda x: tf.squeeze(x[:, :1]),
    "pool over rows": lambda x: tf.nn.max_pool1d(x[None], 2, 1, "SAME")[0],
    "convolution over rows": lambda x: tf.nn.conv1d(x[None], tf.ones([2, 6, 6]), 1, "SAME")[0],
    "pool over transposed rows": lambda x: tf.nn.avg_pool1d(tf.transpose(x)[..., None], 2, 1, "SAME")[..., 0],
    "divided by the number of rows": lambda x: x / tf.cast(_rows(x), x.dtype),
    "number of rows as a feature": lambda x: x + tf.cast(tf.fill([_rows(x), 1], _rows(x)), x.dtype),
    "position in the batch": lambda x: x * tf.cast(tf.range(_rows(x)), x.dtype)[:, None],
    "parity of the number of rows": lambda x: tf.cond(_rows(x) % 2 == 0, lambda: x, lambda: -x),
    "table of rows": lambda x: x + tf.random.stateless_normal([4, 6], [1, 2])[: _rows(x)],
    "constant with rows": lambda x: x + np.ones([4, 6], np.float32),
    "decided by the mean": lambda x: tf.cond(tf.reduce_mean(x) > 0, lambda: x, lambda: -x),
    "case of the mean": lambda x: tf.switch_case(tf.cast(tf.reduce_mean(x), tf.int32), [lambda: x, lambda: -x]),
    "steps by the sum": _while_sum,
    "mean in a loop": _mean_in_loop,
    "mean in a later step": _late_mean_in_loop,
    "scan over rows": lambda x: tf.scan(lambda total, row: total + row, x),
    "loop over rows": _loop_over_rows,
    "mask of rows": lambda x: tf.boolean_mask(x, x[:, 0] > 0),
    "positions of values": lambda x: tf.where(x > 0),
    "unique values": lambda x: tf.unique(x[:, 0])[0],
    "segments": lambda x: tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0], tf.int32), 3),
    "scattered rows": lambda x: tf.scatter_nd(tf.cast(x[:, :1], tf.int32), x, [4, 6]),
    "one draw for all rows": lambda x: x * tf.random.uniform([]),
    "one draw for all rows, of a layer": lambda x: x + tf.random.normal([1, 6]),
    "mean in a function": lambda x: x - tf.function(lambda z: tf.reduce_mean(z, 0))(x),
    "Python": lambda x: tf.ensure_shape(tf.py_function(lambda z: z - tf.reduce_mean(z), [x], x.dtype), [None, 6]),
    "NumPy": lambda x: tf.ensure_shape(tf.numpy_function(lambda z: z - z.mean(), [x], x.dtype), [None, 6]),
    "quantized by the range of the batch": lambda x: tf.quantization.quantize_and_dequantize_v2(x, 0.0, 0.0),
    "square matrix of rows": lambda x: tf.linalg.inv(tf.matmul(x, x, transpose_b=True)),
    "Fourier transform over rows": lambda x: tf.math.real(tf.signal.fft(tf.cast(tf.transpose(x), tf.complex64))),
    "diagonal over rows": lambda x: tf.einsum("ii->i", tf.matmul(x, tf.zeros([6, 6])) * 0 + x),
    "batch and vector": lambda x: tf.linalg.matvec(tf.transpose(x), x[:, 0]),
    "gradient of the mean": lambda x: tf.gradients(tf.square(tf.reduce_mean(x)), x)[0],
}  # fmt: skip


@pytest.mark.parametrize("name", MIXING)
def test_is_not_proven(name: str) -> None:
    found = followed(MIXING[name], SPEC)
    assert not isinstance(found.outputs[0], PerSample) or found.effects, found.outputs


def test_batch_statistics_outside_of_layers_are_mixed() -> None:
    def normalized(x: Any) -> Any:
        return tf.compat.v1.nn.fused_batch_norm(x, tf.ones([4]), tf.zeros([4]), is_training=True)[0]

    assert isinstance(followed(normalized, IMAGES).outputs[0], Mixed)


def test_the_reason_names_layer_and_operation() -> None:
    def layer(x: Any) -> Any:
        with tf.name_scope("block"), tf.name_scope("centre"):
            return x - tf.reduce_mean(x, 0)

    (output,) = followed(layer, SPEC).outputs
    assert isinstance(output, Mixed)
    assert str(output.reasons[0]) == "block/centre: Mean averages rows, and the result enters Sub"


def test_a_fixed_number_of_rows_is_not_followed() -> None:
    graph = tf.function(lambda x: x / x.shape[0]).get_concrete_function(tf.TensorSpec([4, 6])).graph
    assert isinstance(follow(graph, [0]).outputs[0], Mixed)


def test_writes_from_the_batch_are_effects() -> None:
    memory, steps = tf.Variable(tf.zeros([6])), tf.Variable(0)

    def count(x: Any) -> Any:
        steps.assign_add(1)
        return x

    def remember(x: Any) -> Any:
        memory.assign(0.9 * memory + 0.1 * tf.reduce_mean(x, 0))
        return x - memory

    def count_rows(x: Any) -> Any:
        steps.assign_add(_rows(x))
        return x

    assert followed(count, SPEC).effects == []
    assert [reason.operation for reason in followed(remember, SPEC).effects] == ["AssignVariableOp"]
    assert [reason.operation for reason in followed(count_rows, SPEC).effects] == ["AssignAddVariableOp"]


def test_gradients_of_others_are_effects() -> None:
    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def scaled(x: Any) -> Any:
        return tf.identity(x), lambda upstream: upstream / tf.reduce_sum(tf.abs(upstream))

    @keras.ops.custom_gradient  # type: ignore[untyped-decorator]
    def clipped(x: Any) -> Any:
        return x + 1, lambda *args, upstream=None: keras.ops.clip(args[0] if args else upstream, -1, 1)

    for function in (scaled, clipped):
        found = followed(function, SPEC)
        assert [type(output) for output in found.outputs] == [PerSample]
        assert [reason.why for reason in found.effects] == [f"has a gradient that {__name__} defines"]


def test_gradients_of_tensorflow_are_no_effects() -> None:
    found = followed(lambda x: tf.nn.silu(tf.grad_pass_through(tf.round)(x)), SPEC)
    assert ([type(output) for output in found.outputs], found.effects) == ([PerSample], [])


def test_a_gradient_that_replaces_another_is_an_effect() -> None:
    @tf.RegisterGradient("MixedRelu")  # type: ignore[untyped-decorator]
    def gradient(op: Any, upstream: Any) -> Any:
        return upstream - tf.reduce_mean(upstream)

    def guided(x: Any) -> Any:
        with tf.compat.v1.get_default_graph().gradient_override_map({"Relu": "MixedRelu"}):
            return tf.nn.relu(x)

    assert [reason.operation for reason in followed(guided, SPEC).effects] == ["Relu"]
