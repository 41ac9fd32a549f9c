"""Samples of a tar shard: their members are read in large ranges and decoded by extension."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.declared import declared
from matex_data.errors import DataError, DecodeError
from matex_data.index.cache import ChunkCache
from matex_data.index.model import ReadRequest, RowSelection
from matex_data.index.runs import neighbours
from matex_data.index.table import Outputs, Table
from matex_data.readers.formats import located
from matex_data.readers.tar.fields import MemberDecoder

REQUEST_BYTES = 256 << 10  # of the members that one thread decodes in one go, about
REMEDY = "the member is damaged: write the shard again without it"
GAP_BYTES = 4096  # largest gap to read between members of neighbouring samples: headers, padding, small members


@declared
@dataclass(frozen=True, eq=False)
class TarRows(Table):
    """Samples whose members lie anywhere in a tar file, those of one sample usually side by side.

    Parameters
    ----------
    decoders : of the fields, by name, in the order of the columns.
    offset, nbytes : integers[rows, fields], the byte range of each member.
    inner : size of all samples of each ragged field in memory, in bytes.
    """

    path: str
    decoders: Mapping[str, MemberDecoder]
    offset: Array
    nbytes: Array
    inner: Mapping[str, int]
    block_rows = 1

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.offset)

    @property
    def width(self) -> int:  # type: ignore[override]
        return len(self.decoders)

    def stored_bytes(self) -> int:
        numbers = np.arange(self.rows, dtype=np.int64)
        return int(self._spans(numbers, np.arange(self.width)).nbytes.sum())

    def end(self) -> int:
        return int((self.offset.astype(np.int64) + self.nbytes).max(initial=0))

    def inner_bytes(self, name: str) -> int:
        return self.inner.get(name, 0)

    def requests(self, rows: RowSelection, outs: Outputs, cache: ChunkCache) -> Iterator[ReadRequest]:
        for members in self.groups(rows, outs):
            spans = self._spans(members.rows, members.columns)
            yield ReadRequest(spans.offset, spans.nbytes, on_complete=partial(self.decode, members, spans.at))

    def groups(self, rows: RowSelection, outs: Outputs) -> Iterator[Members]:
        """Yield the members of neighbouring samples that one thread decodes in one go."""
        columns = np.array([list(self.decoders).index(name) for name, _ in outs], np.int64)
        numbers = rows.numbers
        sizes = self.nbytes[numbers[:, None], columns].sum(axis=1, dtype=np.int64)
        for selected in neighbours(sizes, REQUEST_BYTES):
            yield Members(numbers[selected], rows.destination[selected], columns, outs)

    def _spans(self, numbers: Integers, columns: Integers) -> _Spans:
        """Return the ranges to read for the members of some samples, merged over small gaps."""
        shape = len(numbers), len(columns)
        offset, nbytes = (a[numbers[:, None], columns].reshape(-1).astype(np.int64) for a in (self.offset, self.nbytes))
        order = np.argsort(offset, kind="stable")
        end = np.maximum.accumulate((offset + nbytes)[order]) if len(order) else offset
        row = np.repeat(numbers, len(columns))[order]
        joined = (offset[order][1:] - end[:-1] <= GAP_BYTES) & (np.abs(np.diff(row)) <= 1)
        first = np.flatnonzero(np.concatenate([[True], ~joined]))[: len(order)]
        span = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(order))))
        start = offset[order][first]
        length = end[np.append(first[1:], len(order)) - 1] - start if len(first) else start
        at = np.empty(len(order), np.int64)
        at[order] = offset[order] - (start - (np.cumsum(length) - length))[span]
        return _Spans(start, length, at.reshape(shape))

    def decode(self, members: Members, at: Integers, data: Bytes) -> None:
        """Decode the members of some samples; on an error, of all others first.

        Parameters
        ----------
        at : int64[rows, columns], where each of them begins in the data.

        Raises
        ------
        DecodeError : a member is damaged.
        """
        first_error: DataError | None = None
        columns, lists = members.columns.tolist(), (members.rows.tolist(), members.destination.tolist(), at.tolist())
        for row, destination, begins in zip(*lists, strict=True):
            for column, begin, (name, out) in zip(columns, begins, members.outs, strict=True):
                try:
                    member = data[begin : begin + int(self.nbytes[row, column])]
                    element = out[destination]
                    sample = self.decoders[name].decode(member, element)
                    if sample is not element:
                        out[destination] = sample
                except DataError as error:
                    where = {"file": self.path, "field": name, "row": row, "byte": int(self.offset[row, column])}
                    first_error = first_error or located(error, DecodeError, REMEDY, **where)
        if first_error is not None:
            raise first_error


@dataclass(frozen=True)
class _Spans:
    """Byte ranges to read, and where each member begins in their bytes: int64[rows, columns]."""

    offset: Integers
    nbytes: Integers
    at: Integers


@dataclass(frozen=True)
class Members:
    """Members of one request: their samples, the destinations of these, and the columns.

    Parameters
    ----------
    rows, destination : int64[rows].
    columns : int64[columns].
    outs : name and array of each column.
    """

    rows: Integers
    destination: Integers
    columns: Integers
    outs: Sequence[tuple[str, Any]]
