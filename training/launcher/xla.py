"""Functions of a script that XLA compiles, and that communicate: XLA has no operation that calls Python."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from matex_data.training.reduction import graphs
from matex_data.training.replacements import patch

log = logging.getLogger("matex_data.training")


def patch_functions(rank: int) -> None:
    """Let ``tf.function`` leave XLA where a function averages gradients; rank 0 says so once."""
    notice = functools.cache(functools.partial(_say, rank))

    def function(original: Any, func: Any = None, *args: Any, jit_compile: Any = None, **options: Any) -> Any:
        if not jit_compile:
            return original(func, *args, jit_compile=jit_compile, **options)
        if func is None:
            return functools.partial(function, original, *args, jit_compile=jit_compile, **options)
        make = functools.partial(original, func, *args, **options)
        return CompiledFunction(make, notice)

    patch(tf, function, "function")


class CompiledFunction:
    """Function of TensorFlow that XLA compiles, unless it communicates.

    Parameters
    ----------
    make : returns the function, given ``jit_compile``.
    notice : called when the function is traced without XLA.
    """

    def __init__(self, make: Callable[..., Any], notice: Callable[[], None]) -> None:
        self._make, self._notice = make, notice
        self._function = make(jit_compile=True)
        self._compiled = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; trace it again without XLA if it communicates."""
        if self._compiled:
            with graphs.compiled_by_xla() as trace:
                try:
                    return self._function(*args, **kwargs)
                except Exception:
                    if not trace.communicates:
                        raise
            self._function, self._compiled = self._make(), False
            self._notice()
        return self._function(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._function, name)


def _say(rank: int) -> None:
    if rank == 0:
        log.warning("a function with jit_compile=True averages gradients over the ranks: it runs without XLA")
