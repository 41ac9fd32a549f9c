"""The Blosc2 filter: one chunk in a frame, its values maybe in blocks of several axes.

Sources: https://github.com/Blosc/c-blosc2, ``README_CFRAME_FORMAT.rst`` and ``README_B2ND_METALAYER.rst``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import imagecodecs
import numpy as np

from matex_data._types import Bytes
from matex_data.codecs.scratch import Memory

MAGIC = b"b2frame\x00"
MAGIC_AT, HEADER_SIZE, STORED_SIZE, ITEM_SIZE = 2, 11, 39, 48  # byte positions; the numbers are big-endian
B2ND = b"\xa4b2nd\xd2"  # name of the entry that describes several axes; where it is follows as four bytes
ZEROS = 0x81  # a special value: zeros
AXES = 7  # bytes from there to the number of axes


def undo(data: Bytes, options: tuple[int, ...], size: int | None, memory: Memory) -> Bytes:
    """The chunk as it was before the filter.

    Raises
    ------
    RuntimeError, ValueError, IndexError : the frame is broken.
    """
    head = data[:4096].tobytes()
    if head[MAGIC_AT : MAGIC_AT + len(MAGIC)] != MAGIC:
        raise ValueError("no frame of Blosc2")
    start = _number(head, HEADER_SIZE, 4)
    if not _number(head, STORED_SIZE, 8):
        return _special(data[start:], size, memory)
    shapes = _shapes(head[:start])
    if shapes is None or shapes[0] == shapes[1]:
        return _flat(imagecodecs.blosc2_decode(data[start:], numthreads=1, out=None if size is None else memory(size)))
    blocks = _flat(imagecodecs.blosc2_decode(data[start:], numthreads=1))
    return _joined(blocks, *shapes, _number(head, ITEM_SIZE, 4), memory)


def _number(head: bytes, at: int, nbytes: int) -> int:
    return int.from_bytes(head[at : at + nbytes], "big")


def _flat(decoded: Any) -> Bytes:
    return np.frombuffer(decoded, np.uint8)


def _special(offsets: Bytes, size: int | None, memory: Memory) -> Bytes:
    """A chunk of zeros is only marked, in the upper byte of its offset."""
    mark = int(_flat(imagecodecs.blosc2_decode(offsets, numthreads=1))[7])
    if mark != ZEROS or size is None:
        raise ValueError(f"a chunk without bytes that is marked {mark:#x}")
    out = memory(size)
    out[...] = 0
    return out


def _shapes(header: bytes) -> tuple[list[int], list[int]] | None:
    """Shape of the chunk and of a block in it; None if its values lie one behind the other."""
    entry = header.find(B2ND)
    if entry < 0:
        return None
    at = _number(header, entry + len(B2ND), 4) + AXES
    axes = header[at]
    if axes > 15:
        raise ValueError(f"{axes} axes")
    at += 2 + axes * 9 + 1  # past the tag and the shape, eight bytes and a tag each
    chunk = [_number(header, at + axis * 5 + 1, 4) for axis in range(axes)]
    at += axes * 5 + 1
    return chunk, [_number(header, at + axis * 5 + 1, 4) for axis in range(axes)]


def _joined(blocks: Bytes, chunk: Sequence[int], block: Sequence[int], width: int, memory: Memory) -> Bytes:
    """Blocks lie one behind the other, those at the edges padded to the full size."""
    count = [-(-n // b) for n, b in zip(chunk, block, strict=True)]
    axes = len(chunk)
    order = [axis for pair in zip(range(axes), range(axes, 2 * axes), strict=True) for axis in pair]
    items = blocks.view(f"V{width}").reshape(*count, *block).transpose(order)
    whole = items.reshape([n * b for n, b in zip(count, block, strict=True)])
    out = memory(prod(chunk) * width)
    out.view(f"V{width}").reshape(chunk)[...] = whole[tuple(slice(0, n) for n in chunk)]
    return out
