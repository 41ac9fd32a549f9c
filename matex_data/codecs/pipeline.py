"""Undo the HDF5 filters of a chunk, on any thread: a thin layer over imagecodecs.

Filters are identified by their number in the HDF5 registry (https://github.com/HDFGroup/hdf5_plugins,
RegisteredFilterPlugins). A package adds a filter by an entry point of the group ``matex_data.codecs``, of which the
name is the number and the value a `Codec`. In its ``pyproject.toml``::

    [project.entry-points."matex_data.codecs"]
    32028 = "my_package.my_codec:decode"

A filter that neither this module nor an entry point decodes is left to the HDF5 library, which reads its chunks one
after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import entry_points
from typing import Any, NamedTuple

import imagecodecs
import numpy as np

from matex_data._types import Bytes
from matex_data.codecs import bitshuffle, blosc2
from matex_data.codecs.bounded import (
    COMPRESSORS,
    BrokenChunk,
    Decode,
    as_bytes,
    check_blosc,
    decoded,
    filling,
    inflate,
    most_compressed,
)
from matex_data.codecs.scratch import Memory, filter_output, is_scratch
from matex_data.declared import declared
from matex_data.errors import FormatError
from matex_data.locks import cached_property


def unshuffle(data: Bytes, width: int, out: Bytes) -> None:
    """Assemble elements of ``width`` bytes in ``out``; bytes after the last whole element are copied.

    Parameters
    ----------
    data : uint8[n], the planes.
    width : bytes of an element.
    out : uint8[n], contiguous; must not overlap ``data``.
    """
    count = data.nbytes // width
    planes = data[: count * width].reshape(width, count)
    elements = out[: count * width].reshape(count, width)
    for i in range(width):  # several times as fast as one transposed copy
        elements[:, i] = planes[i]
    out[count * width :] = data[count * width :]


ENTRY_POINTS = "matex_data.codecs"

DEFLATE, SHUFFLE, FLETCHER32, SZIP = 1, 2, 3, 4
BZIP2, LZF, BLOSC, LZ4, BITSHUFFLE, ZSTD, BLOSC2 = 307, 32000, 32001, 32004, 32008, 32015, 32026


@declared
@dataclass(frozen=True)
class Filter:
    """One filter of a dataset.

    Parameters
    ----------
    number : in the HDF5 registry.
    options : the filter's client data values, as stored in the file.

    Examples
    --------
    >>> Filter(DEFLATE, (4,))  # gzip of level 4
    Filter(number=1, options=(4,))
    """

    number: int
    options: tuple[int, ...] = ()


Codec = Callable[[Bytes, tuple[int, ...], int], Any]
"""Decoder of a filter that a package adds: ``decode(data, options, nbytes)``.

