"""Random numbers by row: a shard of a batch draws the numbers that the whole batch draws for its rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.training.keras_api import keras_random
from matex_data.training.replacements import Replacements, replaced

_stateless_uniform = tf.random.stateless_uniform
_stateless_normal = tf.random.stateless_normal


@contextlib.contextmanager
def draws_for_rows(rows: tuple[Any, Any], total: Any) -> Iterator[Callable[[], bool]]:
    """Context manager: draw the random numbers of these rows of a whole batch, with fixed seeds.

    It gives a function that returns whether any were drawn.

    Replaces dropout and the random functions of Keras and TensorFlow that take a shape; restores NumPy's state at the
    end.

    Parameters
    ----------
    rows : first row of the shard, and the one after its last; numbers or scalar int32 tensors.
    total : number of rows of the whole batch, like ``rows``.
    """
    source = _Source(*rows, total)
    state = np.random.get_state()
    try:
        with Replacements() as replacements:
            for owner, name, draw in _patches(source):
                replacements.set(owner, name, _unless_fixed(draw, getattr(owner, name), owner is keras_random))
            yield lambda: source.number > 0
    finally:
        np.random.set_state(state)


def _unless_fixed(draw: Callable[..., Any], original: Callable[..., Any], of_keras: bool) -> Callable[..., Any]:
    """Return a function that draws, but leaves the first values of variables to the original one.

    So it does numbers that a seed fixes, ``keras.random.normal(shape, seed=3)`` or ``tf.random.stateless_normal(shape,
    (1, 2))``: in a step each rank draws them alike, whatever its rows are.
    """
    stateless = original in (_stateless_uniform, _stateless_normal)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        seed = kwargs.get("seed", args[1] if stateless and len(args) > 1 else None)
        if of_keras and isinstance(seed, int):
            with replaced(tf.random, stateless_uniform=_stateless_uniform, stateless_normal=_stateless_normal):
                return original(*args, **kwargs)
        fixed = stateless and tf.get_static_value(tf.stack(seed)) is not None
        initializing = "Initializer" in tf.get_current_name_scope()
        return (original if initializing or fixed else draw)(*args, **kwargs)

    return chosen


class _Source:
    """Random numbers of a whole batch, from which a shard takes its rows."""

    def __init__(self, start: Any, stop: Any, total: Any) -> None:
        self._start, self._stop, self._total = start, stop, total
        self.number = 0

    def draw(self, shape: Any, kind: Callable[..., Any] = _stateless_uniform) -> Any:
        """Return float32 numbers; if the first axis has the rows of the shard, those of the whole batch are drawn.

        A first axis of several times these rows, of a size that follows from the batch, has them in blocks, such as the
        rows that a generator makes, and those of the data behind them.
        """
        self.number += 1
        seed = [self.number, 0]
        sizes = tf.reshape(tf.convert_to_tensor(shape, tf.int32), [-1])
        known = tf.get_static_value(sizes)
        if sizes.shape[0] == 0:
            return kind(sizes, seed)
        rows = tf.maximum(tf.cast(self._stop - self._start, tf.int32), 1)
        blocks = 1 if _is_fixed(shape) else tf.maximum(sizes[0] // rows, 1)
        of_shard = sizes[0] == blocks * (self._stop - self._start)
        blocks, first, last, drawn = (
            tf.where(of_shard, tf.cast(of_rows, tf.int32), other)
            for of_rows, other in ((blocks, 1), (self._start, 0), (self._stop, sizes[0]), (self._total, sizes[0]))
        )
        numbers = kind(tf.concat([(blocks * drawn)[None], sizes[1:]], 0), seed)
        out = tf.reshape(tf.reshape(numbers, tf.concat([[blocks, drawn], sizes[1:]], 0))[:, first:last], sizes)
        if known is not None:
            out.set_shape(known)
        elif isinstance(shape, list | tuple):
            out.set_shape([size if isinstance(size, int) else None for size in shape])
        return out

    def normal(self, shape: Any) -> Any:
        return self.draw(shape, _stateless_normal)

    def integers(self, shape: Any, low: Any, high: Any) -> Any:
        low, high = float(low), float(high)
        return tf.floor(low + self.draw(shape) * (high - low))

    def keep(self, inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
        """Apply dropout."""
        inputs = tf.convert_to_tensor(inputs)
        shape = (
            tf.shape(inputs)
            if noise_shape is None
            else tf.stack([tf.shape(inputs)[i] if own is None else own for i, own in enumerate(noise_shape)])
        )
        kept = tf.cast(self.draw(shape) >= rate, inputs.dtype)
        return inputs * kept / tf.cast(1 - rate, inputs.dtype)


def _is_fixed(shape: Any) -> bool:
    """Return whether the size of the first axis does not follow from the data."""
    first = shape[0] if isinstance(shape, list | tuple) else tf.convert_to_tensor(shape)[0]
    return tf.get_static_value(first) is not None


def _patches(source: _Source) -> list[tuple[Any, str, Any]]:
    """Return the functions that draw, each with its owner and name."""

    def floats(default: Callable[[], Any]) -> dict[str, Callable[..., Any]]:
        """Return functions with this dtype unless they are given one."""

        def scaled(numbers: Any, mean: Any, stddev: Any, dtype: Any) -> Any:
            return tf.cast(mean + stddev * numbers, dtype or default())

        def normal(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, *_: Any, **__: Any) -> Any:
            return scaled(source.normal(shape), mean, stddev, dtype)

        def truncated(shape: Any, mean: Any = 0.0, stddev: Any = 1.0, dtype: Any = None, *_: Any, **__: Any) -> Any:
            return scaled(tf.clip_by_value(source.normal(shape), -2, 2), mean, stddev, dtype)

        def uniform(shape: Any, minval: Any = 0, maxval: Any = None, dtype: Any = None, *_: Any, **__: Any) -> Any:
            if tf.as_dtype(dtype or default()).is_integer:
                return tf.cast(source.integers(shape, minval, maxval), dtype)
            return scaled(source.draw(shape), minval, (1 if maxval is None else maxval) - minval, dtype)

        return {"normal": normal, "truncated_normal": truncated, "uniform": uniform}

    def randint(shape: Any, minval: Any, maxval: Any, dtype: Any = "int32", seed: Any = None) -> Any:
        return tf.cast(source.integers(shape, minval, maxval), dtype)

    def dropout(x: Any, rate: Any, noise_shape: Any = None, *_: Any, **__: Any) -> Any:
        return source.keep(x, rate, noise_shape)

    def stateless(draw: Callable[..., Any]) -> Callable[..., Any]:
        return lambda shape, seed, *args, **kwargs: draw(shape, *args, **kwargs)

    of_tensorflow = floats(lambda: tf.float32)
    return [
        *((keras_random, name, draw) for name, draw in floats(keras.config.floatx).items()),
        *((tf.random, name, draw) for name, draw in of_tensorflow.items()),
        (tf.random, "stateless_normal", stateless(of_tensorflow["normal"])),
        (tf.random, "stateless_uniform", stateless(of_tensorflow["uniform"])),
        (tf.nn, "dropout", dropout),
        (keras_random, "dropout", source.keep),
        (keras_random, "randint", randint),
    ]
