"""Undo HDF5's shuffle filter, which stores byte i of all elements together as plane i.

Sources: https://support.hdfgroup.org/documentation/hdf5/latest/group___d_c_p_l.html, H5Pset_shuffle;
https://github.com/Blosc/c-blosc, ``README_CHUNK_FORMAT.rst``.

Blosc shuffles in the same way, and its vectorized code is several times as fast as a copy by NumPy for each plane. The
planes become a Blosc chunk of one block that is stored without compression.
"""

from __future__ import annotations

import struct

import imagecodecs

from matex_data._types import Bytes
from matex_data.codecs.scratch import frame_scratch

WIDTHS = (2, 4, 8, 16)  # bytes of the elements for which Blosc has vectorized code
PIECE_BYTES = 1 << 17  # of a Blosc chunk: it stays in the cache of the core

_HEADER = struct.Struct("<4B5I")
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
    whole = count * width
    planes = data[:whole].reshape(width, count)
    if width in WIDTHS and imagecodecs.BLOSC.available:
        most = PIECE_BYTES // width
        for begin in range(0, count, most):
            _by_blosc(planes[:, begin : begin + most], out[begin * width : min(begin + most, count) * width])
    else:
        columns = out[:whole].reshape(count, width)
        for i in range(width):  # several times as fast as one transposed copy
            columns[:, i] = planes[i]
    out[whole:] = data[whole:]


def _by_blosc(planes: Bytes, out: Bytes) -> None:
    """Assemble elements: uint8[width, n] to uint8[n * width], contiguous."""
    (width, _), size = planes.shape, planes.nbytes
    frame = frame_scratch(_HEADER.size + size)
    begin = _HEADER.size - 4  # of the block: the length of its only stream, and the stream
    flags = _SHUFFLED | _ONE_STREAM
    _HEADER.pack_into(frame.data, 0, _FORMAT, _STORED, flags, width, size, size, _HEADER.size + size, begin, size)
    frame[_HEADER.size :].reshape(planes.shape)[...] = planes
    imagecodecs.blosc_decode(frame, numthreads=1, out=out)
