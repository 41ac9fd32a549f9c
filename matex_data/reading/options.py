"""Options of reading, which data sets that are combined have in common; and what takes options by their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from matex_data._types import Io
from matex_data.errors import PartitionError

Taking = TypeVar("Taking")

_UNKNOWN = {
    "io": "unknown mode of reading",
    "cache": "unknown cache",
    "global_reads": "unknown access to samples for a global shuffle",
    "on_error": "unknown treatment of samples that cannot be read",
}
"""Problem of a value that the type of an option does not list."""


@dataclass(frozen=True)
class ReadOptions:
    """Options of ``open_dataset`` that say how samples are read. A new one is a field here, and a parameter there.

    Parameters
    ----------
    io, window_bytes, block_bytes, global_reads, cache, on_error : see ``open_dataset``.

    Raises
    ------
    PartitionError : an option has an unknown value, or ``block_bytes`` is below 1.

    Examples
    --------
    >>> ReadOptions(cache="memory").io
    'auto'
    """

    io: Io = "auto"
    window_bytes: int | None = None
    block_bytes: int | None = None
    global_reads: Literal["memory", "rows"] = "memory"
    cache: Literal["memory"] | None = None
    on_error: Literal["raise", "skip"] = "raise"

    def __post_init__(self) -> None:
        types = get_type_hints(ReadOptions)
        for name, problem in _UNKNOWN.items():
            value, known = getattr(self, name), _values(types[name])
            if value not in known:
                raise PartitionError(problem, expected=f"{name}= one of {known}", found=repr(value))
        if self.block_bytes is not None and self.block_bytes < 1:
            raise PartitionError("a block is too small", expected="block_bytes of 1 or more", found=self.block_bytes)


def _values(hint: Any) -> tuple[str | None, ...]:
    """Return the values of a type of literals, and None where it is one of them."""
    if hint is type(None):
        return (None,)
    return tuple(value for part in get_args(hint) for value in ((part,) if isinstance(part, str) else _values(part)))


def taken(kind: type[Taking], arguments: Mapping[str, Any]) -> Taking:
    """Return a dataclass of the arguments that have the names of its fields.

    Examples
    --------
    >>> taken(ReadOptions, {"where": None, "cache": "memory"}).cache
    'memory'
    """
    return kind(**{field.name: arguments[field.name] for field in fields(kind) if field.name in arguments})  # type: ignore[arg-type]
