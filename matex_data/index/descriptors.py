"""Objects as descriptors: values of JSON, without the numbers and the arrays of the object.

Objects that differ in numbers only share a descriptor. A data set of a million files has one for all of its layouts, or
a few, and columns of their numbers.

A descriptor is None, a bool, a text, a mark of what was taken out, or a tuple of a kind and its contents. It names
classes and functions that are declared, see `matex_data.declared`, so that making an object runs nothing else.
"""

from __future__ import annotations

import base64
import dataclasses
import pickle
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path, PosixPath
from types import FunctionType
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.declared import declared_as, name_of
from matex_data.errors import FormatError
from matex_data.storage.trust import NONE, Trust

Descriptor = Any
"""None, a bool, a text, a mark, or a tuple of a kind and its contents."""
INTEGER, FLOAT, TEXT = 2, 3, 4
"""Marks of an integer, of a float, and of the object's own text. They differ from 0 and 1, which equal a bool."""
DEEPEST = 48  # objects within objects
MOST_OBJECTS = 10**8  # of an object, where one that it has twice counts twice: what visits all of them ends
_LIMITS = np.iinfo(np.int64)


@dataclass(frozen=True)
class Separated:
    """Descriptor of an object, and what was taken out.

    Parameters
    ----------
    described : the descriptor; it can be hashed, and is equal for objects that differ in numbers, in integers of
        arrays, and in their own text.
    numbers : of the object, in the order of their marks; of a float, the integer that has its bits.
    arrays : 1-D arrays of integers or of bytes, likewise.

    Examples
    --------
    >>> first, second = (separate({"begin": n, "of": "x" * n}, "x" * n) for n in (5, 7))
    >>> first.described == second.described, second.numbers
    (True, [7])
    >>> join(second, "abc")
    {'begin': 7, 'of': 'abc'}
    """

    described: Descriptor
    numbers: Sequence[int]
    arrays: Sequence[Array]


def separate(value: Any, text: str = "") -> Separated:
    """Separate an object into its descriptor, its numbers and its arrays.

    Parameters
    ----------
    value : the object. What has no descriptor is pickled, for the other ranks of this job; see `pickled_class`.
    text : of this object alone, such as the path of its file.

    Raises
    ------
    ValueError : it contains itself, or is nested too deeply.
    Exception : a part of it has no descriptor and cannot be pickled.
    """
    writer = _Writer(text)
    return Separated(writer.described(value), writer.numbers, writer.arrays)


@dataclass(frozen=True)
class Origin:
    """Source of descriptors, and what they may name.

    Parameters
    ----------
    of_job : from a rank of this job, so that they may have pickled objects; else from a file that anyone may have made.
    modules : of other packages, which may have declared classes and functions of a file.
    trust : where bytes may come from, whatever a file says of it.
    """

    of_job: bool
    modules: frozenset[str] = frozenset()
    trust: Trust = NONE


OF_JOB = Origin(True)


def join(separated: Separated, text: str = "", origin: Origin = OF_JOB) -> Any:
    """Return an object that equals the one that was separated, with ``text`` in place of its own; see `Maker`."""
    maker = Maker(separated.described, separated.numbers, len(separated.arrays), origin)
    return maker.make([], separated.arrays, text)


def pickled_class(descriptor: Descriptor) -> str | None:
    """Return the class of which an object within this one has no descriptor; None if all have one."""
    open_ones = [descriptor]
    while open_ones:
        one = open_ones.pop()
        if isinstance(one, tuple | list):
            if one[:1] in (("pickled",), ["pickled"]):
                return str(one[1])
            open_ones += one
    return None


class _Identical:
    """Object as a key that equals those of the same object alone."""

    __slots__ = ("_value",)

    def __init__(self, value: Any) -> None:
        self._value = value

    def __hash__(self) -> int:
        return object.__hash__(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identical) and self._value is other._value


