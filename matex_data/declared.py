"""Classes and functions that a stored index may name: those that are declared, and no others.

A name is looked up in a register, never along the dots of a module, so that a file can only name what a module of this
package, or of a registered reader, has declared for that purpose.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from importlib import import_module
from types import FunctionType
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

OWN_PACKAGES = tuple(f"matex_data.{name}" for name in ("codecs", "fields", "index", "readers", "storage"))
_DECLARED: dict[str, Any] = {}


def declared(thing: T) -> T:
    """Declare a class or a function, which an index may then contain; return it.

    Instances of a class consist of its dataclass fields, or of what its method ``to_json`` returns, from which its
    class method ``from_json`` makes them again. A function must be harmless whatever it is called with.

    Examples
    --------
    >>> @declared
    ... def negate(stored, out):
    ...     out[...] = -stored
    >>> name_of(negate)
    'matex_data.declared:negate'
    """
    _DECLARED[f"{thing.__module__}:{thing.__qualname__}"] = thing
    return thing


def name_of(thing: Any) -> str | None:
    """Return the name under which a class or a function is declared; None if it is not."""
    if not isinstance(thing, type | FunctionType):
        return None
    name = f"{thing.__module__}:{thing.__qualname__}"
    return name if _DECLARED.get(name) is thing else None


def declared_as(name: str, modules: Collection[str] = ()) -> Any:
    """Return the class or the function that is declared under a name.

    Parameters
    ----------
    name : as `name_of` returns it.
    modules : of other packages, which are imported if need be; a module of this package is imported if it is the one
        of the name.

    Raises
    ------
    LookupError : there is none.
    """
    module = name.partition(":")[0]
    package = module.partition(".")[0]
    own = module.startswith(tuple(f"{one}." for one in OWN_PACKAGES)) or module in OWN_PACKAGES
    others = [other for other in modules if other.partition(".")[0] == package]
    for candidate in (module,) if own else others:
        if name not in _DECLARED:  # perhaps another thread imports the module, for which this waits
            try:
                import_module(candidate)
            except Exception as error:  # of any kind, such as of a package that the module needs
                raise LookupError(f"{candidate} cannot be imported: {error}") from error
    if name not in _DECLARED:
        raise LookupError(f"{name} is not declared")
    return _DECLARED[name]
