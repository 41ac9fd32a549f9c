"""GRIB messages for matex_data: a sample for each time, a field (levels, latitudes, longitudes) for each variable.

Format: https://codes.wmo.int/grib2, decoded by ecCodes. Each message is a byte range, so that any number of ranks reads
only the messages of its own samples, and of the variables that are asked for. ecCodes reads the headers alone to index
a file, and needs it in a file system for that.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import eccodes
import numpy as np

from matex_data import abc

TIME = "time"
MISSING = 1e36  # stands for values that a bitmap leaves out
_lock = Lock()  # ecCodes may have been built without threads


Message = namedtuple("Message", "offset nbytes variable sample level shape")
"""Byte range of a message; its variable; seconds since 1970 and number within an ensemble; its level; its grid."""


def index(path: str) -> abc.Catalogue:
    """Index the messages of a file by variable, level and time. Raise ``FormatError`` for a damaged file."""
    messages = list(_messages(path))
    samples = sorted({message.sample for message in messages})
    seconds = abc.MemoryRows(np.array([second for second, _ in samples], np.int64))
    of_time = abc.Field(TIME, (), np.dtype("i8"), attributes={"units": "seconds since 1970-01-01"})
    variables = dict.fromkeys(message.variable for message in messages)
    entries = {n: _variable(path, n, [m for m in messages if m.variable == n], samples) for n in variables}
    return abc.Catalogue.of(path, {**entries, TIME: (of_time, lambda: seconds)} if entries else {}, "variable")


def _variable(path: str, name: str, messages: list[Message], samples: list[tuple[int, int]]) -> Any:
    """Return field and layout of a variable; the reason, if its messages are not one array."""
    levels, shapes = sorted({message.level for message in messages}), {message.shape for message in messages}
    found = {(message.sample, message.level): message for message in messages}
    if len(shapes) != 1 or len(found) < len(messages) or len(found) != len(samples) * len(levels):
        wanted = f"{len(samples)} times and {len(levels)} levels"
        return f"{len(messages)} messages of {len(shapes)} grids, in place of one for each of {wanted}"
    ranges = np.array([[found[sample, level][:2] for level in levels] for sample in samples], np.int64)
    (shape,) = shapes
    attributes = {"levels": [level for _, level in levels], "level_types": [kind for kind, _ in levels]}
    inner = shape if len(levels) == 1 else (len(levels), *shape)
    layout = partial(Messages, path, len(samples), ranges[..., 0], ranges[..., 1])
    return abc.Field(name, inner, np.dtype("f4"), attributes=attributes), layout


def _messages(path: str) -> Iterator[Message]:
    """Yield the headers of all messages."""
    with _lock, Path(path).open("rb") as file:
        try:
            while (handle := eccodes.codes_grib_new_from_file(file, headers_only=True)) is not None:
                yield _header(handle)
                eccodes.codes_release(handle)
        except eccodes.CodesInternalError as error:
            raise abc.FormatError("a message is damaged", file=path, byte=file.tell(), found=error) from error


def _header(handle: Any) -> Message:
    def get(key: str, default: Any = None) -> Any:
        known = eccodes.codes_is_defined(handle, key) and not eccodes.codes_is_missing(handle, key)
        return eccodes.codes_get(handle, key) if known else default

    date, time, rows, columns = (get(key) for key in ("validityDate", "validityTime", "Nj", "Ni"))
    when = datetime(date // 10000, date // 100 % 100, date % 100, time // 100, time % 100, tzinfo=UTC)
    shape = (get("numberOfDataPoints"),) if rows is None or columns is None else (rows, columns)
    level, sample = (get("typeOfLevel"), float(get("level"))), (int(when.timestamp()), get("number", 0))
    return Message(get("offset"), get("totalLength"), get("shortName"), sample, level, shape)


@abc.declared
@dataclass(frozen=True, eq=False)
class Messages(abc.Layout):
    """Rows that are messages, one for each level: byte ranges, int64[rows, levels]."""

    path: str
    rows: int
    offset: np.ndarray[Any, Any]
    nbytes: np.ndarray[Any, Any]

    block_rows = 1

    def requests(self, rows: abc.RowSelection, out: Any, cache: abc.ChunkCache) -> Iterator[abc.ReadRequest]:
        for row, to in zip(rows.numbers.tolist(), rows.destination.tolist(), strict=True):
            decode = partial(self._decode, row, out[to])
            yield abc.ReadRequest(self.offset[row], self.nbytes[row], on_complete=decode)

    def stored_bytes(self) -> int:
        return int(self.nbytes.sum())

    def end(self) -> int:
        return int((self.offset + self.nbytes).max(initial=0))

    def _decode(self, row: int, out: np.ndarray[Any, Any], data: np.ndarray[Any, Any]) -> None:
        levels, ends = out.reshape(self.offset.shape[1], -1), np.cumsum(self.nbytes[row])
        for level, message in zip(levels, np.split(data, ends[:-1]), strict=True):
            try:
                with _lock:
                    handle = eccodes.codes_new_from_message(message.tobytes())
                    eccodes.codes_set(handle, "missingValue", MISSING)
                    level[:] = eccodes.codes_get_values(handle)
                    eccodes.codes_release(handle)
            except (eccodes.CodesInternalError, ValueError) as error:
                facts = {"file": self.path, "row": row, "byte": int(self.offset[row, 0])}
                raise abc.DecodeError("a message does not decode", **facts, found=error) from error
            level[level > MISSING / 2] = np.nan


GRIB = abc.Format(index, suffixes=(".grib", ".grib2", ".grb", ".grb2"), magic=((0, b"GRIB"),), verified=True)
