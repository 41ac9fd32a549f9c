"""Undo the Blosc2 filter, which stores a chunk as a frame, in blocks of one or several axes.

Sources: https://github.com/Blosc/c-blosc2, ``README_CFRAME_FORMAT.rst`` and ``README_B2ND_METALAYER.rst``.

imagecodecs decompresses the chunk inside the frame; the frame itself is parsed here. The ``blosc2`` package decodes
whole frames, but holds the interpreter lock while it does: two threads take twice the time of one (measured with
blosc2 4.14 on chunks of 2.5 MB, where this module's threads run in parallel).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import imagecodecs
import numpy as np

from matex_data._types import Bytes
from matex_data.codecs.bounded import as_bytes
from matex_data.codecs.scratch import Memory

MAGIC = b"b2frame\x00"
MAGIC_AT, HEADER_SIZE_AT, STORED_SIZE_AT, ITEM_SIZE_AT = 2, 11, 39, 48  # byte positions of big-endian numbers
B2ND = b"\xa4b2nd\xd2"  # name of the metalayer that describes several axes, followed by its position in four bytes
ZEROS = 0x81  # special value of a chunk of zeros
AXES_AT = 7  # position of the number of axes in the metalayer
MAX_AXES = 15
OFFSET_BYTES = 8  # of the only chunk of a frame


def decode(data: Bytes, options: tuple[int, ...], most: int, memory: Memory) -> Bytes:
    """Undo the filter; see `matex_data.codecs.bounded.Decode`.

    Raises
    ------
    RuntimeError, ValueError, IndexError, SystemError : the frame is corrupt.
    """
    head = data[:4096].tobytes()
    if head[MAGIC_AT : MAGIC_AT + len(MAGIC)] != MAGIC:
        raise ValueError("not a Blosc2 frame")
    start = _number(head, HEADER_SIZE_AT, 4)
    if not _number(head, STORED_SIZE_AT, 8):
        return _special_chunk(data[start:], most, memory)
    shapes = _shapes(head[:start])
    if shapes is None or shapes[0] == shapes[1]:
        return as_bytes(imagecodecs.blosc2_decode(data[start:], numthreads=1, out=memory(most)))
    (chunk, block), width = shapes, _number(head, ITEM_SIZE_AT, 4)
    nbytes = prod(-(-n // b) * b for n, b in zip(chunk, block, strict=True)) * width
    if prod(chunk) * width > most or nbytes > most << len(chunk):
        raise ValueError(f"a chunk of the shape {chunk} in blocks of {block}")
    blocks = as_bytes(imagecodecs.blosc2_decode(data[start:], numthreads=1, out=np.empty(nbytes, np.uint8)))
    return _assemble(blocks, chunk, block, width, memory)


def _number(head: bytes, at: int, nbytes: int) -> int:
    return int.from_bytes(head[at : at + nbytes], "big")


def _special_chunk(offsets: Bytes, nbytes: int, memory: Memory) -> Bytes:
    """Return a chunk of zeros, which is stored only as a special value in the upper byte of its offset."""
    decoded = np.empty(OFFSET_BYTES, np.uint8)
    special = int(as_bytes(imagecodecs.blosc2_decode(offsets, numthreads=1, out=decoded))[7])
    if special != ZEROS:
        raise ValueError(f"a chunk of the unknown special value {special:#x}")
    out = memory(nbytes)
    out[...] = 0
    return out


def _shapes(header: bytes) -> tuple[list[int], list[int]] | None:
    """Return the shapes of the chunk and of its blocks; None if the chunk is one-dimensional."""
    entry = header.find(B2ND)
    if entry < 0:
        return None
    at = _number(header, entry + len(B2ND), 4) + AXES_AT
    axes = header[at]
    if axes > MAX_AXES:
        raise ValueError(f"{axes} axes")
    at += 2 + axes * 9 + 1  # skip the array's shape: a tag and eight bytes an axis
    chunk = [_number(header, at + axis * 5 + 1, 4) for axis in range(axes)]
    at += axes * 5 + 1
    return chunk, [_number(header, at + axis * 5 + 1, 4) for axis in range(axes)]


def _assemble(blocks: Bytes, chunk: Sequence[int], block: Sequence[int], width: int, memory: Memory) -> Bytes:
    """Return the chunk made of consecutive blocks; blocks at its edges are padded to the full block shape."""
    count = [-(-n // b) for n, b in zip(chunk, block, strict=True)]
    axes = len(chunk)
    order = [axis for pair in zip(range(axes), range(axes, 2 * axes), strict=True) for axis in pair]
    items = blocks.view(f"V{width}").reshape(*count, *block).transpose(order)
    padded = items.reshape([n * b for n, b in zip(count, block, strict=True)])
    out = memory(prod(chunk) * width)
    out.view(f"V{width}").reshape(chunk)[...] = padded[tuple(slice(0, n) for n in chunk)]
    return out