``data`` is uint8[n], not to be written. ``options`` are the filter's client data values; the element size in bytes if
there are none. ``nbytes`` is the decoded size, or its upper bound where another compressor was applied before. Return
the decoded bytes as a NumPy array or any other buffer. Raise `ValueError` or `RuntimeError` for bytes that do not
decode. The function is called on several threads at once: release the interpreter lock in it.
"""


def can_decode(step: Filter) -> bool:
    """Return whether chunks that went through this filter can be decoded without the HDF5 library."""
    if step.number == BITSHUFFLE:
        return bool(imagecodecs.BITSHUFFLE.available) and bitshuffle.can_decode(step.options)
    return step.number not in _UNAVAILABLE and _decoder(step.number) is not None


@declared
@dataclass(frozen=True)
class Pipeline:
    """Filters of a dataset.

    Parameters
    ----------
    filters : in the order in which they were applied when the chunks were written.
    itemsize : size of one stored element, in bytes.
    nbytes : size of one decoded chunk, in bytes.

    Examples
    --------
    Chunks of four 2-byte integers that went through the shuffle filter and through deflate:

    >>> pipeline = Pipeline((Filter(SHUFFLE, (2,)), Filter(DEFLATE, (4,))), itemsize=2, nbytes=8)
    >>> len(pipeline.filters)
    2
    """

    filters: tuple[Filter, ...]
    itemsize: int
    nbytes: int

    def decode(self, stored: Bytes, mask: int = 0, out: Bytes | None = None) -> Bytes:
        """Decode one chunk.

        Parameters
        ----------
        stored : uint8[n], the chunk as stored in the file.
        mask : filter mask; bit i is set if filter i was not applied to this chunk.
        out : uint8[nbytes], contiguous, receives the decoded chunk.

        Returns
        -------
        uint8[nbytes], the decoded chunk: ``out`` if it is given, else new memory, or ``stored`` itself.

        Raises
        ------
        BrokenChunk : a checksum is wrong, or the compressed data are corrupt or of another length.

        Examples
        --------
        >>> import zlib
        >>> stored = np.frombuffer(zlib.compress(np.arange(4, dtype="u2").tobytes()), np.uint8)
        >>> Pipeline((Filter(DEFLATE),), itemsize=2, nbytes=8).decode(stored).view("u2").tolist()
        [0, 1, 2, 3]
        """
        data = stored
        for step, size, is_last in self._steps(mask) if mask else self._all_steps:
            data = _decode(step, data, size, partial(filter_output, data, is_last, out), self.itemsize)
        if data.nbytes != self.nbytes:
            raise BrokenChunk(f"{data.nbytes} bytes instead of {self.nbytes}")
        if out is None:
            return data.copy() if is_scratch(data) else data
        if data is not out:
            out[...] = data
        return out

    @cached_property
    def _all_steps(self) -> list[tuple[Filter, Size, bool]]:
        return self._steps(0)

    def _steps(self, mask: int) -> list[tuple[Filter, Size, bool]]:
        """Return the filters to undo, in that order, each with its decoded size and whether it is the last one."""
        applied = [step for i, step in enumerate(self.filters) if not mask >> i & 1]
        return [(applied[i], self._decoded_size(applied[:i]), i == 0) for i in reversed(range(len(applied)))]

    def _decoded_size(self, earlier: list[Filter]) -> Size:
        """Return the decoded size of a filter, given those applied before it."""
        size = Size(self.nbytes, True)
        for step in earlier:
            if step.number == FLETCHER32:
                size = size._replace(most=size.most + 4)
            elif step.number != SHUFFLE:
                size = Size(most_compressed(size.most), False)
        return size


class Size(NamedTuple):
    """Size of decoded data.

    Attributes
    ----------
    most : bytes, at most.
    exact : they are as many.
    """

    most: int
    exact: bool


def _decode(step: Filter, data: Bytes, size: Size, memory: Memory, itemsize: int) -> Bytes:
    decode, name = _decoder(step.number), _NAMES.get(step.number, f"filter {step.number}")
    if decode is None:
        raise BrokenChunk(f"{name} is not available")
    result = decoded(name, decode, data, step.options or (itemsize,), size.most, memory)
    if result.nbytes > size.most or (size.exact and result.nbytes != size.most):
        raise BrokenChunk(f"{name}: {result.nbytes} bytes instead of {size.most}{'' if size.exact else ' at most'}")
    return result


@cache
def _decoder(number: int) -> Decode | None:
    """Return the decoder of a filter: of this package, else of an entry point, else None. Raise ``FormatError`` if the
    entry point cannot be loaded.
    """
    if number in _DECODERS:
        return _DECODERS[number]
    for entry in entry_points(group=ENTRY_POINTS, name=str(number)):
        try:
            return _from_codec(entry.load())
        except Exception as error:
            raise FormatError(
                f"the codec {entry.value!r} of HDF5 filter {number} cannot be loaded",
                expected=f"a function, as the package {_package(entry)!r} declares",
                found=repr(error),
                remedy="repair or uninstall that package",
            ) from error
    return None


def _package(entry: Any) -> str:
    return str(entry.dist.name) if entry.dist is not None else entry.module


def _from_codec(codec: Codec) -> Decode:
    def decode(data: Bytes, options: tuple[int, ...], most: int, memory: Memory) -> Bytes:
        return np.frombuffer(codec(data, options, most), np.uint8)

    return decode


def _unshuffle(data: Bytes, options: tuple[int, ...], most: int, memory: Memory) -> Bytes:
    width = options[0]
    if width == 1 or data.nbytes < 2 * width:
        return data
    out = memory(data.nbytes)
    unshuffle(data, width, out)
    return out


def _verify(data: Bytes, options: tuple[int, ...], most: int, memory: Memory) -> Bytes:
    """Verify the Fletcher-32 checksum behind the data, and cut it off."""
    body, stored = data[:-4], int.from_bytes(data[-4:].tobytes(), "little")
    found = int(imagecodecs.h5checksum_fletcher32(body))
    # HDF5 before 1.6.3 swapped the bytes of each half; the library accepts both.
    swapped = (found & 0x00FF00FF) << 8 | found >> 8 & 0x00FF00FF
    if stored not in (found, swapped):
        raise BrokenChunk(f"checksum {stored:#010x} stored, {found:#010x} found")
    return body


def _szip(data: Bytes, options: tuple[int, ...], most: int, memory: Memory) -> Bytes:
    """Decode szip. The options are those of H5Pget_filter; the decoded size stands in front of the data."""
    nbytes = int.from_bytes(bytes(data[:4]), "little")
    if nbytes > most:
        raise BrokenChunk("the length of the szip stream differs from that of the chunk")
    return as_bytes(imagecodecs.szip_decode(data, *options[:4], header=True, out=memory(nbytes)))


_DECODERS: dict[int, Decode] = {
    DEFLATE: filling(inflate),
    SHUFFLE: _unshuffle,
    FLETCHER32: _verify,
    SZIP: _szip,
    BZIP2: COMPRESSORS["bz2"],
    LZF: filling(imagecodecs.lzf_decode, header=False),
    BLOSC: filling(imagecodecs.blosc_decode, check_blosc, numthreads=1),
    LZ4: filling(imagecodecs.lz4h5_decode),
    BITSHUFFLE: bitshuffle.decode,
    ZSTD: filling(imagecodecs.zstd_decode),
    BLOSC2: blosc2.decode,
}
_NAMES = {DEFLATE: "deflate", SHUFFLE: "shuffle", FLETCHER32: "fletcher32", SZIP: "szip", LZF: "lzf", BLOSC: "blosc"}
_NAMES |= {BZIP2: "bzip2", LZ4: "lz4", BITSHUFFLE: "bitshuffle", ZSTD: "zstd", BLOSC2: "blosc2"}
_CODECS = {SZIP: "SZIP", LZF: "LZF", BLOSC: "BLOSC", LZ4: "LZ4H5", ZSTD: "ZSTD", BLOSC2: "BLOSC2"}
_UNAVAILABLE = {number for number, name in _CODECS.items() if not getattr(imagecodecs, name).available}
"""Filters that this build of imagecodecs lacks."""