class _Writer:
    """Descriptor of one object, and the numbers and arrays that are taken out."""

    def __init__(self, text: str) -> None:
        self.numbers: list[int] = []
        self.arrays: list[Array] = []
        self._text = text
        self._known: dict[_Identical, int] = {}  # numbers of the objects that may occur twice
        self._depth = 0

    def described(self, value: Any) -> Descriptor:
        """Return the descriptor of an object."""
        kind = type(value)
        if value is None or kind is bool:
            return value
        if kind is int:
            if not _LIMITS.min <= value <= _LIMITS.max:
                return ("int", str(value))
            self.numbers.append(value)
            return INTEGER
        if kind is str:
            return TEXT if value == self._text else value
        if kind is float:
            self.numbers += struct.unpack("=q", struct.pack("=d", value))
            return FLOAT
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"an object contains itself, or is nested more than {DEEPEST} times: {value!r:.100}")
        describe = _KINDS.get(kind)
        found = self._other(value) if describe is None else describe(self, value)
        self._depth -= 1
        return found

    def _all(self, values: Iterable[Any]) -> tuple[Descriptor, ...]:
        return tuple([self.described(value) for value in values])

    def _other(self, value: Any) -> Descriptor:
        """Return the descriptor of an object of another than the basic types."""
        if isinstance(value, np.dtype):
            return ("dtype", dtype_to_json(value))
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return ("scalar", dtype_to_json(value.dtype), _text_of(value.tobytes()[: value.dtype.itemsize]))
        if name_of(value) is not None:
            return ("declared", name_of(value))
        return self._shared(value, self._object)

    def _shared(self, value: Any, describe: Callable[[Any], Descriptor]) -> Descriptor:
        """Return the descriptor of an object that may occur twice: the second time, its number."""
        number = self._known.get(_Identical(value))
        if number is not None:
            return ("again", number)
        found = describe(value)
        self._known[_Identical(value)] = len(self._known)
        return found

    def _object(self, value: Any) -> Descriptor:
        name = name_of(type(value))
        if name is not None and hasattr(value, "to_json"):
            return ("json", name, self.described(dict(value.to_json())))
        if name is not None:
            of_fields = ((field, self.described(getattr(value, field))) for field in _fields_of(type(value)))
            return ("of", name, *chain.from_iterable(of_fields))
        self.arrays.append(np.frombuffer(pickle.dumps(value, protocol=5), np.uint8))
        return ("pickled", f"{type(value).__module__}.{type(value).__qualname__}")

    def _array(self, value: Array) -> Descriptor:
        if value.dtype == object:
            items = self._all(value.ravel().tolist())
            return ("objects", self._all(value.shape), *items)
        if value.dtype.hasobject:
            return self._object(value)
        flat = np.ascontiguousarray(value).reshape(-1)
        self.arrays.append(flat if value.dtype.kind in "iu" else _bytes_of(flat))
        shape = () if value.ndim == 1 else (self._all(value.shape),)
        return ("array", dtype_to_json(value.dtype), *shape)

    def _partial(self, value: partial[Any]) -> Descriptor:
        return ("partial", *self._all((value.func, value.args, value.keywords)))


def _fields_of(kind: type) -> Sequence[str]:
    """Return the names of the fields of a dataclass or a named tuple."""
    names: Sequence[str] | None = _FIELDS.get(kind)
    if names is None:
        names = [field.name for field in dataclasses.fields(kind)] if dataclasses.is_dataclass(kind) else kind._fields  # type: ignore[attr-defined]
        _FIELDS[kind] = names
    return names


_FIELDS: dict[type, Sequence[str]] = {}


def _text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes_of(flat: Array) -> Array:
    """Return the memory of a contiguous 1-D array, uint8[n]."""
    return flat.view(np.uint8) if flat.nbytes else np.empty(0, np.uint8)


_KINDS: dict[type, Callable[[_Writer, Any], Descriptor]] = {
    tuple: lambda writer, value: ("tuple", *writer._all(value)),
    list: lambda writer, value: ("list", *writer._all(value)),
    dict: lambda writer, value: ("dict", *writer._all(chain.from_iterable(value.items()))),
    range: lambda writer, value: ("range", *writer._all((value.start, value.stop, value.step))),
    slice: lambda writer, value: ("slice", *writer._all((value.start, value.stop, value.step))),
    complex: lambda writer, value: ("complex", *writer._all((value.real, value.imag))),
    timedelta: lambda writer, value: ("timedelta", *writer._all((value.days, value.seconds, value.microseconds))),
    timezone: lambda writer, value: ("timezone", writer.described(value.utcoffset(None))),
    bytes: lambda _, value: ("bytes", _text_of(value)),
    datetime: lambda writer, value: (
        "datetime",
        value.replace(tzinfo=None).isoformat(),
        writer.described(value.tzinfo),
    ),
    date: lambda _, value: ("date", value.isoformat()),
    PosixPath: lambda _, value: ("path", str(value)),
    partial: _Writer._partial,
    np.ndarray: lambda writer, value: writer._shared(value, writer._array),
}


class _Entry:
    """Numbers, arrays and text of one object, and the objects within it that are made."""

    __slots__ = ("arrays", "made", "numbers", "text")

    def __init__(self, numbers: Sequence[int], arrays: Sequence[Array], text: str, made: list[Any]) -> None:
        self.numbers, self.arrays, self.text, self.made = numbers, arrays, text, made


