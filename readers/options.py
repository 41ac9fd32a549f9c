"""Options that a user gives to a reader: it has to have them, and they have to be of its types."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np

from matex_data.errors import FormatError, near_matches

_KINDS: dict[Any, tuple[type, ...]] = {
    int: (Integral,),
    float: (Real,),
    bool: (bool, np.bool_),
    str: (str,),
    types.NoneType: (types.NoneType,),
}
"""Types that can be told by a value alone, and what counts as one of them."""


def check_options(format: str, function: Callable[..., Any], given: Mapping[str, Any], leading: int) -> None:
    """Compare what the user has given with the signature of a reader. One with ``**options`` looks at them itself.

    Parameters
    ----------
    format : name of the format, for messages.
    function : the reader.
    leading : how many of its parameters are not the user's.

    Raises
    ------
    FormatError : the reader has no such option, lacks one, or gets one of another type.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())[leading:]
    except (TypeError, ValueError):  # not written in Python
        return
    own = [p for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if not any(p.kind == p.VAR_KEYWORD for p in parameters):
        check_names(format, given, [p.name for p in own])
    for parameter in own:
        if parameter.default is parameter.empty and parameter.name not in given:
            raise FormatError(f"the reader of {format!r} files needs the option {parameter.name}=")
    check_types(given, _hints(function))


def check_names(format: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Look for options that the reader does not have.

    Raises
    ------
    FormatError : there is one; all that there are are listed, the nearest first.
    """
    for name in given:
        if name not in known:
            raise FormatError(
                f"the reader of {format!r} files has no option {name!r}",
                expected=f"one of {near_matches(name, known, len(known))}" if known else "no options",
                remedy="check the spelling; help(matex_data.open_dataset) lists what all formats have",
            )


def check_types(given: Mapping[str, Any], hints: Mapping[str, Any]) -> None:
    """Compare values with annotations, as far as a look at the value tells.

    Raises
    ------
    FormatError : a value is of another type.
    """
    for name, value in given.items():
        kinds = _alternatives(hints.get(name, Any))
        if not any(_fits(value, kind) for kind in kinds):
            raise FormatError(
                f"the option {name}= has no such value",
                expected=" or ".join(_named(kind) for kind in kinds),
                found=repr(value),
            )


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(function)
    except (AttributeError, NameError, TypeError):  # names that only type checkers see
        return {}


def _alternatives(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _fits(value: Any, kind: Any) -> bool:
    if kind in _KINDS:
        return isinstance(value, _KINDS[kind]) and (kind is bool or not isinstance(value, bool))
    if get_origin(kind) is Sequence:
        return isinstance(value, Collection) and not isinstance(value, str | bytes | Mapping)
    return True


def _named(kind: Any) -> str:
    if get_origin(kind) is Sequence:
        return "a list"
    return {str: "a text", bool: "True or False", int: "an integer", float: "a number"}.get(kind, "None")
