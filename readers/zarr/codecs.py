"""Decoding of a chunk by numcodecs, on any thread."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import imagecodecs
import numcodecs
import numpy as np
from imagecodecs.numcodecs import register_codecs

from matex_data._types import Array, Bytes
from matex_data.codecs.pipeline import BrokenChunk, Filter, Pipeline, check_blosc
from matex_data.declared import declared

_INTO_MEMORY: dict[str, Callable[..., Any]] = {
    "blosc": lambda data, out: imagecodecs.blosc_decode(data, out=out, numthreads=1),
    "zstd": lambda data, out: imagecodecs.zstd_decode(data, out=out),
}
"""Decoders that write to given memory and return what they have filled of it; those of numcodecs return all of it."""


@declared
@dataclass(frozen=True)
class StoreCodecs(Pipeline):
    """Codecs of an array.

    Parameters
    ----------
    codecs : configurations of numcodecs as JSON, in the order of encoding.
    stored_shape : of a chunk as it is stored.
    axes : axis of the stored chunk for each axis of the array; None: both have the same order.
    """

    codecs: tuple[str, ...] = ()
    stored_shape: tuple[int, ...] = ()
    axes: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, codecs: tuple[str, ...], chunk_shape: tuple[int, ...], order: tuple[int, ...], itemsize: int
    ) -> StoreCodecs:
        """Return the codecs of chunks of a shape.

        Parameters
        ----------
        order : axes of the array in the order in which a chunk stores them.

        Examples
        --------
        >>> plain = StoreCodecs.of((), (2, 3), (1, 0), itemsize=1)
        >>> plain.decode(np.arange(6, dtype=np.uint8)).reshape(2, 3).tolist()
        [[0, 2, 4], [1, 3, 5]]
        """
        axes = None if order == tuple(range(len(order))) else tuple(int(axis) for axis in np.argsort(order))
        decoding = (Filter(0),) if codecs or axes else ()
        stored_shape = tuple(chunk_shape[axis] for axis in order)
        return cls(decoding, itemsize, prod(chunk_shape) * itemsize, codecs, stored_shape, axes)

    def decode(self, stored: Bytes, mask: int = 0, out: Bytes | None = None) -> Bytes:
        """Decode one chunk; see `Pipeline.decode`. ``mask`` is the checksum of its bytes, see `stores.Extent`."""
        if mask and zlib.crc32(stored.data) + 1 != mask:
            raise BrokenChunk("its CRC-32 is not that of the zip file")
        data = _as_bytes(self._undo(stored, None if self.axes else out))
        if data.nbytes != self.nbytes:
            raise BrokenChunk(f"{data.nbytes} bytes instead of {self.nbytes}")
        if self.axes is not None:
            items = data.view(np.dtype((np.void, self.itemsize))).reshape(self.stored_shape)
            data = np.ascontiguousarray(items.transpose(self.axes)).reshape(-1).view(np.uint8)
        if out is None:
            return data
        if data.ctypes.data != out.ctypes.data:
            out[...] = data
        return out

    def decode_texts(self, stored: Bytes) -> Array:
        """Return the texts of a chunk as an array of objects of the chunk's shape.

        Raises
        ------
        BrokenChunk : the chunk does not decode.
        """
        texts = np.asarray(self._undo(stored, None), object).reshape(-1)
        if len(texts) != prod(self.stored_shape):
            raise BrokenChunk(f"{len(texts)} texts instead of {prod(self.stored_shape)}")
        texts = texts.reshape(self.stored_shape)
        return texts if self.axes is None else texts.transpose(self.axes)

    def _undo(self, data: Any, out: Bytes | None) -> Any:
        """Return what the codecs give for a chunk; the last one writes to ``out`` where it can."""
        for number, configuration in reversed(list(enumerate(self.codecs))):
            name, codec = _codec(configuration)
            if name == "blosc":
                check_blosc(_as_bytes(data))
            try:
                into = _INTO_MEMORY.get(name) if number == 0 and out is not None else None
                data = codec.decode(data) if into is None else into(data, out)
            except MemoryError:
                raise
            except Exception as error:  # codecs raise errors of many kinds
                raise BrokenChunk(f"{name}: {error}") from error
        return data


def _as_bytes(data: Any) -> Bytes:
    array = np.asarray(data) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


@cache
def _codec(configuration: str) -> tuple[str, Any]:
    """Return the name of a codec, and the codec of numcodecs."""
    options = json.loads(configuration)
    name = str(options["id"])
    if name.startswith("imagecodecs_"):
        register_codecs((name,), verbose=False)
    return name, numcodecs.get_codec(options)


def problem(configuration: str) -> str | None:
    """Return why numcodecs has no such codec; None if it has."""
    try:
        _codec(configuration)
    except Exception as error:  # of any kind, of the codec's own package
        return f"the codec {json.loads(configuration).get('id')!r}: {error}"
    return None
