"""The bitshuffle filter: bits of equal weight lie together, each block of elements by itself, maybe compressed.

Source: https://github.com/kiyo-masui/bitshuffle, ``src/bshuf_h5filter.c`` and ``src/bitshuffle.c``. Options in the
file: version (two numbers), bytes of an element, elements in a block (0: about 8 KiB), compression of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import imagecodecs
import numpy as np

from matex_data._types import Bytes
from matex_data.codecs.scratch import Memory

HEADER = 12  # bytes: decoded size (8), bytes of a block (4), big-endian, as are the sizes of the blocks
BLOCK_BYTES = 8192
LEAST_BLOCK = 128  # elements
TOGETHER = 8  # elements whose bits are shuffled together; fewer at the end are left as they are
BLOCKS: dict[int, Callable[..., Any]] = {2: imagecodecs.lz4_decode, 3: imagecodecs.zstd_decode}


def supported(options: tuple[int, ...]) -> bool:
    """Whether chunks written with these options can be decoded here."""
    codec = _compression(options)
    lacking = {2: not imagecodecs.LZ4.available, 3: not imagecodecs.ZSTD.available}
    return codec == 0 or (codec in BLOCKS and not lacking[codec])


def _compression(options: tuple[int, ...]) -> int:
    return options[4] if len(options) > 4 else 0


def undo(data: Bytes, options: tuple[int, ...], size: int | None, memory: Memory) -> Bytes:
    """The chunk as it was before the filter.

    Raises
    ------
    RuntimeError, ValueError : a block is broken.
    """
    width, block = options[2], options[3]
    if _compression(options):
        data, block = _blocks(data, BLOCKS[_compression(options)], width)
    block = block or max(BLOCK_BYTES // width // TOGETHER * TOGETHER, LEAST_BLOCK)
    out = memory(data.nbytes)
    items = np.dtype(f"V{width}")
    imagecodecs.bitshuffle_decode(data.view(items), itemsize=width, blocksize=block, out=out.view(items))
    return out


def _blocks(data: Bytes, decode: Callable[..., Any], width: int) -> tuple[Bytes, int]:
    """The blocks decoded, one behind the other, and the number of elements in each."""
    nbytes, block_bytes = int.from_bytes(data[:8].tobytes(), "big"), int.from_bytes(data[8:12].tobytes(), "big")
    rest = nbytes % (TOGETHER * width)
    if block_bytes <= 0 or block_bytes % width or nbytes > data.nbytes * 256 * 8:
        raise ValueError(f"blocks of {block_bytes} bytes, {nbytes} bytes in all")
    decoded = np.empty(nbytes, np.uint8)
    at = HEADER
    for start in range(0, nbytes - rest, block_bytes):
        stop = min(start + block_bytes, nbytes - rest)
        length = int.from_bytes(data[at : at + 4].tobytes(), "big")
        decode(data[at + 4 : at + 4 + length], out=decoded[start:stop])
        at += 4 + length
    decoded[nbytes - rest :] = data[at : at + rest]
    return decoded, block_bytes // width