@dataclass(frozen=True)
class _Known:
    """Value that all objects of one descriptor have."""

    value: Any


_Make = Callable[[_Entry], Any] | _Known


class Maker:
    """Maker of the objects of one descriptor: what is equal for all of them is made once.

    Parameters
    ----------
    descriptor : of the objects; lists may take the place of tuples.
    numbers : of the objects, those that are equal for all; None for the others.
    arrays : number of arrays of each object.
    origin : of the descriptor.

    Raises
    ------
    FormatError : the descriptor is damaged, or of another release.
    """

    def __init__(
        self,
        descriptor: Descriptor,
        numbers: Sequence[int | None],
        arrays: int,
        origin: Origin,
    ) -> None:
        reader = _Reader(numbers, arrays, origin)
        with _undamaged():
            made = reader.maker(descriptor)
            reader.check_end()
        self._shared = reader.shared
        self._make = (lambda _: made.value) if isinstance(made, _Known) else made

    def make(self, numbers: Sequence[int], arrays: Sequence[Array], text: str) -> Any:
        """Return an object.

        Parameters
        ----------
        numbers : those that are not equal for all objects.
        arrays, text : of the object; see `Separated`.

        Raises
        ------
        FormatError : they do not fit to one another.
        """
        with _undamaged():
            return self._make(_Entry(numbers, arrays, text, [None] * self._shared))


