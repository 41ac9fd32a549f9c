"""Lists, texts, numbers and arrays that a program has pickled: attributes of PyTables and pandas, batches of CIFAR.

A pickle is a program for a stack machine. This module has the instructions of which such values consist
(``Lib/pickletools.py`` of CPython describes them), and calls nothing that a file names: it makes arrays, dtypes and
bytes itself. It needs no more memory than the pickle has bytes, but for its objects.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import numpy as np

from matex_data._types import Array

MOST_LEVELS = 16  # of lists within lists

_TEXT, _KEEP = b"\x8c", b"\x94"
_LATIN = re.compile("latin-?1")
_ORDER = re.compile(r"[<>|=]")
_DTYPE = re.compile(r"[<>|=]?([biufc?]\d{0,2}|[SU]\d{1,6}|O8?)")


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
    try:
        value = _Machine(data, encoding).run()
        _check_levels(value)
    except (IndexError, KeyError, TypeError, AttributeError, struct.error, OverflowError, UnicodeError) as error:
        raise ValueError(f"the pickle is damaged: {type(error).__name__}: {error}") from error
    return value


class _Global(str):
    """Name of a function or class that a pickle calls."""


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
    if not isinstance(raw, bytes) or len(raw) != count * dtype.itemsize:
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
_NAMED = {*_CALLED, "numpy.ndarray"}


class _Machine:
    """Stack machine of one pickle."""

    def __init__(self, data: bytes, encoding: str) -> None:
        self._data, self._at, self._encoding = data, 0, encoding
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Run the pickle, and return its value."""
        while (code := self.take(1)) != b".":
            if code == _TEXT:  # of these two an array of texts consists
                self.stack.append(_utf8(self.take(self.take(1)[0])))
                continue
            if code == _KEEP:
                self.memo[len(self.memo)] = self.stack[-1]
                continue
            instruction = _INSTRUCTIONS.get(code)
            if instruction is None:
                raise ValueError(f"it has the instruction {code!r}")
            instruction(self)
        if len(self.stack) != 1:
            raise ValueError(f"it ends with {len(self.stack)} values")
        return self.pop(1)[0]

    def take(self, count: int) -> bytes:
        """Return the next bytes of the pickle."""
        begin, end = self._at, self._at + count
        if count < 0 or end > len(self._data):
            raise ValueError(f"it ends within {count} bytes from byte {begin} on")
        self._at = end
        return self._data[begin:end]

    def line(self) -> bytes:
        """Return the next line of the pickle, without its end."""
        return self.take(self._data.index(b"\n", self._at) + 1 - self._at)[:-1]

    def number(self, form: str) -> Any:
        """Return the next number of the pickle."""
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def text(self, data: bytes) -> Any:
        """Return a text of Python 2."""
        return data if self._encoding == "bytes" else data.decode(self._encoding)

    def pop(self, count: int) -> list[Any]:
        """Return the last values of the stack, and remove them."""
        begin = len(self.stack) - count
        if begin < 0:
            raise ValueError("its stack is empty")
        values = [value.value if isinstance(value, _Type | _Values) else value for value in self.stack[begin:]]
        del self.stack[begin:]
        return values

    def pop_mark(self) -> list[Any]:
        """Return the values since the last mark, and remove them."""
        return self.pop(len(self.stack) - self.marks.pop())

    def push_global(self, module: Any, name: Any) -> None:
        """Push a function, unless it is none of those that make arrays."""
        full = f"{module}.{name}"
        if full not in _NAMED:
            raise ValueError(f"it is of the type {full:.80}")
        self.stack.append(_Global(full))

    def get(self, number: int) -> None:
        """Push an earlier value again, but no list: a few bytes could stand for any number of values."""
        value = self.memo[number]
        if isinstance(value, list | dict) or (isinstance(value, tuple) and any(map(_is_container, value))):
            raise ValueError("it has one list twice")
        self.stack.append(value)

    def put(self, number: int) -> None:
        """Keep the last value of the stack under a number."""
        self.memo[number] = self.stack[-1]

    def reduce(self) -> None:
        """Call a function."""
        function, arguments = self.pop(2)
        if not isinstance(function, _Global) or not isinstance(arguments, tuple):
            raise ValueError("it calls what is no function")
        self.stack.append(_CALLED[function](*arguments))

    def build(self, state: Any) -> None:
        """Complete the type or the array on the stack."""
        self.stack[-1].build(state)

    def extend(self, values: Sequence[Any]) -> None:
        """Add values to the list on the stack."""
        self.stack[-1].extend(values)

    def update(self, values: Sequence[Any]) -> None:
        """Add keys and values to the dict on the stack."""
        self.stack[-1].update(zip(values[::2], values[1::2], strict=True))

    def push_dict(self, values: Sequence[Any]) -> None:
        """Push a dict of keys and values."""
        self.stack.append({})
        self.update(values)


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


