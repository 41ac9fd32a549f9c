"""Undo HDF5's shuffle filter: byte i of every element lies in plane i. Compiled by Numba, off Python's lock.

Source: https://support.hdfgroup.org/documentation/hdf5/latest/group___d_c_p_l.html, H5Pset_shuffle. Elements are made
in the processor's registers and written once, where they belong: NumPy needs a pass for each of their bytes, and one
more to bring rows to their places.
"""

from __future__ import annotations

import numpy as np

from matex_data._types import Array, Bytes, Integers

WIDTHS = (2, 4, 8)  # bytes of the elements that fit a register; others are put together plane by plane

_FIRST: Integers = np.zeros(1, np.int64)


def unshuffle(data: Bytes, width: int, out: Bytes) -> None:
    """Elements of ``width`` bytes, one behind the other; bytes behind the last whole element are as they were.

    Parameters
    ----------
    data : uint8[n], the planes.
    width : bytes of an element.
    out : uint8[n], contiguous; not the same memory.
    """
    count = data.nbytes // width
    whole = count * width
    planes = data[:whole].reshape(width, count)
    if width in WIDTHS:
        _to_rows(planes, out[:whole].view(f"<u{width}").reshape(1, -1), _FIRST)
    else:
        columns = out[:whole].reshape(count, width)
        for i in range(width):  # several times as fast as one transposed copy
            columns[:, i] = planes[i]
    out[whole:] = data[whole:]


def unshuffle_rows(data: Bytes, out: Array, destination: Integers) -> None:
    """Each row to its destination: the i-th of the planes becomes ``out[destination[i]]``.

    Parameters
    ----------
    data : uint8[n], the planes of at least as many rows as there are places.
    out : [rows, ...], contiguous, of elements of 2, 4 or 8 bytes in the byte order of the planes.
    destination : int64[k], rows of ``out``.
    """
    width = out.dtype.itemsize
    rows = out.reshape(len(out), -1).view(f"<u{width}")
    _to_rows(data[: data.nbytes // width * width].reshape(width, -1), rows, destination)


def _to_rows(planes: Bytes, rows: Array, destination: Integers) -> None:
    from matex_data.codecs.kernels import chunks_to_rows

    chunks_to_rows(len(planes))(
        0, 0, 0, 0, _FIRST, _FIRST, planes, rows, destination, _FIRST, np.array([len(destination)])
    )
