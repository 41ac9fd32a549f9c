"""Lists, texts, numbers and arrays that a program has pickled: attributes of PyTables and pandas, batches of CIFAR.

A pickle is a program for a stack machine. Python's own machine runs it here with those instructions alone of which such
values consist, and calls nothing that a file names: arrays, dtypes and bytes are made by this module. It needs no more
memory than the pickle has bytes, but for its objects.
"""

from __future__ import annotations

import io
import pickle
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, ClassVar

import numpy as np

from matex_data._types import Array

MOST_LEVELS = 16  # of lists within lists

_LATIN = re.compile("latin-?1")
_ORDER = re.compile(r"[<>|=]")
_DTYPE = re.compile(r"[<>|=]?([biufc?]\d{0,2}|[SU]\d{1,6}|O8?)")
_DAMAGE = (
    *(pickle.UnpicklingError, EOFError, LookupError, TypeError, AttributeError),
    *(struct.error, OverflowError, UnicodeError),
)
_INSTRUCTIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE"),
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS"),
    *("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE", "GLOBAL", "STACK_GLOBAL"),
)
"""Instructions that Python's machine executes as it is, by the names of ``pickletools``."""


def load(data: bytes, *, encoding: str = "latin-1") -> Any:
    """Return a pickled value.

    Parameters
    ----------
    data : the pickle, of any protocol.
    encoding : of the texts of Python 2; "bytes": they stay bytes.

    Raises
    ------
    ValueError : the pickle is damaged, or has an object of another kind.

    Examples
    --------
    >>> import pickle
    >>> load(pickle.dumps({"names": ["pt", "eta"], "values": np.arange(3.0)}))
    {'names': ['pt', 'eta'], 'values': array([0., 1., 2.])}
    """
    machine = _Machine(io.BytesIO(data), encoding=encoding)
    try:
        value = machine.load()
    except _DAMAGE as error:
        raise ValueError(f"the pickle is damaged: {type(error).__name__}: {error}") from error
    if machine.unfinished:
        raise ValueError("it has an array without its values, or a dtype without its byte order")
    _check_levels(value)
    return value


class _Type:
    """Dtype that is being made: its byte order comes after its name."""

    def __init__(self, name: object, *_: object) -> None:
        self.value = np.dtype(_word(name, _DTYPE, "the dtype"))

    def build(self, state: Sequence[Any]) -> None:
        """Give the dtype its byte order."""
        order, base, names = state[1:4]
        if base is not None or names is not None:
            raise ValueError("it has a structured dtype")
        self.value = self.value.newbyteorder(_word(order, _ORDER, "the byte order"))


def _word(text: Any, form: re.Pattern[str], item: str) -> Any:
    """Return a word that an array is made with; Python 2 has written bytes."""
    word = text.decode("latin-1") if isinstance(text, bytes) else text
    if not isinstance(word, str) or not form.fullmatch(word):
        raise ValueError(f"it has {item} {word!r:.80}")
    return word


class _Values:
    """Array that is being made: its values come after its type."""

    def __init__(self, *_: object) -> None:
        self.value: Array | None = None

    def build(self, state: Sequence[Any]) -> None:
        """Give the array its values."""
        shape, dtype, fortran, values = state[-4:]
        if not all(isinstance(length, int) and length >= 0 for length in shape):
            raise ValueError(f"it has an array of the shape {shape!r:.80}")
        array = (_objects if dtype.hasobject else _numbers)(values, dtype, prod(shape))
        self.value = array.reshape(shape, order="F" if fortran else "C")


def _objects(values: Any, dtype: np.dtype[Any], count: int) -> Array:
    if not isinstance(values, list) or len(values) != count:
        raise ValueError(f"it has an array of {count} objects with other ones")
    array = np.empty(count, object)
    array[:] = values
    return array


def _numbers(data: Any, dtype: np.dtype[Any], count: int) -> Array:
    raw = data.encode("latin-1") if isinstance(data, str) else data
    if not isinstance(raw, bytes) or len(raw) != count * dtype.itemsize or count > max(1, len(raw)):
        raise ValueError(f"it has an array of {count} x {dtype} with other bytes")
    return np.frombuffer(raw, dtype).copy() if dtype.itemsize else np.zeros(count, dtype)


def _scalar(dtype: np.dtype[Any], data: Any) -> Any:
    if dtype.hasobject:
        raise ValueError("it has a scalar of objects")
    return _numbers(data, dtype, 1)[0]


def _encode(text: Any, encoding: Any) -> bytes:
    _word(encoding, _LATIN, "bytes in the encoding")
    return bytes(text.encode("latin-1"))


_CALLED: dict[str, Callable[..., Any]] = {
    "numpy.core.multiarray._reconstruct": _Values,
    "numpy._core.multiarray._reconstruct": _Values,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
    "numpy.dtype": _Type,
    "_codecs.encode": _encode,
    "__builtin__.bytes": lambda: b"",  # without bytes: protocols of Python 2 have no other way
}
_NAMED = {**_CALLED, "numpy.ndarray": None}  # which is an argument alone


class _Machine(pickle._Unpickler):
    """Python's machine, with few of its instructions.

    Attributes
    ----------
    unfinished : number of types and arrays that are being made.
    """

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _INSTRUCTIONS
    }
    stack: list[Any]
    memo: dict[int, Any]
    read: Callable[[int], bytes]
    readline: Callable[[], bytes]
    unfinished = 0

    def find_class(self, module: str, name: str) -> Any:
        """Return a function, unless it is none of those that make arrays."""
        full = f"{module}.{name}"
        if full not in _NAMED:
            raise ValueError(f"it is of the type {full:.80}")
        return _NAMED[full]

    def load_reduce(self) -> None:
        """Call a function."""
        arguments = self.stack.pop()
        self.stack[-1] = self.stack[-1](*arguments)
        self.unfinished += isinstance(self.stack[-1], _Type | _Values)

    def load_build(self) -> None:
        """Complete the type or the array on the stack."""
        state = self.stack.pop()
        self.stack[-1].build(state)
        self.stack[-1] = self.stack[-1].value
        self.unfinished -= 1

    def push_known(self, number: int) -> None:
        """Push an earlier value again, but no list: a few bytes could stand for any number of values."""
        value = self.memo[number]
        if isinstance(value, list | dict) or (isinstance(value, tuple) and any(map(_is_container, value))):
            raise ValueError("it has one list twice")
        self.stack.append(value.value if isinstance(value, _Type | _Values) else value)

    dispatch |= {
        pickle.REDUCE[0]: load_reduce,
        pickle.BUILD[0]: load_build,
        pickle.GET[0]: lambda self: self.push_known(int(self.readline())),
        pickle.BINGET[0]: lambda self: self.push_known(self.read(1)[0]),
        pickle.LONG_BINGET[0]: lambda self: self.push_known(int.from_bytes(self.read(4), "little")),
    }


def _is_container(value: object) -> bool:
    return isinstance(value, list | tuple | dict)


def _check_levels(value: Any) -> None:
    """Raise ``ValueError`` for lists that are nested deeper than those who read them can follow."""
    values = [value]
    for _ in range(MOST_LEVELS):
        values = [item for outer in filter(_is_container, values) for item in _items(outer)]
    if values:
        raise ValueError(f"it has lists in more than {MOST_LEVELS} levels")


def _items(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, dict) else container
