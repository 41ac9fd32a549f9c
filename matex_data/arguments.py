"""Kinds of the arguments of public functions, as their annotations declare them."""

from __future__ import annotations

import os
import sys
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from functools import cache, wraps
from inspect import Parameter, signature
from itertools import islice
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np

from matex_data.errors import ArgumentError

Value = TypeVar("Value")
MOST_ITEMS = 1000  # of a list or a dict that are looked at
LARGEST = 2**63 - 1  # of whole numbers: they count samples and bytes
_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a text",
    bytes: "bytes",
    bool: "True or False",
    types.NoneType: "None",
    os.PathLike: "a path",
    Sequence: "a list",
    Iterable: "a list",
    Mapping: "a dict",
    Callable: "a function",
}


def check_arguments(function: Callable[..., Any], arguments: Mapping[str, Any], public: str = "") -> None:
    """Raise ``ArgumentError`` if a function is given something of another kind than it declares.

    Numbers of NumPy are numbers, and whatever has a length and an order is a list, but for texts and dicts. A set is
    none: ranks iterate it in different orders.
    Classes of other packages than mpi4py are for the function to judge.

    Parameters
    ----------
    function : with annotations.
    arguments : values by name, also of others, such as ``self``.
    public : name of the public function; "": that of this one.

    Examples
    --------
    >>> def repeat(text: str, times: int = 2) -> str:
    ...     check_arguments(repeat, locals())
    ...     return text * times
    >>> repeat("ab"), repeat("ab", np.int64(3))
    ('abab', 'ababab')
    >>> repeat("ab", "3")
    Traceback (most recent call last):
    matex_data.errors.ArgumentError: repeat() takes no times= of this kind
      expected: an integer
      found: '3'
      remedy: see help(repeat)
    """
    for name, (hint, is_many) in _declared(function).items():
        given = arguments.get(name, _MISSING)
        values = given if is_many and isinstance(given, tuple) else (given,)
        for value in values:
            if value is not _MISSING and not fits(value, hint):
                called = public or function.__qualname__
                raise ArgumentError(
                    f"{called.removeprefix('Dataset.')}() takes no {name if is_many else f'{name}='} of this kind",
                    expected=described(hint) + (f"; integers up to {LARGEST}" if _is_too_large(value) else ""),
                    found=_shortened(value),
                    remedy=f"{'give each as an argument of its own; ' if is_many else ''}see help({called})",
                )


_MISSING = object()


@cache
def _declared(function: Callable[..., Any]) -> dict[str, tuple[Any, bool]]:
    """Return the annotation of each parameter, and whether it stands for any number of values."""
    many = {one.name for one in parameters_of(function) or () if one.kind is Parameter.VAR_POSITIONAL}
    return {name: (hint, name in many) for name, hint in annotations_of(function).items()}


def _kept(compute: Callable[[Callable[..., Any]], Value]) -> Callable[[Callable[..., Any]], Value]:
    """Return a function of callables that keeps its values; a reader may be an object without a hash: not for these."""
    cached = cache(compute)

    @wraps(compute)
    def kept(function: Callable[..., Any]) -> Value:
        return cached(function) if isinstance(function, Hashable) else compute(function)

    return kept


@_kept
def parameters_of(function: Callable[..., Any]) -> tuple[Parameter, ...] | None:
    """Return the parameters of a function or class; None if it is not written in Python.

    Readers of a million files have few signatures: those that were asked for are kept.
    """
    try:
        return tuple(signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


@_kept
def annotations_of(function: Callable[..., Any]) -> Mapping[str, Any]:
    """Return the annotation of each parameter of a function or class, but of ``**options``.

    Those with names that only type checkers see are left out.

    Examples
    --------
    >>> def read(path: str, rows: int | None = None, **options: float) -> None: ...
    >>> annotations_of(read)
    {'path': <class 'str'>, 'rows': int | None}
    """
    names, found = getattr(function, "__globals__", None) or vars(sys.modules[function.__module__]), {}
    for one in parameters_of(function) or ():
        if one.kind is not Parameter.VAR_KEYWORD and one.annotation is not Parameter.empty:
            holder = types.SimpleNamespace(__annotations__={one.name: one.annotation})
            with suppress(AttributeError, NameError, TypeError):
                found[one.name] = typing.get_type_hints(holder, names)[one.name]
    return found


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of the kind of an annotation, as far as that can be told."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if kind is Literal:
        return any(isinstance(value, type(one)) and value == one for one in inner)
    if kind is int:
        is_whole = isinstance(value, Integral) and not isinstance(value, bool | np.timedelta64)
        return is_whole and not _is_too_large(value)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool | np.timedelta64)
    if kind is bool:
        return isinstance(value, bool | np.bool_) or (isinstance(value, int) and value in (0, 1))
    if kind is Sequence:
        is_list = isinstance(value, Iterable) and isinstance(value, Sized) and getattr(value, "ndim", 1) > 0
        is_list &= not isinstance(value, str | bytes | Mapping | set | frozenset)
        return is_list and (not inner or all(fits(item, inner[0]) for item in islice(value, MOST_ITEMS)))
    if kind is Mapping:
        is_dict = isinstance(value, Mapping)
        return is_dict and all(fits(k, inner[0]) and fits(v, inner[1]) for k, v in islice(value.items(), MOST_ITEMS))
    if kind is Iterable:
        return isinstance(value, Iterable) and not isinstance(value, str | bytes)
    if kind is Callable:
        return callable(value)
    is_own = isinstance(kind, type) and (kind in _WORDS or kind.__module__.startswith(("matex_data.", "mpi4py.")))
    return isinstance(value, kind) if is_own else True


def _is_too_large(value: Any) -> bool:
    return isinstance(value, Integral) and abs(int(value)) > LARGEST


def described(hint: Any) -> str:
    """Return the words for an annotation.

    >>> described(str | Sequence[str] | None)
    'a text, a list of: a text, or None'
    >>> described(Literal["mean", "sum"] | None)
    "'mean', 'sum', or None"
    """
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, types.UnionType, Literal):
        *first, last = dict.fromkeys(_alternatives(hint))
        return f"{', '.join(first)}{',' if len(first) > 1 else ''} or {last}" if first else last
    words = _WORDS.get(kind, getattr(kind, "__name__", str(kind)))
    if kind is Sequence and inner and inner[0] is not Any:
        return f"{words} of: {described(inner[0])}"
    if kind is Mapping and inner and inner[1] is not Any:
        return f"{words} of: {described(inner[1])}"
    return words


def _alternatives(hint: Any) -> Iterator[str]:
    """Yield the words for each kind that an annotation allows, and for each value."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        yield from map(repr, inner)
    elif kind in (Union, types.UnionType):
        for one in inner:
            yield from _alternatives(one)
    else:
        yield described(hint)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
