"""Calls that wait until the script imports a package: what needs TensorFlow is not to be loaded before."""

from __future__ import annotations

import importlib.abc
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def after_import(packages: Sequence[str], call: Callable[[], None]) -> None:
    """Call a function once, now or when the first import of one of the packages has ended.

    An import within that of another of these packages, or of a module of this one, ends with the outermost: Keras
    imports TensorFlow before it is usable itself.
    """
    if any(name in sys.modules for name in packages):
        call()
    else:
        sys.meta_path.insert(0, _Finder(packages, call))


class _Finder(importlib.abc.MetaPathFinder):
    """Finder that leaves modules to the others, and notes when they have been executed."""

    def __init__(self, packages: Sequence[str], call: Callable[[], None]) -> None:
        self._packages, self._call = packages, call
        self._running = threading.local()  # number of imports

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name not in self._packages and not name.startswith("matex_data."):
            return None
        begin = sys.meta_path.index(self) + 1 if self in sys.meta_path else 0  # another thread may remove it
        others = sys.meta_path[begin:]
        spec = next((spec for other in others if (spec := other.find_spec(name, path, target))), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: self._execute(execute, module)  # type: ignore[method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        self._running.number = getattr(self._running, "number", 0) + 1
        try:
            execute(module)
        finally:
            self._running.number -= 1
        if not self._running.number and self in sys.meta_path and any(name in sys.modules for name in self._packages):
            sys.meta_path.remove(self)
            self._call()
