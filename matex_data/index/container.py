"""Bytes of columns of integers with a description of them in JSON in front: in files, messages and shared memory.

The columns begin at 64-byte borders, and are views once the bytes are mapped: in one copy for all processes that map
them.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from matex_data._types import Array
from matex_data.index.descriptors import damaged

FAMILY = b"matex index "
MAGIC = FAMILY + b"2\n\0\0"
_HEADER = struct.Struct("<16s16sQ")  # magic, digest of all that follows it, bytes of the description
_ALIGNMENT = 64
_DTYPE = re.compile(r"[<>|]([iu][1248]|b1)")


class ColumnWriter:
    """Columns of integers or booleans, and where they lie."""

    def __init__(self) -> None:
        self._parts: list[bytes | memoryview] = []
        self._end = 0

    def add(self, column: Array, fold: bool = True) -> Any:
        """Add a column, and return its description for `ColumnReader.column`.

        Parameters
        ----------
        column : 1-D.
        fold : write equal numbers once.
        """
        described = {"dtype": column.dtype.str, "count": len(column)}
        if fold and len(column) and column.strides == (0,):
            return {**described, "all": column[0].item()}
        raw = np.ascontiguousarray(column).data.cast("B") if column.nbytes else memoryview(b"")
        gap = -self._end % _ALIGNMENT
        self._parts += [bytes(gap), raw]
        self._end += gap + raw.nbytes
        return {**described, "at": self._end - raw.nbytes}

    def packed(self, description: Any) -> bytes:
        """Return a description, which can be written as JSON, and the columns as bytes."""
        text = json.dumps(description, separators=(",", ":")).encode()
        body = b"".join([text, bytes(-(_HEADER.size + len(text)) % _ALIGNMENT), *self._parts])
        return _HEADER.pack(MAGIC, hashlib.blake2b(body, digest_size=16).digest(), len(text)) + body


class ColumnReader:
    """Columns of bytes that may be damaged, or made to do harm.

    Parameters
    ----------
    memory : of the columns.
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def column(self, described: Any, count: int | None = None, kinds: str = "iu", most_folded: int = 0) -> Array:
        """Return a column as a view of the bytes.

        Parameters
        ----------
        described : what `ColumnWriter.add` has returned.
        count : that it must have; None: any.
        kinds : of its dtype.
        most_folded : without ``count``, the count that equal numbers may have which are stored once.

        Raises
        ------
        FormatError : there is no such column.
        """
        match described:
            case {"dtype": str(text), "count": int(length)} if _DTYPE.fullmatch(text) and length >= 0:
                dtype = np.dtype(text)
            case _:
                raise damaged(f"{described!r:.100} instead of a column")
        if dtype.kind not in kinds or (count is not None and length != count):
            raise damaged(f"{length} numbers of {dtype} instead of {'' if count is None else count} of {kinds!r}")
        match described:
            case {"all": bool(value) | int(value)} if length <= (most_folded if count is None else count):
                return np.broadcast_to(_number(value, dtype), (length,))
            case {"at": int(at)} if (
                at >= 0 and at % _ALIGNMENT == 0 and at + length * dtype.itemsize <= len(self._memory)
            ):
                return np.frombuffer(self._memory, dtype, length, at) if length else np.empty(0, dtype)
        raise damaged(f"a column beyond the end of the bytes: {described!r:.100}")


def _number(value: int, dtype: np.dtype[Any]) -> Array:
    try:
        return np.array([value], dtype)
    except OverflowError as error:
        raise damaged(f"{value} as {dtype}") from error


def unpacked(data: bytes | memoryview, trusted: bool = False) -> tuple[Any, ColumnReader]:
    """Return the description and the columns of bytes.

    Parameters
    ----------
    data : as `ColumnWriter.packed` returns them.
    trusted : they come from a rank of this job, and are not compared with their checksum.

    Raises
    ------
    FormatError : the bytes are damaged.
    """
    view = memoryview(data).cast("B").toreadonly()
    if view.nbytes < _HEADER.size:
        raise damaged("it ends within its header")
    magic, digest, length = _HEADER.unpack_from(view)
    body = view[_HEADER.size :]
    if magic != MAGIC:
        raise damaged(f"it begins with {magic!r}")
    if not trusted and hashlib.blake2b(body, digest_size=16).digest() != digest:
        raise damaged("its checksum is wrong")
    try:
        description = json.loads(body[:length].tobytes())
    except (ValueError, RecursionError) as error:
        raise damaged(f"a description that is no JSON: {error!s:.100}") from error
    begin = _HEADER.size + length
    return description, ColumnReader(view[begin + -begin % _ALIGNMENT :])


def member(description: Any, *names: str) -> Sequence[Any]:
    """Return the values of the members of an object of JSON, which must have them and no others.

    Raises
    ------
    FormatError : it has others.
    """
    if not isinstance(description, dict) or set(description) != set(names):
        raise damaged(f"{description!r:.100} instead of an object with {list(names)}")
    return [description[name] for name in names]
