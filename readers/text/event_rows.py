"""Events of a text file: read by blocks of whole events, and parsed once for all fields of a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from matex_data._types import Array, Bytes
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError
from matex_data.index.decoded import ByteRangeBlocks
from matex_data.index.scatter import RowIndices, scatter
from matex_data.index.table import Outputs

Columns = Mapping[str, Array]


class EventParser(Protocol):
    """Parser of the text of neighbouring events, by the library of their format."""

    def parse(self, text: bytes, names: Sequence[str]) -> Columns:
        """Return the fields of all events of a text.

        Raises
        ------
        DecodeError : an event is damaged; ``row`` and ``byte`` are counted from the begin of ``text``.
        """


@declared
@dataclass(frozen=True, eq=False)
class EventBlocks(ByteRangeBlocks):
    """Events of a text; a block is a range of whole events.

    Parameters
    ----------
    parser : of the events.
    """

    parser: EventParser

    def decoded_bytes(self, block: int, outs: Outputs) -> int:
        return int(self.nbytes[block])

    def copy_rows(self, name: str, block: Any, rows: RowIndices, out: Array, destination: RowIndices) -> None:
        scatter(out, destination, block[name][rows])

    def decode(self, block: int, names: Sequence[str], stored: Bytes) -> Columns:
        """Parse the events of a block.

        Raises
        ------
        DecodeError : an event is damaged; the error names the event and its byte in the file.
        """
        begin, count = int(self.edges[block]), int(self.edges[block + 1] - self.edges[block])
        try:
            columns = self.parser.parse(stored.tobytes(), names)
        except DataError as error:
            row = None if error.row is None else begin + error.row
            raise DecodeError(
                error.problem if row is None else f"{error.problem} in event {row + 1}",
                file=self.path,
                field=error.field,
                row=row,
                byte=int(self.offset[block]) + (error.byte or 0),
                expected=error.expected,
                found=error.found,
                remedy=error.remedy or "the file is damaged: restore it from its source, or leave it out",
            ) from error
        for name, column in columns.items():
            if len(column) != count:
                raise DecodeError(
                    "the file changes while it is read", file=self.path, field=name, expected=count, found=len(column)
                )
        return columns


def split_rows(values: Array, counts: Sequence[int]) -> NDArray[Any]:
    """Return an object array whose element i has the next ``counts[i]`` values, as an array of its own memory."""
    rows = np.empty(len(counts), object)
    begin = 0
    for i, count in enumerate(counts):
        rows[i] = values[begin : begin + count].copy()  # a view would keep the values of all events alive
        begin += count
    return rows
