"""NumPy dtypes as values of JSON."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_PLAIN = re.compile(r"[<>|=]?([biufcSUV]\d{1,10}|[Mm]8(\[(\d{1,9})?[a-zA-Zμ]{1,2}\])?|O)")
MOST_BYTES = (1 << 31) - 1  # of an element, in NumPy
DEEPEST = 16  # records within records


def dtype_to_json(dtype: np.dtype[Any]) -> Any:
    """Return a dtype, without its metadata, as text and nested tuples.

    Raises
    ------
    TypeError : it is of a kind that only its own library knows.

    Examples
    --------
    >>> dtype_to_json(np.dtype([("id", "<i4"), ("p", ">f8", (3,))]))
    ('record', 28, ('id', 0, '<i4'), ('p', 4, ('array', '>f8', 3)))
    """
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return ("array", dtype_to_json(base), *shape)
    if dtype.fields is not None:
        members = ((name, dtype.fields[name][1], dtype_to_json(dtype.fields[name][0])) for name in dtype.names or ())
        return ("record", dtype.itemsize, *members)
    if dtype.type.__module__ == "ml_dtypes":
        return ("ml_dtypes", dtype.name)
    if _PLAIN.fullmatch(dtype.str) is None:
        raise TypeError(f"the dtype {dtype} has no descriptor")
    return dtype.str


def dtype_from_json(value: Any, depth: int = 0) -> np.dtype[Any]:
    """Return the dtype of text and nested sequences.

    Raises
    ------
    ValueError : they describe none.

    Examples
    --------
    >>> dtype_from_json(["record", 28, ["id", 0, "<i4"], ["p", 4, ["array", ">f8", 3]]])
    dtype([('id', '<i4'), ('p', '>f8', (3,))])
    """
    if depth > DEEPEST:
        raise ValueError("a dtype that is nested too deeply")
    if isinstance(value, str) and _PLAIN.fullmatch(value):
        return _made(value)
    match value:
        case ["array", base, *shape] if all(type(length) is int and 0 <= length <= MOST_BYTES for length in shape):
            return _made((dtype_from_json(base, depth + 1), tuple(shape)))
        case ["record", int(itemsize), *members]:
            return _record(itemsize, members, depth)
        case ["ml_dtypes", str(name)] if name.isidentifier():
            import ml_dtypes

            found = getattr(ml_dtypes, name, None)
            if isinstance(found, type) and issubclass(found, np.generic):
                return np.dtype(found)
    raise ValueError(f"{value!r:.100} instead of a dtype")


def _record(itemsize: int, members: list[Any], depth: int) -> np.dtype[Any]:
    names, offsets, formats = [], [], []
    for member in members:
        match member:
            case [str(name), int(offset), inner]:
                names.append(name)
                offsets.append(offset)
                formats.append(dtype_from_json(inner, depth + 1))
            case _:
                raise ValueError(f"{member!r:.100} instead of a member of a dtype")
    return _made({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize})


def _made(description: Any) -> np.dtype[Any]:
    try:
        made: np.dtype[Any] = np.dtype(description)
        return made
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise ValueError(f"{description!r:.100} instead of a dtype: {error}") from error
