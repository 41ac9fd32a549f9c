"""An index as bytes: for a file that later jobs read, and for memory that the ranks of a machine share.

The bytes are a pickle, and behind it the columns that it refers to, from 64-byte borders on. So an index of a million
files is in memory as soon as its bytes are mapped, in one copy for all processes that map them.
"""

from __future__ import annotations

import functools
import hashlib
import io
import mmap
import os
import pickle
import struct
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from matex_data.errors import FormatError

MAGIC = b"matex index 1\n\0\0"
_HEADER = struct.Struct("<16s16sQQ")  # magic, digest of all that follows it, bytes of the pickle, number of columns
_ALIGNMENT = 64
_PACKAGES = ("matex_data.index", "matex_data.readers", "matex_data.codecs", "matex_data.fields")
_MODULES = ("numpy", *(f"numpy.{core}.{name}" for core in ("core", "_core") for name in ("multiarray", "numeric")))
_NAMES = {
    *(("functools", "partial"), ("pathlib", "PosixPath"), ("collections", "OrderedDict"), ("_codecs", "encode")),
    *(("datetime", name) for name in ("datetime", "date", "timedelta", "timezone")),
}


def to_bytes(value: Any) -> bytes:
    """Return an object that can be pickled as bytes, with its arrays behind it.

    >>> from_bytes(to_bytes({"rows": 3}))
    {'rows': 3}
    """
    columns: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(value, protocol=5, buffer_callback=columns.append)
    raw = [column.raw() for column in columns]
    parts: list[bytes | memoryview] = [struct.pack(f"<{len(raw)}Q", *(column.nbytes for column in raw)), pickled]
    for column in raw:
        size = _HEADER.size + sum(memoryview(part).nbytes for part in parts)
        parts += [bytes(-size % _ALIGNMENT), column]
    body = b"".join(parts)
    digest = hashlib.blake2b(body, digest_size=16).digest()
    return _HEADER.pack(MAGIC, digest, len(pickled), len(raw)) + body


def from_bytes(data: bytes | memoryview, packages: Collection[str] | None = ()) -> Any:
    """Return the object of these bytes. Its arrays are views of them, and keep them in memory.

    Parameters
    ----------
    data : as ``to_bytes`` returns them.
    packages : whose classes the object may have, beside those of this package and NumPy; None: any.

    Raises
    ------
    FormatError : the bytes are damaged, or refer to anything else.
    """
    view = memoryview(data).cast("B").toreadonly()
    if view.nbytes < _HEADER.size:
        raise _damaged("it ends within its header")
    magic, digest, pickled, count = _HEADER.unpack_from(view)
    body = view[_HEADER.size :]
    if magic != MAGIC or hashlib.blake2b(body, digest_size=16).digest() != digest:
        raise _damaged("its checksum is wrong" if magic == MAGIC else f"it begins with {magic!r}")
    sizes = struct.unpack_from(f"<{count}Q", body)
    begin = 8 * count
    stream, columns, at = io.BytesIO(body[begin : begin + pickled]), [], _HEADER.size + begin + pickled
    for size in sizes:
        at += -at % _ALIGNMENT
        columns.append(view[at : at + size])
        at += size
    try:
        return _Unpickler(stream, columns, packages).load()
    except (AttributeError, TypeError, ValueError) as error:  # classes with other attributes
        raise _damaged(f"it is of another release: {error}") from error


class _Unpickler(pickle.Unpickler):
    """Unpickler of what an index consists of: a file that anyone may write must not run any function."""

    def __init__(self, stream: io.BytesIO, buffers: list[memoryview], packages: Collection[str] | None) -> None:
        super().__init__(stream, buffers=buffers)
        self._packages = None if packages is None else (*_PACKAGES, *packages)

    def find_class(self, module: str, name: str) -> Any:
        packages = self._packages or (module,)
        known = module in _MODULES or any(module == package or module.startswith(package + ".") for package in packages)
        if not known and (module, name) not in _NAMES:
            raise _damaged(f"it refers to {module}.{name}")
        return super().find_class(module, name)


def _damaged(found: str) -> FormatError:
    return FormatError("the stored index is damaged, or is no index", found=found, remedy="delete it")


def save(path: str, data: bytes | memoryview) -> None:
    """Write bytes to a file, which other processes see as a whole or not at all.

    Raises
    ------
    OSError : the file cannot be written.
    """
    folder, name = os.path.split(os.path.abspath(path))  # noqa: PTH100
    handle, beside = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(beside).chmod(0o666 & ~_umask())
        Path(beside).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(beside).unlink()
        raise


@functools.cache
def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def mapped(path: str) -> memoryview:
    """Return the bytes of a file, whose pages all processes of a machine share.

    Raises
    ------
    FormatError : the file is none of an index.
    OSError : the file cannot be read.
    """
    with Path(path).open("rb") as file:
        begin = file.read(len(MAGIC))
        if begin != MAGIC:
            raise FormatError(
                "the file is no stored index, and is not replaced by one",
                file=path,
                expected="a new file, or one that index= of open_dataset has written",
                found=f"a file that begins with {begin!r}",
                remedy="give index= another name",
            )
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
