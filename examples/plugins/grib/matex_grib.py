"""GRIB messages for matex_data: a sample for each time, a field (levels, latitudes, longitudes) for each variable.

Format: https://codes.wmo.int/grib2, decoded by ecCodes. Each message is a byte range, so that any number of ranks reads
only the messages of its own samples, and of the variables that are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import eccodes
import numpy as np

from matex_data.abc import (
    ChunkCache,
    DecodeError,
    Field,
    FieldNotFound,
    FileIndex,
    Format,
    FormatError,
    Index,
    Layout,
    MemoryRows,
    ReadRequest,
    RowSelection,
    declared,
    near_matches,
)

TIME = "time"
MISSING = 1e36  # stands for values that a bitmap leaves out
_lock = Lock()  # ecCodes may have been built without threads


class Message(NamedTuple):
    """Header of a message.

    Parameters
    ----------
    offset, nbytes : its byte range.
    variable : short name.
    sample : seconds since 1970 for which it is valid, and number within an ensemble.
    level : such as a pressure.
    shape : latitudes and longitudes, or points of another grid.
    """

    offset: int
    nbytes: int
    variable: str
    sample: tuple[int, int]
    level: tuple[str, float]
    shape: tuple[int, ...]


def index(path: str, names: Sequence[str] | None = None) -> Index:
    """Index the messages of a file by variable, level and time.

    Raises
    ------
    FieldNotFound : there is no such variable.
    FormatError : the file is damaged, or a variable is missing at some time or level.
    """
    messages = list(_messages(path))
    variables = list(dict.fromkeys(message.variable for message in messages))
    samples = sorted({message.sample for message in messages})
    fields: dict[str, Field] = {}
    layouts: dict[str, Layout] = {}
    for name in [*variables, TIME] if names is None else names:
        if name == TIME:
            fields[name] = Field(name, (), np.dtype("i8"), attributes={"units": "seconds since 1970-01-01"})
            layouts[name] = MemoryRows(np.array([seconds for seconds, _ in samples], np.int64))
        elif name in variables:
            fields[name], layouts[name] = _variable(path, name, [m for m in messages if m.variable == name], samples)
        else:
            near = near_matches(name, [*variables, TIME])
            raise FieldNotFound("the file has no such variable", file=path, field=name, expected=f"one of {near}")
    return Index(fields, [FileIndex(path, len(samples), layouts)])


def _variable(
    path: str, name: str, messages: Sequence[Message], samples: Sequence[tuple[int, int]]
) -> tuple[Field, Layout]:
    levels = sorted({message.level for message in messages})
    shapes = {message.shape for message in messages}
    found = {(message.sample, message.level): message for message in messages}
    if len(shapes) != 1 or len(found) < len(messages) or len(found) != len(samples) * len(levels):
        raise FormatError(
            "the messages of the variable are not one array",
            file=path,
            field=name,
            expected=f"one grid, and a message for each of {len(samples)} times and {len(levels)} levels",
            found=f"{len(messages)} messages of {len(shapes)} grids",
            remedy="select messages that are alike by grib_copy",
        )
    table = np.array([[found[sample, level][:2] for level in levels] for sample in samples], np.int64)
    (shape,) = shapes
    attributes = {"levels": [level for _, level in levels], "level_types": [kind for kind, _ in levels]}
    inner = shape if len(levels) == 1 else (len(levels), *shape)
    return Field(name, inner, np.dtype("f4"), attributes=attributes), Messages(path, table[..., 0], table[..., 1])


def _messages(path: str) -> Iterator[Message]:
    """Yield the headers of all messages."""
    with _lock, Path(path).open("rb") as file:
        while True:
            try:
                handle = eccodes.codes_grib_new_from_file(file, headers_only=True)
                if handle is None:
                    return
                try:
                    yield _header(handle)
                finally:
                    eccodes.codes_release(handle)
            except eccodes.CodesInternalError as error:
                raise FormatError("a message is damaged", file=path, byte=file.tell(), found=error) from error


def _header(handle: Any) -> Message:
    get = partial(eccodes.codes_get, handle)
    date, time = int(get("validityDate")), int(get("validityTime"))
    when = datetime(date // 10000, date // 100 % 100, date % 100, time // 100, time % 100, tzinfo=UTC)
    is_grid = all(
        eccodes.codes_is_defined(handle, key) and not eccodes.codes_is_missing(handle, key) for key in ("Ni", "Nj")
    )
    shape = (int(get("Nj")), int(get("Ni"))) if is_grid else (int(get("numberOfDataPoints")),)
    number = int(get("number")) if eccodes.codes_is_defined(handle, "number") else 0
    level = str(get("typeOfLevel")), float(get("level"))
    sample = int(when.timestamp()), number
    return Message(int(get("offset")), int(get("totalLength")), str(get("shortName")), sample, level, shape)


@declared
@dataclass(frozen=True, eq=False)
class Messages(Layout):
    """Rows that are messages, one for each level.

    Parameters
    ----------
    path : of the file.
    offset, nbytes : int64[rows, levels], byte range of each.
    """

    path: str
    offset: np.ndarray[Any, Any]
    nbytes: np.ndarray[Any, Any]

    block_rows = 1

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.offset)

    def requests(self, rows: RowSelection, out: np.ndarray[Any, Any], cache: ChunkCache) -> Iterator[ReadRequest]:
        for row, destination in zip(rows.numbers.tolist(), rows.destination.tolist(), strict=True):
            decode = partial(self._decode, row, out[destination])
            yield ReadRequest(self.offset[row], self.nbytes[row], on_complete=decode)

    def stored_bytes(self) -> int:
        return int(self.nbytes.sum())

    def end(self) -> int:
        return int((self.offset + self.nbytes).max(initial=0))

    def _decode(self, row: int, out: np.ndarray[Any, Any], data: np.ndarray[Any, Any]) -> None:
        levels, begin = out.reshape(self.offset.shape[1], -1), 0
        for level, nbytes in zip(levels, self.nbytes[row].tolist(), strict=True):
            try:
                level[:] = _values(data[begin : begin + nbytes].tobytes())
            except (eccodes.CodesInternalError, ValueError) as error:
                raise DecodeError(
                    "a message does not decode", file=self.path, row=row, byte=int(self.offset[row, 0]), found=error
                ) from error
            begin += nbytes


def _values(message: bytes) -> np.ndarray[Any, Any]:
    """Return the values of a message, float64[points]; NaN where there is none."""
    with _lock:
        handle = eccodes.codes_new_from_message(message)
        try:
            eccodes.codes_set(handle, "missingValue", MISSING)
            values = eccodes.codes_get_values(handle)
        finally:
            eccodes.codes_release(handle)
    return np.where(values == MISSING, np.nan, values)


GRIB = Format(index, suffixes=(".grib", ".grib1", ".grib2", ".grb", ".grb2"), magic=((0, b"GRIB"),), verified=True)
