"""Axes along which the layouts of a mesh cut variables."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from matex_data.errors import PartitionError
from matex_data.training.mesh import AXES

MODEL = AXES[2]


def cut_axis(layouts: Any, path: str, shape: tuple[int, ...]) -> int | None:
    """Return the axis along which a variable is cut over the shards; None: it is not.

    Parameters
    ----------
    layouts : ``keras.distribution.LayoutMap`` of a mesh.
    path, shape : of the variable.

    Raises
    ------
    PartitionError : several layouts fit the path, the layout has another number of dimensions or names an axis other
        than "model" or one twice, or the shards do not divide the dimension.
    """
    try:
        layout = layouts[path]
    except ValueError as error:
        raise PartitionError(
            "several layouts fit one variable",
            field=path,
            expected="one key of the layout map that fits the whole path",
            found=str(error).partition(": ")[2].partition(". ")[0],
            remedy="make the regular expressions more specific",
        ) from None
    if layout is None:
        return None
    named = [axis for axis in layout.axes if axis is not None]
    if len(layout.axes) != len(shape) or named not in ([], [MODEL]):
        raise PartitionError(
            "a layout does not fit its variable",
            field=path,
            expected=f'{len(shape)} axes, one for each dimension of {list(shape)}, of which one is "model"',
            found=layout.axes,
            remedy="give None for each dimension that stays whole",
        )
    if not named:
        return None
    axis, shards = layout.axes.index(MODEL), layouts.device_mesh.mesh.shape[2]
    check_divides(path, shape, axis, shards)
    return int(axis)


def check_divides(path: str, shape: tuple[int, ...], axis: int, shards: int) -> None:
    """Raise an error unless the shards divide a dimension of a variable.

    Raises
    ------
    PartitionError : they do not.
    """
    if shape[axis] % shards:
        raise PartitionError(
            "the shards do not divide a dimension of a variable",
            field=path,
            expected=f"a multiple of {shards} in dimension {axis}",
            found=list(shape),
            remedy="choose another number of units, or a mesh with another number of shards",
        )


def check_used(layouts: Any, paths: Iterable[str]) -> None:
    """Raise an error if a layout fits none of these paths of variables.

    Raises
    ------
    PartitionError : a key fits none, as one with a typing error.
    """
    known = list(paths)
    by_key = {key: type(layouts)(None) for key in layouts}
    for key, single in by_key.items():
        single[key] = layouts[key].axes
        if not any(single[path] is not None for path in known):
            near = difflib.get_close_matches(key, known, 3, 0) or known[:3]
            raise PartitionError(
                "a layout fits no variable",
                field=key,
                expected="a regular expression that fits the whole path of a variable",
                found=f"{len(known)} paths, {near} among them",
                remedy="compare with variable.path of model.variables",
            )