def _integer(text: bytes) -> int | bool:
    return text == b"01" if text in (b"00", b"01") else int(text)


def _quoted(text: bytes) -> bytes:
    """Return the bytes of a text of protocol 0, which stands in quotation marks."""
    if len(text) < 2 or text[:1] != text[-1:] or text[:1] not in b"\"'":
        raise ValueError("it has a text without quotation marks")
    return codecs.escape_decode(text[1:-1])[0]


def _push(make: Callable[[_Machine], Any]) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(make(machine))


def _long(data: bytes) -> int:
    return int.from_bytes(data, "little", signed=True)


def _utf8(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda machine: machine.take(1),  # the protocol
    b"\x95": lambda machine: machine.take(8),  # the length of a frame
    b"N": _push(lambda machine: None),
    b"\x88": _push(lambda machine: True),
    b"\x89": _push(lambda machine: False),
    b"I": _push(lambda machine: _integer(machine.line())),
    b"L": _push(lambda machine: int(machine.line().rstrip(b"L"))),
    b"J": _push(lambda machine: machine.number("<i")),
    b"K": _push(lambda machine: machine.number("<B")),
    b"M": _push(lambda machine: machine.number("<H")),
    b"\x8a": _push(lambda machine: _long(machine.take(machine.number("<B")))),
    b"\x8b": _push(lambda machine: _long(machine.take(machine.number("<i")))),
    b"F": _push(lambda machine: float(machine.line())),
    b"G": _push(lambda machine: machine.number(">d")),
    b"S": _push(lambda machine: machine.text(_quoted(machine.line()))),
    b"T": _push(lambda machine: machine.text(machine.take(machine.number("<i")))),
    b"U": _push(lambda machine: machine.text(machine.take(machine.number("<B")))),
    b"B": _push(lambda machine: machine.take(machine.number("<I"))),
    b"C": _push(lambda machine: machine.take(machine.number("<B"))),
    b"\x8e": _push(lambda machine: machine.take(machine.number("<Q"))),
    b"V": _push(lambda machine: machine.line().decode("raw-unicode-escape")),
    b"X": _push(lambda machine: _utf8(machine.take(machine.number("<I")))),
    b"\x8d": _push(lambda machine: _utf8(machine.take(machine.number("<Q")))),
    b")": _push(lambda machine: ()),
    b"]": _push(lambda machine: []),
    b"}": _push(lambda machine: {}),
    b"(": lambda machine: machine.marks.append(len(machine.stack)),
    b"t": _push(lambda machine: tuple(machine.pop_mark())),
    b"\x85": _push(lambda machine: tuple(machine.pop(1))),
    b"\x86": _push(lambda machine: tuple(machine.pop(2))),
    b"\x87": _push(lambda machine: tuple(machine.pop(3))),
    b"l": _push(lambda machine: machine.pop_mark()),
    b"d": lambda machine: machine.push_dict(machine.pop_mark()),
    b"a": lambda machine: machine.extend(machine.pop(1)),
    b"e": lambda machine: machine.extend(machine.pop_mark()),
    b"s": lambda machine: machine.update(machine.pop(2)),
    b"u": lambda machine: machine.update(machine.pop_mark()),
    b"g": lambda machine: machine.get(int(machine.line())),
    b"h": lambda machine: machine.get(machine.number("<B")),
    b"j": lambda machine: machine.get(machine.number("<I")),
    b"p": lambda machine: machine.put(int(machine.line())),
    b"q": lambda machine: machine.put(machine.number("<B")),
    b"r": lambda machine: machine.put(machine.number("<I")),
    b"c": lambda machine: machine.push_global(machine.line().decode(), machine.line().decode()),
    b"\x93": lambda machine: machine.push_global(*machine.pop(2)),
    b"R": lambda machine: machine.reduce(),
    b"b": lambda machine: machine.build(*machine.pop(1)),
}
"""What each instruction does; the names are in ``pickletools.opcodes``."""
