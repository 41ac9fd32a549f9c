"""Undo HDF5's shuffle filter, which stores byte i of all elements together as plane i.

Source: https://support.hdfgroup.org/documentation/hdf5/latest/group___d_c_p_l.html, H5Pset_shuffle.
"""

from __future__ import annotations

from matex_data._types import Bytes


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
    elements = out[: count * width].reshape(count, width)
    for i in range(width):  # several times as fast as one transposed copy
        elements[:, i] = planes[i]
    out[count * width :] = data[count * width :]
