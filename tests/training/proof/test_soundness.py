"""Random programs: what is proven about their results holds for numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import tensorflow as tf
from hypothesis import assume, given
from hypothesis import strategies as st

from matex_data.training.proof.axes import Mixed, PerSample
from tests.training.proof.soundness import check, followed

CONSTANT = np.arange(12, dtype=np.float32) / 7 - 0.5
Step = Callable[[Any, Any], Any]


def _axis(x: Any, number: int) -> int:
    return number % max(x.shape.rank, 1)


def _constant(x: Any, number: int) -> Any:
    """Return a constant that is broadcast along some axes of a tensor."""
    sizes = [size if size is not None and number >> i & 1 else 1 for i, size in enumerate(x.shape)]
    return tf.constant(np.resize(CONSTANT, sizes[number % 3 :]))


def _reshape(x: Any, number: int) -> Any:
    """Return the tensor in a shape with two neighbouring axes merged, or one split, by sizes of the graph."""
    sizes = [tf.shape(x)[i] for i in range(x.shape.rank)]
    at = _axis(x, number)
    if number % 2 and at + 1 < len(sizes):
        return tf.reshape(x, [*sizes[:at], sizes[at] * sizes[at + 1], *sizes[at + 2 :]])
    if x.shape[at] is not None and x.shape[at] % 2 == 0:
        return tf.reshape(x, [*sizes[:at], 2, sizes[at] // 2, *sizes[at + 1 :]])
    return tf.reshape(x, [-1, *sizes[1:]]) if number % 3 else tf.reshape(x, [sizes[0], -1])


def _loop(x: Any, y: Any, number: int) -> Any:
    return tf.while_loop(lambda i, _: i < 3, lambda i, z: (i + 1, tf.tanh(z) + 0.5 * y), [number % 2, x])[1]


def _scan(x: Any, number: int) -> Any:
    """Return running sums along an axis, by a loop over a list of tensors."""
    order = [_axis(x, number), *(i for i in range(x.shape.rank) if i != _axis(x, number))]
    return tf.scan(lambda total, one: total + one, tf.transpose(x, order))


STEPS: dict[str, Callable[[Any, Any, int], Any]] = {
    "transpose": lambda x, y, n: tf.transpose(x, np.roll(np.arange(x.shape.rank), n)),
    "reverse": lambda x, y, n: tf.reverse(x, [_axis(x, n)]),
    "roll": lambda x, y, n: tf.roll(x, 1, _axis(x, n)),
    "cumsum": lambda x, y, n: tf.cumsum(x, _axis(x, n)),
    "softmax": lambda x, y, n: tf.nn.softmax(x, _axis(x, n)),
    "mean": lambda x, y, n: tf.reduce_mean(x, _axis(x, n), keepdims=bool(n & 4)),
    "sum": lambda x, y, n: tf.reduce_sum(x, _axis(x, n), keepdims=bool(n & 4)),
    "max": lambda x, y, n: tf.reduce_max(x, _axis(x, n), keepdims=bool(n & 4)),
    "expand": lambda x, y, n: tf.expand_dims(x, n % (x.shape.rank + 1)),
    "reshape": lambda x, y, n: _reshape(x, n),
    "constant": lambda x, y, n: x * _constant(x, n),
    "other": lambda x, y, n: x + y,
    "outer": lambda x, y, n: x[..., None] - y,
    "product": lambda x, y, n: tf.matmul(x, y, transpose_b=bool(n & 1), transpose_a=bool(n & 2)),
    "gram": lambda x, y, n: tf.matmul(x, x, transpose_b=True),
    "einsum": lambda x, y, n: tf.einsum(("...a,...b->...ab", "...a,...a->...", "a...,a...->...")[n % 3], x, y),
    "first": lambda x, y, n: tf.gather(x, [0, 1], axis=_axis(x, n)),
    "slice": lambda x, y, n: x[:, :1] if n & 1 else x[: tf.shape(x)[0], ..., ::2],
    "tile": lambda x, y, n: tf.tile(x, [2 if i == _axis(x, n) else 1 for i in range(x.shape.rank)]),
    "stack": lambda x, y, n: tf.stack([x, tf.tanh(x)], n % (x.shape.rank + 1)),
    "concat": lambda x, y, n: tf.concat([x, x * 2], _axis(x, n)),
    "pad": lambda x, y, n: tf.pad(x, [[int(i == _axis(x, n)), 0] for i in range(x.shape.rank)]),
    "zeros": lambda x, y, n: tf.zeros_like(x) + tf.ones([tf.shape(x)[0], *[1] * (x.shape.rank - 1)]),
    "rows": lambda x, y, n: x / tf.cast(tf.shape(x)[_axis(x, n)], tf.float32),
    "top": lambda x, y, n: tf.math.top_k(x, 1)[0],
    "blocks": lambda x, y, n: tf.space_to_batch_nd(x, [2], [[0, 0]]) if n & 1 else tf.batch_to_space(x, [2], [[0, 0]]),
    "loop": _loop,
    "scan": lambda x, y, n: _scan(x, n),
    "branch": lambda x, y, n: tf.cond(tf.reduce_all(x > 0) if n & 1 else tf.constant(True), lambda: x, lambda: x + 1),
    "call": lambda x, y, n: tf.function(lambda z: z + tf.shape(z)[0] * 0.0 if n & 4 else tf.exp(z))(x),
    "swap": lambda x, y, n: y,
}  # fmt: skip


def _program(steps: list[tuple[str, int]]) -> Callable[..., Any]:
    """Return a function that takes steps, and leaves out those that do not fit the shapes."""

    def run(x: Any, y: Any) -> list[Any]:
        results = [x]
        for name, number in steps:
            try:
                results.append(STEPS[name](results[-1], y, number))
            except (ValueError, IndexError, TypeError, tf.errors.InvalidArgumentError):
                continue
        return results[-3:]

    return run


SPECS = (tf.TensorSpec([None, 4, 6]), tf.TensorSpec([None, 6, 4]), tf.TensorSpec([None, 4, 6]))


@given(st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 15)), min_size=1, max_size=6), st.booleans())
def test_what_is_proven_holds(steps: list[tuple[str, int]], square: bool) -> None:
    specs = SPECS[::2] if square else SPECS[:2]
    rng = np.random.default_rng(0)
    batch = [rng.normal(size=[5, *spec.shape[1:]]).astype(np.float32) for spec in specs]
    graph = tf.function(_program(steps), autograph=False).get_concrete_function(*specs)
    states = followed(_program(steps), *specs).outputs
    assume(not all(isinstance(state, Mixed) for state in states))
    with suppress(tf.errors.InvalidArgumentError):  # shapes that do not fit show late where sizes are unknown
        check(graph, states, batch)


def test_most_steps_alone_are_proven() -> None:
    """Keep the random programs from being mixed at once, which would prove nothing."""
    assert {name for name in STEPS if not any(_is_proven(name, n) for n in range(8))} == set()


def _is_proven(name: str, number: int) -> bool:
    return isinstance(followed(_program([(name, number)]), *SPECS[::2]).outputs[-1], PerSample)
