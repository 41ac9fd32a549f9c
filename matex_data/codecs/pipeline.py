"""Undo what a chunk went through when it was written: thin over imagecodecs.

The filter numbers are those of the HDF5 registry (https://github.com/HDFGroup/hdf5_plugins, RegisteredFilterPlugins).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import imagecodecs
import numpy as np

from matex_data._types import Bytes
from matex_data.codecs import bitshuffle, blosc2
from matex_data.codecs.scratch import Memory, memory_for, of_this_thread
from matex_data.codecs.shuffle import WIDTHS, unshuffle

DEFLATE, SHUFFLE, FLETCHER32, SZIP = 1, 2, 3, 4
LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2 = 32000, 32001, 32004, 32008, 32015, 32026


@dataclass(frozen=True)
class Filter:
    """One step of the pipeline: its number in the HDF5 registry, and its options as the file has them."""

    number: int
    options: tuple[int, ...] = ()


class BrokenChunk(ValueError):
    """The bytes are not what the filter can have written."""


def can_decode(step: Filter) -> bool:
    """Whether chunks that went through this filter can be decoded here."""
    if step.number == BITSHUFFLE:
        return bool(imagecodecs.BITSHUFFLE.available) and bitshuffle.supported(step.options)
    return step.number in _UNDO and step.number not in _LACKING


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
        data = stored
        for step, size, passing in self._steps(mask) if mask else self._every_step:
            data = _undo(step, data, size, partial(memory_for, data, passing, out), self.itemsize)
        if data.nbytes != self.nbytes:
            raise BrokenChunk(f"{data.nbytes} bytes instead of {self.nbytes}")
        if out is None:
            return data.copy() if of_this_thread(data) else data
        if data is not out:
            out[...] = data
        return out

    @cached_property
    def before_shuffle(self) -> Pipeline | None:
        """All but the shuffle that came first, of elements that ``unshuffle_rows`` can bring to their places.

        What it decodes, with a filter mask that lacks the first bit, are the planes of the elements.
        """
        first, *others = self.filters or (None,)
        shuffled = first is not None and first.number == SHUFFLE and first.options[:1] in ((), (self.itemsize,))
        return Pipeline(tuple(others), self.itemsize, self.nbytes) if shuffled and self.itemsize in WIDTHS else None

    @cached_property
    def _every_step(self) -> list[tuple[Filter, int | None, bool]]:
        return self._steps(0)

    def _steps(self, mask: int) -> list[tuple[Filter, int | None, bool]]:
        """What is to be undone, the last one applied first; how many bytes come out, and whether more steps follow."""
        applied = [step for i, step in enumerate(self.filters) if not mask >> i & 1]
        return [(applied[i], self._size(applied[:i]), i > 0) for i in reversed(range(len(applied)))]

    def _size(self, before: list[Filter]) -> int | None:
        """Bytes that come out of a step, given those applied before it; None if that cannot be known."""
        if any(step.number not in (SHUFFLE, FLETCHER32) for step in before):
            return None
        return self.nbytes + 4 * sum(step.number == FLETCHER32 for step in before)


def _undo(step: Filter, data: Bytes, size: int | None, memory: Memory, itemsize: int) -> Bytes:
    try:
        result = _UNDO[step.number](data, step.options or (itemsize,), size, memory)
    except (RuntimeError, ValueError, IndexError) as error:
        raise BrokenChunk(f"{_NAMES[step.number]}: {error}") from error
    if size is not None and result.nbytes != size:
        raise BrokenChunk(f"{_NAMES[step.number]}: {result.nbytes} bytes instead of {size}")
    return result


Undo = Callable[[Bytes, tuple[int, ...], int | None, Memory], Bytes]


def _by(decode: Callable[..., Any], **options: Any) -> Undo:
    """A codec that needs no more than the bytes."""

    def undo(data: Bytes, _: tuple[int, ...], size: int | None, memory: Memory) -> Bytes:
        return _flat(decode(data, out=None if size is None else memory(size), **options))

    return undo


def _flat(decoded: Any) -> Bytes:
    return decoded if isinstance(decoded, np.ndarray) else np.frombuffer(decoded, np.uint8)


def _unshuffle(data: Bytes, options: tuple[int, ...], size: int | None, memory: Memory) -> Bytes:
    width = options[0]
    if width == 1 or data.nbytes < 2 * width:
        return data
    out = memory(data.nbytes)
    unshuffle(data, width, out)
    return out


def _checksum(data: Bytes, options: tuple[int, ...], size: int | None, memory: Memory) -> Bytes:
    body, stored = data[:-4], int.from_bytes(data[-4:].tobytes(), "little")
    found = int(imagecodecs.h5checksum_fletcher32(body))
    # HDF5 before 1.6.3 wrote the bytes of each half swapped; the library accepts both.
    swapped = (found & 0x00FF00FF) << 8 | found >> 8 & 0x00FF00FF
    if stored not in (found, swapped):
        raise BrokenChunk(f"checksum {stored:#010x} stored, {found:#010x} found")
    return body


def _szip(data: Bytes, options: tuple[int, ...], size: int | None, memory: Memory) -> Bytes:
    """Four options as H5Pget_filter gives them; the chunk begins with its decoded size, which the decoder ignores."""
    if size is not None and int.from_bytes(bytes(data[:4]), "little") != size:
        raise BrokenChunk("the szip stream is not as long as the chunk")
    return _flat(imagecodecs.szip_decode(data, *options[:4], header=True, out=None if size is None else memory(size)))


_INFLATE = imagecodecs.deflate_decode if imagecodecs.DEFLATE.available else imagecodecs.zlib_decode

_UNDO: dict[int, Undo] = {
    DEFLATE: _by(_INFLATE),
    SHUFFLE: _unshuffle,
    FLETCHER32: _checksum,
    SZIP: _szip,
    LZF: _by(imagecodecs.lzf_decode, header=False),
    BLOSC: _by(imagecodecs.blosc_decode, numthreads=1),
    LZ4: _by(imagecodecs.lz4h5_decode),
    BITSHUFFLE: bitshuffle.undo,
    ZSTD: _by(imagecodecs.zstd_decode),
    BLOSC2: blosc2.undo,
}
_NAMES = {DEFLATE: "deflate", SHUFFLE: "shuffle", FLETCHER32: "fletcher32", SZIP: "szip", LZF: "lzf", BLOSC: "blosc"}
_NAMES |= {LZ4: "lz4", BITSHUFFLE: "bitshuffle", ZSTD: "zstd", BLOSC2: "blosc2"}
_CODECS = {SZIP: "SZIP", LZF: "LZF", BLOSC: "BLOSC", LZ4: "LZ4H5", ZSTD: "ZSTD", BLOSC2: "BLOSC2"}
_LACKING = {number for number, name in _CODECS.items() if not getattr(imagecodecs, name).available}
