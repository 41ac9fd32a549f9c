"""Decompression that stops at a given size: the bytes of a file do not decide how much memory they take.

Every decoder writes to a buffer that is as long as what was declared, or is asked for so many bytes at most.
"""

from __future__ import annotations

import bz2
import lzma
from collections.abc import Callable, Mapping
from typing import Any

import imagecodecs
import numpy as np

from matex_data._types import Bytes
from matex_data.codecs.scratch import Memory, new_memory

BLOSC_HEADER = 16  # bytes
LZMA_MEMORY = 1 << 30  # bytes of a dictionary, as the strongest preset has 64 MiB

inflate = imagecodecs.deflate_decode if imagecodecs.DEFLATE.available else imagecodecs.zlib_decode
"""Decoder of zlib streams, by the faster library."""


class BrokenChunk(ValueError):
    """A chunk whose bytes its filters cannot have written."""


def most_compressed(nbytes: int) -> int:
    """Return the largest size, in bytes, of so many bytes that a compressor has failed to make smaller.

    Of the compressors here, LZW adds most: four bits to each byte.
    """
    return nbytes + nbytes // 2 + (64 << 10)


def check_blosc(data: Bytes) -> None:
    """Raise ``BrokenChunk`` for a Blosc frame that is shorter than its header says: Blosc would read beyond its end.

    https://github.com/Blosc/c-blosc/blob/main/README_CHUNK_FORMAT.rst
    """
    stated = int.from_bytes(bytes(data[12:16]), "little")
    if data.nbytes < BLOSC_HEADER or stated > data.nbytes:
        raise BrokenChunk(f"a frame of {data.nbytes} bytes, and {stated} according to its header")


Decode = Callable[[Bytes, Any, int, Memory], Bytes]
"""Decoder: ``decode(data, options, most, memory)``.

It returns ``most`` bytes or fewer, in memory from the allocator, whatever the data say of their size.
"""


def decoded(name: str, decode: Decode, data: Bytes, options: Any, most: int, memory: Memory) -> Bytes:
    """Return what a decoder makes of bytes; raise ``BrokenChunk`` with its name if it fails."""
    try:
        return decode(data, options, most, memory)
    except MemoryError:
        raise
    except Exception as error:  # libraries raise many kinds on damaged bytes
        raise BrokenChunk(f"{name}: {error}") from error


def decompress(
    name: str, data: Bytes, most: int, memory: Memory = new_memory, options: Mapping[str, Any] | None = None
) -> Bytes:
    """Undo a compressor of numcodecs or imagecodecs.

    Parameters
    ----------
    name : of the compressor, one of `COMPRESSORS`.
    data : uint8[n], the compressed bytes.
    most : bytes of the result, at most.
    memory : allocator of the result.
    options : of the compressor, as numcodecs writes them.

    Returns
    -------
    uint8[m], the decompressed bytes.

    Raises
    ------
    BrokenChunk : the bytes do not decompress, or to more than ``most`` bytes.

    Examples
    --------
    >>> import zlib
    >>> decompress("zlib", np.frombuffer(zlib.compress(b"abc"), np.uint8), most=3).tobytes()
    b'abc'
    """
    result = decoded(name, COMPRESSORS[name], data, options or {}, most, memory)
    if result.nbytes > most:
        raise BrokenChunk(f"{name}: more than {most} bytes")
    return result


def filling(decode: Callable[..., Any], check: Callable[[Bytes], None] | None = None, **given: Any) -> Decode:
    """Return the decoder that fills a buffer by a function of imagecodecs, which fails if it is too short."""

    def run(data: Bytes, options: Any, most: int, memory: Memory) -> Bytes:
        if check is not None:
            check(data)
        return as_bytes(decode(data, out=memory(most), **given))

    return run


def _cut(decode: Callable[..., Any]) -> Decode:
    """Return a decoder by a function that stops without an error where its buffer ends."""

    def run(data: Bytes, options: Any, most: int, memory: Memory) -> Bytes:
        return as_bytes(decode(data, out=new_memory(most + 1)))

    return run


def _bz2(data: Bytes, options: Any, most: int, memory: Memory) -> Bytes:
    return as_bytes(bz2.BZ2Decompressor().decompress(data.data, most + 1))


def _lzma(data: Bytes, options: Any, most: int, memory: Memory) -> Bytes:
    kind = options.get("format") or lzma.FORMAT_AUTO
    raw = kind == lzma.FORMAT_RAW
    limit = {"filters": options["filters"]} if raw else {"memlimit": LZMA_MEMORY}
    return as_bytes(lzma.LZMADecompressor(kind, **limit).decompress(data.data, most + 1))


def as_bytes(decoded: Any) -> Bytes:
    """Return what a decoder returns as uint8[n]."""
    array = decoded if isinstance(decoded, np.ndarray) else np.frombuffer(decoded, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


COMPRESSORS: dict[str, Decode] = {
    "zlib": filling(inflate),
    "gzip": filling(imagecodecs.gzip_decode),
    "bz2": _bz2,
    "lzma": _lzma,
    "zstd": filling(imagecodecs.zstd_decode),
    "lz4": filling(imagecodecs.lz4_decode, header=True),
    "blosc": filling(imagecodecs.blosc_decode, check_blosc, numthreads=1),
}
COMPRESSORS |= {
    f"imagecodecs_{name}": filling(getattr(imagecodecs, f"{name}_decode"))
    for name in ("deflate", "zlib", "zstd", "lz4", "lz4h5", "lzf", "blosc2", "brotli", "snappy", "packbits")
}
COMPRESSORS |= {f"imagecodecs_{name}": _cut(getattr(imagecodecs, f"{name}_decode")) for name in ("lzw", "lz4f")}
"""Compressors by their names in numcodecs. Names that begin with ``imagecodecs_`` are those of its registry there."""
