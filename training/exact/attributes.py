"""State that calls of layers and checks leave as it was: attributes that code decides by, variables, random numbers."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from matex_data.training.keras_api import CHANGED_BY_CALLS, SET_BY_KERAS
from matex_data.training.replacements import Replacements

PLAIN = (bool, int, float, complex, str, bytes, np.ndarray, np.generic, type(None))
"""Types of attributes that Python code may decide by; tensors and layers are no such state."""


class Attributes:
    """Attributes of a model, its layers and its metrics, which can be compared with later ones.

    Only attributes count that a class outside of Keras defines, and of these plain values and containers of them.
    """

    def __init__(self, model: Any) -> None:
        owners = {id(x): x for x in (*model._flatten_layers(), *model.metrics, model)}
        self.owners = [x for x in owners.values() if not type(x).__module__.startswith("keras.")]
        self._values: dict[int, dict[str, Any]] = {}
        for owner in self.owners:
            self.note(owner)

    def note(self, owner: Any) -> None:
        """Take the present attributes of an object as those before."""
        self._values[id(owner)] = {name: _copy(value) for name, value in vars(owner).items() if _is_own(name)}

    def changed(self) -> list[str]:
        """Return the attributes with plain values that changed, or are new, with the names of their owners."""
        return [
            f"{getattr(owner, 'name', type(owner).__name__)}.{name}"
            for owner in self.owners
            for name, value in list(vars(owner).items())
            if _is_own(name) and _is_plain(value) and not _equal(self._values[id(owner)].get(name, _MISSING), value)
        ]

    def restore(self) -> None:
        """Give attributes with plain values or tensors what they had before, or delete them."""
        for owner in self.owners:
            for name, value in list(vars(owner).items()):
                old = self._values[id(owner)].get(name, _MISSING)
                if not _is_own(name) or not (_is_plain(value) or tf.is_tensor(value)) or _equal(old, value):
                    continue
                if old is _MISSING:
                    object.__delattr__(owner, name)
                else:
                    object.__setattr__(owner, name, _restored(value, old))


_MISSING = object()
_PREFIXES = ("_matex_", *SET_BY_KERAS)
"""Beginnings of attributes that Keras, TensorFlow and this package set."""


@functools.cache
def _names_of_keras() -> set[str]:
    """Return the attributes of Keras's own objects.

    Not computed when this module is imported: a metric has variables, which initialize TensorFlow. The objects are
    named, since Keras would count them, and give the layers of a script other names.
    """
    objects = keras.layers.Layer(name="layer"), keras.Model(name="model"), keras.metrics.Mean(name="mean")
    return {*CHANGED_BY_CALLS}.union(*(vars(x) for x in objects))


def _is_own(name: str) -> bool:
    """Return whether an attribute is of the class of a script, neither of Keras nor of TensorFlow."""
    return name not in _names_of_keras() and not name.startswith(_PREFIXES)


def _is_plain(value: Any) -> bool:
    """Return whether a value is plain, or a container of plain values."""
    if isinstance(value, dict | list | tuple | set | frozenset):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, PLAIN)


def _copy(value: Any) -> Any:
    """Return a value with containers and arrays copied; other objects are shared."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        kind = list if isinstance(value, list) else tuple if isinstance(value, tuple) else set
        return kind(_copy(item) for item in value)
    return value.copy() if isinstance(value, np.ndarray) else value


def _restored(now: Any, before: Any) -> Any:
    """Return the earlier value; in a container that others may refer to, put back its items."""
    if isinstance(now, list) and isinstance(before, list):
        now[:] = before
        return now
    if isinstance(now, dict | set) and isinstance(before, dict | set):
        now.clear()
        now.update(before)
        return now
    return before


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return type(a) is type(b) and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return a is b or (type(a) is type(b) and isinstance(a, (*PLAIN, set)) and (a == b or (a != a and b != b)))


@contextlib.contextmanager
def kept_by_calls(model: Any) -> Iterator[None]:
    """Context manager: attributes that calls of layers change are restored; what ``build`` sets stays.

    To create the variables of a model, Keras calls its layers, of which a later first call must not differ.
    """
    attributes = Attributes(model)
    with Replacements() as replacements:
        for layer in attributes.owners:
            if isinstance(layer, keras.layers.Layer) and "build" in vars(layer):
                replacements.set(layer, "build", _noting(layer, layer.build, attributes))
        try:
            yield
        finally:
            attributes.restore()


def _noting(layer: Any, build: Callable[..., Any], attributes: Attributes) -> Callable[..., Any]:
    """Return a method that builds a layer and notes the attributes that it then has."""

    @functools.wraps(build)  # Keras reads its signature and marks
    def noted(*args: Any, **kwargs: Any) -> Any:
        result = build(*args, **kwargs)
        attributes.note(layer)
        return result

    return noted


@contextlib.contextmanager
def kept_random_state() -> Iterator[None]:
    """Context manager: restore the random numbers of Python and NumPy."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def random_state() -> list[Any]:
    """Return the states of the random numbers of Python and NumPy, as JSON holds them."""
    version, numbers, gauss = random.getstate()
    kind, keys, *rest = np.random.get_state()
    return [[version, list(numbers), gauss], [kind, np.asarray(keys).tolist(), *rest]]


def set_random_state(state: Sequence[Any]) -> None:
    """Set the random numbers of Python and NumPy to states that ``random_state`` has returned."""
    (version, numbers, gauss), (kind, keys, *rest) = state
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state((kind, np.array(keys, np.uint32), *rest))


@contextlib.contextmanager
def kept_variables(variables: Sequence[Any]) -> Iterator[list[Any]]:
    """Context manager: restore variables of TensorFlow; yields their values before.

    The values are tensors, of which TensorFlow copies those that are written.
    """
    before = [tf.identity(variable.read_value()) for variable in variables]
    try:
        yield before
    finally:
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value, read_value=False)
