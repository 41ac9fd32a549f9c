"""Decoding of a chunk by the codecs of Zarr, on any thread: those that map bytes to bytes or to arrays, and no others.

A file names its codecs. numcodecs has some that run what is in a chunk (``pickle``), and takes others from any package;
here a name that is not listed needs an entry point of the group ``matex_data.codecs``::

    [project.entry-points."matex_data.codecs"]
    my_codec = "my_package.my_codec:decode"

``decode(data, configuration, most)`` gets uint8[n], the configuration as a dict, and the most bytes that the data may
have when they are decoded. It returns these as a buffer.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from math import prod
from typing import Any

import numcodecs
import numpy as np
from imagecodecs.numcodecs import register_codecs

from matex_data._types import Array, Bytes
from matex_data.codecs.bounded import COMPRESSORS, BrokenChunk, as_bytes, decompress, most_compressed
from matex_data.codecs.pipeline import ENTRY_POINTS, Filter, Pipeline
from matex_data.codecs.scratch import new_memory
from matex_data.declared import declared
from matex_data.errors import DataError
from matex_data.locks import cached_property
from matex_data.machine import check_fits

TEXTS = ("vlen-utf8", "vlen-bytes")
_CHECKSUMS = ("adler32", "crc32", "crc32c", "fletcher32", "jenkins_lookup3")
_TYPED = {
    "astype": ("decode_dtype", "encode_dtype"),
    **dict.fromkeys(("delta", "fixedscaleoffset", "quantize", "categorize"), ("dtype", "astype")),
}
"""Options of codecs that change the type: the decoded one, and the encoded one."""
_SAME_SIZE = ("bitround", "shuffle", *(f"imagecodecs_{name}" for name in ("bitorder", "delta", "floatpred", "xor")))
_SAME_SIZE += ("imagecodecs_bitshuffle", "imagecodecs_byteshuffle")
_PACKED = ("base64", "packbits", "imagecodecs_packints")
_PICTURES = tuple(f"imagecodecs_{name}" for name in ("jpeg", "jpeg2k", "jpegls", "jpegxl", "jpegxr", "png", "webp"))
_KNOWN = {*COMPRESSORS, *TEXTS, *_CHECKSUMS, *_TYPED, *_SAME_SIZE, *_PACKED, *_PICTURES}

_CHECKSUM_BYTES = 8
_LEAST_TEXTS = 1 << 20  # bytes of the first buffer for texts, whose size no file tells
_GROWTH = 8  # of this buffer, up to
_MOST_GROWTH = 1 << 15  # times the compressed bytes, as blocks of one byte in Zstandard
_TEXT_BYTES = 64  # of a text in memory, beside its characters


@dataclass(frozen=True)
class StoreCodec:
    """Codec that may run.

    Parameters
    ----------
    decode : ``decode(data)``; of a codec for pictures ``decode(data, out)``, of another package ``decode(data, most)``.
    """

    name: str
    options: dict[str, Any]
    decode: Callable[..., Any]

    def most_encoded(self, most: int) -> int:
        """Return the size of encoded data, in bytes at most, of which the decoded ones have ``most`` bytes."""
        if self.name in _TYPED:
            decoded, encoded = self.types
            return most // decoded.itemsize * encoded.itemsize
        if self.name in _CHECKSUMS:
            return most + _CHECKSUM_BYTES
        return most if self.name in _SAME_SIZE else most_compressed(most)

    @property
    def types(self) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """Decoded and encoded type of a codec that changes it."""
        decoded, encoded = _TYPED[self.name]
        return np.dtype(self.options[decoded]), np.dtype(self.options.get(encoded) or self.options[decoded])


@cache
def codec_of(configuration: str) -> StoreCodec:
    """Return the codec of a configuration in JSON; raise ``ValueError`` if it is none that may run."""
    options = json.loads(configuration)
    name = str(options["id"])
    if name not in _KNOWN:
        entry = next(iter(entry_points(group=ENTRY_POINTS, name=name)), None)
        if entry is None:
            raise ValueError("it is none of those that only decode; a package adds one by an entry point")
        function = entry.load()
        return StoreCodec(name, options, lambda data, most: function(data, dict(options), most))
    if name in COMPRESSORS:
        return StoreCodec(name, options, bytes)
    if name.startswith("imagecodecs_"):
        register_codecs((name,), verbose=False)
    codec = StoreCodec(name, options, numcodecs.get_codec(dict(options)).decode)
    for dtype in codec.types if name in _TYPED else ():
        if dtype.kind not in "biufcmMSU" or not dtype.itemsize:
            raise ValueError(f"elements of the type {dtype}")
    return codec


def problem(configuration: str) -> str | None:
    """Return why a codec does not run; None if it does."""
    try:
        codec_of(configuration)
    except Exception as error:  # of any kind, of the codec's own package
        return f"the codec {json.loads(configuration).get('id')!r}: {error}"
    return None


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

    @cached_property
    def _most(self) -> list[int | None]:
        """Bytes that each codec decodes to, at most; None: texts, whose size no file tells."""
        codecs = [codec_of(configuration) for configuration in self.codecs]
        if codecs and codecs[0].name in TEXTS:
            return [None] * len(codecs)
        most = [self.nbytes]
        for codec in codecs[:-1]:
            most.append(codec.most_encoded(most[-1]))
        return list(most)

    def decode(self, stored: Bytes, mask: int = 0, out: Bytes | None = None) -> Bytes:
        """Decode one chunk; see `Pipeline.decode`. ``mask`` is the checksum of its bytes, see `stores.Extent`."""
        if mask and zlib.crc32(stored.data) + 1 != mask:
            raise BrokenChunk("its CRC-32 is not that of the zip file")
        data = as_bytes(self._undo(stored, None if self.axes else out))
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
        PartitionError : its texts do not fit into memory.
        """
        texts = np.asarray(self._undo(stored, None), object).reshape(self.stored_shape)
        return texts if self.axes is None else texts.transpose(self.axes)

    def _undo(self, data: Any, out: Bytes | None) -> Any:
        """Return what the codecs give for a chunk; the last one writes to ``out`` where it can."""
        for number, codec in reversed(list(enumerate(map(codec_of, self.codecs)))):
            try:
                data = self._decode(codec, as_bytes(data), self._most[number], out if number == 0 else None)
            except (MemoryError, DataError, BrokenChunk):
                raise
            except Exception as error:  # codecs raise errors of many kinds
                raise BrokenChunk(f"{codec.name}: {error}") from error
        return data

    def _decode(self, codec: StoreCodec, data: Bytes, most: int | None, out: Bytes | None) -> Any:
        if codec.name in TEXTS:
            return codec.decode(self._counted(data))
        if codec.name in COMPRESSORS:
            if most is None:
                return _decompress_texts(codec, data)
            return decompress(codec.name, data, most, new_memory if out is None else lambda _: out, codec.options)
        if codec.name in _PICTURES:
            shape = tuple(length for length in self.stored_shape if length > 1)
            return codec.decode(data, np.empty(shape, f"u{self.itemsize}"))
        if codec.name not in _KNOWN:
            return codec.decode(data, most)
        if most is not None and data.nbytes > codec.most_encoded(most):
            raise BrokenChunk(f"{codec.name}: {data.nbytes} bytes for {most}")
        return codec.decode(data)

    def _counted(self, data: Bytes) -> Bytes:
        """Return encoded texts, unless they are not as many as those of a chunk.

        https://numcodecs.readthedocs.io/en/stable/other/vlen.html: the number of texts as 32 bits, then the texts
        """
        count, stated = prod(self.stored_shape), int.from_bytes(data[:4].tobytes(), "little")
        if stated != count or data.nbytes < 4 * (count + 1):
            raise BrokenChunk(f"{stated} texts in {data.nbytes} bytes instead of {count}")
        check_fits(data.nbytes + _TEXT_BYTES * count, "a chunk of texts", remedy="rechunk the array with fewer texts")
        return data


def _decompress_texts(codec: StoreCodec, data: Bytes) -> Bytes:
    """Undo a compressor in a buffer that grows: what it has compressed may have any size."""
    most = max(_LEAST_TEXTS, _GROWTH * data.nbytes)
    while True:
        check_fits(most, "a chunk of texts", remedy="rechunk the array with fewer texts")
        try:
            return decompress(codec.name, data, most, options=codec.options)
        except BrokenChunk:
            if most > _MOST_GROWTH * data.nbytes:
                raise
        most *= _GROWTH
