"""Undo the bitshuffle filter, which transposes the bits of blocks of elements and may compress each block.

Source: https://github.com/kiyo-masui/bitshuffle, ``src/bshuf_h5filter.c`` and ``src/bitshuffle.c``. Filter options:
version (two numbers), bytes of an element, elements of a block (0: about 8 KiB), compression of the blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import imagecodecs
import numpy as np

from matex_data._types import Bytes
from matex_data.codecs.scratch import Memory

HEADER_BYTES = 12  # decoded size (8), size of a block (4); both big-endian, as are the sizes in front of the blocks
BLOCK_BYTES = 8192
LEAST_BLOCK = 128  # elements
GROUP = 8  # elements whose bits are transposed together; a shorter group at the end is stored as it is
BLOCK_CODECS: dict[int, Callable[..., Any]] = {2: imagecodecs.lz4_decode, 3: imagecodecs.zstd_decode}


def can_decode(options: tuple[int, ...]) -> bool:
    """Return whether chunks that were written with these options can be decoded."""
    codec = _compression(options)
    missing = {2: not imagecodecs.LZ4.available, 3: not imagecodecs.ZSTD.available}
    return codec == 0 or (codec in BLOCK_CODECS and not missing[codec])


def _compression(options: tuple[int, ...]) -> int:
    return options[4] if len(options) > 4 else 0


def decode(data: Bytes, options: tuple[int, ...], most: int, memory: Memory) -> Bytes:
    """Undo the filter; see `matex_data.codecs.bounded.Decode`.

    Raises
    ------
    RuntimeError, ValueError : a block is corrupt.
    """
    width, block = options[2], options[3]
    if _compression(options):
        data, block = _decompress(data, BLOCK_CODECS[_compression(options)], width, most)
    block = block or max(BLOCK_BYTES // width // GROUP * GROUP, LEAST_BLOCK)
    out = memory(data.nbytes)
    items = np.dtype(f"V{width}")
    imagecodecs.bitshuffle_decode(data.view(items), itemsize=width, blocksize=block, out=out.view(items))
    return out


def _decompress(data: Bytes, decode_block: Callable[..., Any], width: int, most: int) -> tuple[Bytes, int]:
    """Return the concatenated decompressed blocks, and the number of elements of a block."""
    nbytes, block_bytes = int.from_bytes(data[:8].tobytes(), "big"), int.from_bytes(data[8:12].tobytes(), "big")
    rest = nbytes % (GROUP * width)
    if block_bytes <= 0 or block_bytes % width or nbytes > most:
        raise ValueError(f"blocks of {block_bytes} bytes, {nbytes} bytes in all")
    decoded = np.empty(nbytes, np.uint8)
    at = HEADER_BYTES
    for start in range(0, nbytes - rest, block_bytes):
        stop = min(start + block_bytes, nbytes - rest)
        length = int.from_bytes(data[at : at + 4].tobytes(), "big")
        decode_block(data[at + 4 : at + 4 + length], out=decoded[start:stop])
        at += 4 + length
    if at + rest > len(data):  # a single byte would be repeated
        raise ValueError(f"{len(data)} bytes, where {at + rest} are needed")
    decoded[nbytes - rest :] = data[at : at + rest]
    return decoded, block_bytes // width