@contextmanager
def _undamaged() -> Iterator[None]:
    """Context manager: raise ``FormatError`` for an object that cannot be made."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise damaged(f"an object that cannot be made: {type(error).__name__}: {error}") from error


def damaged(found: str) -> FormatError:
    """Return the error of a stored index that is not as this release writes it."""
    return FormatError("the stored index is damaged, or is of another release", found=found, remedy="delete it")


class _Reader:
    """Functions that make the objects of a descriptor.

    Attributes
    ----------
    shared : number of objects that may occur twice.
    """

    def __init__(self, numbers: Sequence[int | None], arrays: int, origin: Origin) -> None:
        self.shared = 0
        self._numbers, self._arrays = numbers, arrays
        self._origin = origin
        self._number = self._varying = self._array_number = 0
        self._depth = self._objects = self._layouts = 0
        self._makers: list[tuple[_Make, int, int]] = []  # of shared objects, and what is within each

    def check_end(self) -> None:
        """Raise ``ValueError`` unless all numbers and arrays have been used."""
        if (self._number, self._array_number) != (len(self._numbers), self._arrays):
            raise ValueError(
                f"{len(self._numbers)} numbers and {self._arrays} arrays, which are not those of the marks"
            )

    def maker(self, descriptor: Descriptor) -> _Make:
        """Return what makes the object of a descriptor."""
        self._count(1)
        if descriptor is None or isinstance(descriptor, bool | str):
            return _Known(descriptor)
        if isinstance(descriptor, int):
            return self._marked(descriptor)
        if not isinstance(descriptor, tuple | list) or not descriptor or descriptor[0] not in _MAKERS:
            raise ValueError(f"{descriptor!r:.100} instead of a descriptor")
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"an object that is nested more than {DEEPEST} times")
        made = _MAKERS[descriptor[0]](self, *descriptor[1:])
        self._depth -= 1
        return made

    def _count(self, objects: int, layouts: int = 0) -> None:
        self._objects += objects
        self._layouts += layouts
        if self._objects > MOST_OBJECTS:
            raise ValueError(f"more than {MOST_OBJECTS} objects within one")

    def _marked(self, mark: int) -> _Make:
        if mark == TEXT:
            return lambda entry: entry.text
        if mark not in (INTEGER, FLOAT):
            raise ValueError(f"{mark} instead of a mark")
        known = self._numbers[self._number]
        self._number += 1
        if known is not None:
            return _Known(_float_of(known) if mark == FLOAT else known)
        at = self._varying
        self._varying += 1
        if mark == FLOAT:
            return lambda entry: _float_of(entry.numbers[at])
        return lambda entry: entry.numbers[at]

    def _composite(self, make: Callable[[list[Any]], Any], descriptors: Iterable[Descriptor]) -> _Make:
        """Return what makes an object of the list of those that it consists of."""
        makers = [self.maker(descriptor) for descriptor in descriptors]
        template = [maker.value if isinstance(maker, _Known) else None for maker in makers]
        varying = [(at, maker) for at, maker in enumerate(makers) if not isinstance(maker, _Known)]
        if not varying:
            return _Known(make(template))

        def made(entry: _Entry) -> Any:
            values = template.copy()
            for at, maker in varying:
                values[at] = maker(entry)
            return make(values)

        return made

    def _again(self, number: int) -> _Make:
        if type(number) is not int or not 0 <= number < len(self._makers):
            raise ValueError(f"object {number!r:.100}, which is not described before")
        maker, objects, layouts = self._makers[number]
        self._count(objects, layouts)
        return maker if isinstance(maker, _Known) else lambda entry: entry.made[number]

    def _kept(self, maker: _Make, objects: int, layouts: int = 0) -> _Make:
        """Return what makes an object that may occur twice, and keeps it for the second time."""
        number = len(self._makers)
        self._makers.append((maker, objects, layouts))
        self.shared = len(self._makers)
        if isinstance(maker, _Known):
            return maker

        def made(entry: _Entry) -> Any:
            value = entry.made[number] = maker(entry)
            return value

        return made

    def _object(self, name: str, *descriptors: Descriptor) -> _Make:
        """Return what makes an object of its fields; equal ones that are compared by value are made once.

        Of one that is not, such as the table of thousands of columns, only such objects within it are visited again.
        """
        before, kind, names = (self._objects, self._layouts), self._class(name), descriptors[::2]
        if list(names) != list(_fields_of(kind)):
            raise ValueError(f"{name} with the fields {list(names)!r:.200}")
        maker = self._composite(lambda values: kind(**dict(zip(names, values, strict=True))), descriptors[1::2])
        if kind is Trust and not self._origin.of_job:
            maker = _Known(self._origin.trust)
        is_layout = kind.__eq__ is object.__eq__
        if isinstance(maker, _Known) and is_layout:
            values = {name: getattr(maker.value, name) for name in names}
            maker = lambda _: kind(**values)  # noqa: E731 (as the other makers)
        layouts = self._layouts - before[1] + is_layout
        self._layouts += is_layout
        return self._kept(maker, layouts if is_layout else self._objects - before[0], layouts)

    def _class(self, name: str) -> Any:
        kind = self._declared(name)
        if not isinstance(kind, type):
            raise TypeError(f"{name} is no class")
        return kind

    def _of_json(self, name: str, descriptor: Descriptor) -> _Make:
        before, kind = self._objects, self._class(name)
        value = self.maker(descriptor)
        constant = value.value if isinstance(value, _Known) else None
        make = (lambda _: constant) if isinstance(value, _Known) else value
        return self._kept(lambda entry: kind.from_json(make(entry)), self._objects - before)

    def _declared(self, name: Any) -> Any:
        if not isinstance(name, str):
            raise TypeError(f"{name!r:.100} instead of a name")
        return declared_as(name, self._origin.modules)

    def _partial(self, function: Descriptor, arguments: Descriptor, keywords: Descriptor) -> _Make:
        def make(values: list[Any]) -> Any:
            if not isinstance(values[0], FunctionType):
                raise TypeError(f"{values[0]!r:.100} instead of a function")
            return partial(values[0], *values[1], **values[2])

        return self._composite(make, (function, arguments, keywords))

    def _array(self, dtype: Any, *shape: Descriptor) -> _Make:
        made = dtype_from_json(dtype)
        if made.hasobject or len(shape) > 1:
            raise ValueError(f"an array of {made}")
        at, lengths = self._next_array(), self._composite(tuple, shape[0]) if shape else None

        def make(entry: _Entry) -> Array:
            of_shape = lengths.value if isinstance(lengths, _Known) else lengths and lengths(entry)
            return _array_of(entry.arrays[at], made, of_shape)

        return self._kept(make, 1)

    def _next_array(self) -> int:
        if self._array_number >= self._arrays:
            raise ValueError(f"more than {self._arrays} arrays")
        self._array_number += 1
        return self._array_number - 1

    def _objects_array(self, shape: Sequence[Descriptor], *items: Descriptor) -> _Make:
        def make(values: list[Any]) -> Array:
            lengths, contents = values[0], values[1:]
            if prod(lengths) != len(contents):
                raise ValueError(f"{len(contents)} objects for an array of shape {lengths}")
            array = np.empty(len(contents), object)
            array[:] = contents
            return array.reshape(lengths)

        return self._kept(self._composite(make, (("tuple", *shape), *items)), 1)

    def _pickled(self, name: str) -> _Make:
        if not self._origin.of_job:
            raise ValueError(f"a pickled object of {name!r:.100}")
        at = self._next_array()
        return self._kept(lambda entry: pickle.loads(entry.arrays[at].tobytes()), 1)

    def _value(self, make: Callable[..., Any], *contents: Any) -> _Known:
        return _Known(make(*contents))


def _float_of(bits: int) -> float:
    number: float = struct.unpack("=d", struct.pack("=q", bits))[0]
    return number


def _array_of(stored: Array, dtype: np.dtype[Any], shape: Sequence[int] | None) -> Array:
    """Return the array of which integers or bytes are stored, 1-D without a shape; a view if possible."""
    if dtype.kind in "iu":
        array = np.ascontiguousarray(stored, dtype)
    else:
        if stored.dtype != np.uint8 or (dtype.itemsize and stored.nbytes % dtype.itemsize):
            raise ValueError(f"{stored.nbytes} bytes for an array of {dtype}")
        array = np.ascontiguousarray(stored).view(dtype) if dtype.itemsize and len(stored) else np.empty(0, dtype)
    if shape is None:
        return array
    if dtype.itemsize == 0:
        return np.empty(shape, dtype)
    if any(length < 0 for length in shape) or prod(shape) != len(array):
        raise ValueError(f"{len(array)} numbers for an array of shape {shape}")
    return array.reshape(shape)


def _scalar(dtype: Any, data: str) -> Any:
    made, content = dtype_from_json(dtype), base64.b64decode(data, validate=True)
    if made.hasobject or len(content) != made.itemsize:
        raise ValueError(f"{len(content)} bytes for a number of {made}")
    return np.frombuffer(content, made, 1).copy()[0] if content else np.zeros((), made)[()]


_MAKERS: dict[str, Callable[..., _Make]] = {
    "again": _Reader._again,
    "array": _Reader._array,
    "bytes": lambda reader, data: reader._value(partial(base64.b64decode, validate=True), data),
    "complex": lambda reader, *parts: reader._composite(lambda values: complex(*values), parts),
    "date": lambda reader, text: reader._value(date.fromisoformat, text),
    "datetime": lambda reader, text, zone: reader._composite(
        lambda values: datetime.fromisoformat(values[0]).replace(tzinfo=values[1]), (text, zone)
    ),
    "declared": lambda reader, name: _Known(reader._declared(name)),
    "dict": lambda reader, *items: reader._composite(lambda v: dict(zip(v[::2], v[1::2], strict=True)), items),
    "dtype": lambda reader, dtype: reader._value(dtype_from_json, dtype),
    "int": lambda reader, digits: reader._value(int, digits),
    "json": _Reader._of_json,
    "list": lambda reader, *items: reader._composite(list, items),
    "objects": _Reader._objects_array,
    "of": _Reader._object,
    "partial": _Reader._partial,
    "path": lambda reader, text: reader._value(Path, text),
    "pickled": _Reader._pickled,
    "range": lambda reader, *limits: reader._composite(lambda values: range(*values), limits),
    "scalar": lambda reader, dtype, data: reader._value(_scalar, dtype, data),
    "slice": lambda reader, *limits: reader._composite(lambda values: slice(*values), limits),
    "timedelta": lambda reader, *parts: reader._composite(lambda values: timedelta(*values), parts),
    "timezone": lambda reader, offset: reader._composite(lambda values: timezone(*values), (offset,)),
    "tuple": lambda reader, *items: reader._composite(tuple, items),
}


_PLAIN = re.compile(r"[<>|=]?([biufcSUV]\d{1,10}|[Mm]8(\[(\d{1,9})?[a-zA-Zμ]{1,2}\])?|O)")
MOST_BYTES = (1 << 31) - 1  # of an element, in NumPy
DEEPEST_DTYPE = 16  # records within records


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
    if depth > DEEPEST_DTYPE:
        raise ValueError("a dtype that is nested too deeply")
    description: Any
    match value:
        case str(text) if _PLAIN.fullmatch(text):
            description = text
        case ["array", base, *shape] if all(type(length) is int and 0 <= length <= MOST_BYTES for length in shape):
            description = dtype_from_json(base, depth + 1), tuple(shape)
        case ["record", int(itemsize), *members]:
            names, offsets, kinds = zip(*members, strict=True) if members else ((), (), ())
            formats = [dtype_from_json(kind, depth + 1) for kind in kinds]
            description = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
        case ["ml_dtypes", str(name)] if name.isidentifier():
            import ml_dtypes

            description = getattr(ml_dtypes, name, None)
            if not isinstance(description, type) or not issubclass(description, np.generic):
                raise ValueError(f"{name} instead of a dtype of ml_dtypes")
        case _:
            raise ValueError(f"{value!r:.100} instead of a dtype")
    try:
        made: np.dtype[Any] = np.dtype(description)
        return made
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise ValueError(f"{value!r:.100} instead of a dtype: {error}") from error
