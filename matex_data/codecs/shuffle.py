"""Undo HDF5's shuffle filter, which stores byte i of all elements together as plane i.

Sources: https://support.hdfgroup.org/documentation/hdf5/latest/group___d_c_p_l.html, H5Pset_shuffle;
https://github.com/Blosc/c-blosc, ``README_CHUNK_FORMAT.rst``.

Blosc shuffles in the same way, and its vectorized code is several times as fast as a copy by NumPy for each plane. The
planes become a Blosc chunk whose blocks are stored without compression.
"""

from __future__ import annotations

import struct

import imagecodecs
import numpy as np

from matex_data._types import Bytes
from matex_data.codecs.scratch import frame_scratch

WIDTHS = (2, 4, 8, 16)  # bytes of the elements for which Blosc has vectorized code
BLOCK_BYTES = 1 << 15  # it stays in the cache of a core

_HEADER = struct.Struct("<4B3I")
_FORMAT, _STORED, _SHUFFLED, _ONE_STREAM = 2, 1, 0x1, 0x10  # versions of format and codec, flags


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
    begin = _by_blosc(planes, out) if width in WIDTHS and imagecodecs.BLOSC.available else 0
    columns = out[: count * width].reshape(count, width)
    for i in range(width):  # several times as fast as one transposed copy
        columns[begin:, i] = planes[i, begin:]
    out[count * width :] = data[count * width :]


def _by_blosc(planes: Bytes, out: Bytes) -> int:
    """Assemble the elements of all whole blocks, and return their number."""
    width, length = len(planes), BLOCK_BYTES // len(planes)
    blocks = planes.shape[1] // length
    if not blocks:
        return 0
    each = 4 + BLOCK_BYTES  # the length of the only stream of a block, and the stream
    begin = _HEADER.size + 4 * blocks
    frame, size = frame_scratch(begin + each * blocks), blocks * BLOCK_BYTES
    flags = _SHUFFLED | _ONE_STREAM
    _HEADER.pack_into(frame.data, 0, _FORMAT, _STORED, flags, width, size, BLOCK_BYTES, frame.nbytes)
    frame[_HEADER.size : begin].view("<u4")[:] = np.arange(begin, frame.nbytes, each)
    body = frame[begin:].reshape(blocks, each)
    body[:, :4] = np.frombuffer(BLOCK_BYTES.to_bytes(4, "little"), np.uint8)
    for i in range(width):
        body[:, 4 + i * length : 4 + (i + 1) * length] = planes[i, : blocks * length].reshape(blocks, length)
    imagecodecs.blosc_decode(frame, numthreads=1, out=out[:size])
    return int(blocks * length)
