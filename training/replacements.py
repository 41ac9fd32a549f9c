"""Attributes that have other values for some time, and functions that are patched for good."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from types import ModuleType
from typing import Any, TypeVar

C = TypeVar("C", bound=AbstractContextManager[Any])
_ABSENT = object()


class Replacements:
    """Attributes of objects, classes and modules, replaced until the context ends.

    What was the object's own is restored, in reverse order; an attribute that it had from its class is deleted.
    Keras does not notice: its objects track what is assigned to them.
    """

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []
        self._suspended: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace an attribute."""
        self._before.append((owner, name, _get(owner, name)))
        _set(owner, name, value)

    def suspend(self) -> None:
        """Restore all attributes, and keep their present values for ``resume``."""
        present = {(id(owner), name): (owner, name, _get(owner, name)) for owner, name, _ in self._before}
        self._suspended = list(present.values())
        self.restore()

    def resume(self) -> None:
        """Give the attributes the values that they had before ``suspend``."""
        for owner, name, value in self._suspended:
            self.set(owner, name, value)
        self._suspended = []

    def restore(self) -> None:
        """Restore all attributes."""
        try:
            while self._before:
                _set(*self._before[-1])
                self._before.pop()
        except KeyboardInterrupt:  # it may come again and again
            self.restore()
            raise

    def __enter__(self) -> Replacements:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()


def replaced(owner: Any, **values: Any) -> Replacements:
    """Return a context manager in which attributes of an object have other values, from now on."""
    replacements = Replacements()
    try:
        for name, value in values.items():
            replacements.set(owner, name, value)
    except BaseException:
        replacements.restore()
        raise
    return replacements


def left_on_error(enter: Callable[[C], C]) -> Callable[[C], C]:
    """Decorate ``__enter__``: an error or an interrupt within it leaves the context, as one in a block does."""

    @functools.wraps(enter)
    def entered(context: C) -> C:
        try:
            return enter(context)
        except BaseException:
            context.__exit__(*sys.exc_info())
            raise

    return entered


def patch(owner: Any, call: Callable[..., Any], *names: str) -> None:
    """Replace functions of a module or class for good, also in sets of those of ``os`` that support options.

    Parameters
    ----------
    call : gets the original function, and the arguments.
    """
    for name in names:
        original = getattr(owner, name)

        @functools.wraps(original)
        def patched(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            return call(_original, *args, **kwargs)

        for supporting in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if owner is os and original in supporting:
                supporting.add(patched)
        setattr(owner, name, patched)


def _get(owner: Any, name: str) -> Any:
    """Return an attribute of the object's own."""
    lazy = isinstance(owner, ModuleType)  # some modules of TensorFlow have no names until these are used
    shown = lazy or hasattr(getattr(type(owner), name, None), "__set__")  # a property
    return getattr(owner, name) if shown else vars(owner).get(name, _ABSENT)


def _set(owner: Any, name: str, value: Any) -> None:
    plain = isinstance(owner, type | ModuleType)
    if value is _ABSENT:
        with suppress(AttributeError):  # deleted before an interrupt
            delattr(owner, name) if plain else object.__delattr__(owner, name)
    elif plain:
        setattr(owner, name, value)
    else:
        object.__setattr__(owner, name, value)
