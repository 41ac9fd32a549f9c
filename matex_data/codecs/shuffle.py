"""Undo HDF5's shuffle filter, which stores byte i of all elements together as plane i.

Source: https://support.hdfgroup.org/documentation/hdf5/latest/group___d_c_p_l.html, H5Pset_shuffle.

Elements of 2, 4 or 8 bytes are assembled in a loop that Numba compiles, which runs without the interpreter lock and
writes each element once, to its destination. NumPy needs a pass for each plane and another one to scatter the rows; an
epoch of int16 images in chunks of 200 to 400 KB (shuffle and gzip 1) then takes 13 to 15 % more processor time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from matex_data._types import Array, Bytes, Integers
from matex_data.codecs.compiled import compiled

WIDTHS = (2, 4, 8)  # bytes of the elements that the compiled loop assembles

_FIRST_ROW: Integers = np.zeros(1, np.int64)


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
    if width in WIDTHS:
        _compiled_loop(width)(planes, out[:whole].view(f"<u{width}").reshape(1, -1), _FIRST_ROW)
    else:
        columns = out[:whole].reshape(count, width)
        for i in range(width):  # several times as fast as one transposed copy
            columns[:, i] = planes[i]
    out[whole:] = data[whole:]


def unshuffle_rows(data: Bytes, out: Array, destination: Integers) -> None:
    """Assemble row i of the planes in ``out[destination[i]]``, for all i.

    Parameters
    ----------
    data : uint8[n], the planes of at least as many rows as there are destinations.
    out : [rows, ...], contiguous, of elements of 2, 4 or 8 bytes in the byte order of the planes.
    destination : int64[k], rows of ``out``.
    """
    width = out.dtype.itemsize
    rows = out.reshape(len(out), -1).view(f"<u{width}")
    _compiled_loop(width)(data[: data.nbytes // width * width].reshape(width, -1), rows, destination)


@cache
def _compiled_loop(width: int) -> Callable[[Bytes, Array, Integers], None]:
    """Compile the loop for elements of ``width`` bytes."""
    from numba import from_dtype, int64, types, uint8, void  # importing Numba takes most of a second

    unsigned: Any = np.dtype(f"u{width}").type

    def loop(planes: Any, out: Any, destination: Any) -> None:
        length = out.shape[1]
        for row in range(len(destination)):
            start, to = row * length, destination[row]
            for i in range(length):
                element = unsigned(0)
                for plane in range(width):
                    element |= unsigned(planes[plane, start + i]) << unsigned(8 * plane)
                out[to, i] = element

    signature = void(
        types.Array(uint8, 2, "C", readonly=True),
        types.Array(from_dtype(np.dtype(unsigned)), 2, "C"),
        types.Array(int64, 1, "C", readonly=True),
    )
    return compiled(loop, signature)
