"""Undo what a chunk went through when it was written: thin over imagecodecs.

The filter numbers are those of the HDF5 registry (https://github.com/HDFGroup/hdf5_plugins, RegisteredFilterPlugins).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import imagecodecs
import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3


@dataclass(frozen=True)
class Filter:
    """One step of the pipeline: its number in the HDF5 registry, and its options as the file has them."""

    number: int
    options: tuple[int, ...] = ()


class BrokenChunk(ValueError):
    """The bytes are not what the filter can have written."""


def supported(number: int) -> bool:
    """Whether chunks that went through this filter can be decoded here."""
    return number in _UNDO


@dataclass(frozen=True)
class Pipeline:
    """The filters of a dataset, in the order they were applied in when it was written.

    Parameters
    ----------
    filters : the steps.
    itemsize : bytes of one stored element.
    nbytes : bytes of one decoded chunk.
    """

    filters: tuple[Filter, ...]
    itemsize: int
    nbytes: int

    def decode(self, stored: Bytes, mask: int = 0, out: Bytes | None = None) -> Bytes:
        """The chunk as uint8[nbytes]; in ``out`` if given, else in new memory or in ``stored`` itself.

        Parameters
        ----------
        stored : the chunk as it lies in the file.
        mask : bit i set: filter i was not applied to this chunk.
        out : uint8[nbytes], contiguous.

        Raises
        ------
        BrokenChunk : a checksum is wrong, or a compressed stream is broken or of another length.
        """
        steps = [step for i, step in enumerate(self.filters) if not mask >> i & 1]
        data = stored
        while steps:
            step = steps.pop()
            size = self.nbytes + 4 * sum(before.number == FLETCHER32 for before in steps)
            data = self._undo(step, data, size, None if steps else out)
        if data.nbytes != self.nbytes:
            raise BrokenChunk(f"{data.nbytes} bytes instead of {self.nbytes}")
        if out is not None and data is not out:
            out[...] = data
            return out
        return data

    def _undo(self, step: Filter, data: Bytes, size: int, out: Bytes | None) -> Bytes:
        try:
            return _UNDO[step.number](data, step.options or (self.itemsize,), size, out)
        except (RuntimeError, ValueError) as error:
            raise BrokenChunk(f"{_NAMES[step.number]}: {error}") from error


def _inflate(data: Bytes, options: tuple[int, ...], size: int, out: Bytes | None) -> Bytes:
    out = np.empty(size, np.uint8) if out is None else out
    decoded = imagecodecs.deflate_decode(data, out=out)
    if decoded.nbytes != size:
        raise BrokenChunk(f"{decoded.nbytes} bytes instead of {size}")
    return out


def _unshuffle(data: Bytes, options: tuple[int, ...], size: int, out: Bytes | None) -> Bytes:
    """Byte i of every element lies in plane i; bytes behind the last whole element are as they were."""
    width = options[0]
    count = data.nbytes // width
    if width == 1 or count <= 1:
        return data
    out = np.empty(data.nbytes, np.uint8) if out is None else out
    planes = data[: count * width].reshape(width, count)
    items = out[: count * width].reshape(count, width)
    for i in range(width):  # by columns: ten times as fast as one transposed copy
        items[:, i] = planes[i]
    out[count * width :] = data[count * width :]
    return out


def _checksum(data: Bytes, options: tuple[int, ...], size: int, out: Bytes | None) -> Bytes:
    body, stored = data[:-4], int.from_bytes(data[-4:].tobytes(), "little")
    found = int(imagecodecs.h5checksum_fletcher32(body.tobytes()))
    swapped = int.from_bytes(found.to_bytes(4, "big"), "little")
    # HDF5 before 1.6.3 wrote the halves byte-swapped on little-endian machines; the library accepts both.
    halves = (found & 0x00FF00FF) << 8 | (found >> 8) & 0x00FF00FF
    if stored not in (found, halves, swapped):
        raise BrokenChunk(f"checksum {stored:#010x} stored, {found:#010x} found")
    return body


Undo = Callable[[Bytes, tuple[int, ...], int, Bytes | None], Any]

_UNDO: dict[int, Undo] = {DEFLATE: _inflate, SHUFFLE: _unshuffle, FLETCHER32: _checksum}
_NAMES = {DEFLATE: "deflate", SHUFFLE: "shuffle", FLETCHER32: "fletcher32"}
