"""Cell arrays of numeric arrays, as trials are stored: samples of their own lengths."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from matex_data._types import Array
from matex_data.fields import LISTS, Field
from matex_data.index.united import ragged_field

Shape = tuple[int, ...]


def cell_shapes(shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes of arrays in cells as samples: vectors of MATLAB have one axis, an empty array the others'.

    Parameters
    ----------
    shapes : as MATLAB shows them, of two axes or more.

    Raises
    ------
    ValueError : the arrays differ in their numbers of axes.

    Examples
    --------
    >>> cell_shapes([(1, 3), (5, 1), (0, 0)]), cell_shapes([(4, 2), (0, 0), (1, 2)])
    ([(3,), (5,), (0,)], [(4, 2), (0, 2), (1, 2)])
    """
    filled = [shape for shape in shapes if np.prod(shape)]
    if all(len(shape) == 2 and 1 in shape for shape in filled):
        return [(int(np.prod(shape)),) for shape in shapes]
    if len({len(shape) for shape in filled}) > 1:
        raise ValueError(f"cells with arrays of {sorted({len(shape) for shape in filled})} axes")
    return [shape if np.prod(shape) else (0, *filled[0][1:]) for shape in shapes]


def cell_field(name: str, shapes: Sequence[Shape], dtype: np.dtype[np.generic]) -> Field:
    """Return the field of samples of these shapes, ragged where they differ, in this file or in another one.

    Examples
    --------
    >>> cell_field("trial", [(4, 2), (0, 2)], np.dtype(float)).sample_shape
    (None, 2)
    """
    lengths = [set(axis) for axis in zip(*shapes, strict=True)]
    shape = [axis.pop() if len(axis) == 1 else None for axis in lengths]
    return ragged_field(Field(name, (), dtype, attributes={LISTS: True}), shape)


def cell_rows(cells: Sequence[Array], shapes: Sequence[Shape], dtype: np.dtype[np.generic], dense: bool) -> Array:
    """Return arrays as samples: one array if they are ``dense``, else an array of objects."""
    arrays = [np.asarray(cell, dtype).reshape(shape) for cell, shape in zip(cells, shapes, strict=True)]
    if dense:
        return np.stack(arrays)
    rows = np.empty(len(arrays), object)
    for number, array in enumerate(arrays):
        rows[number] = array
    return rows


def has_cells(array: Array) -> bool:
    """Return whether an array is one of objects that are arrays."""
    return array.dtype == object and isinstance(array[0], np.ndarray)
