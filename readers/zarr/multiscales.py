"""Pyramids of OME-Zarr: their axes have names, and one of their levels is read.

https://ngff.openmicroscopy.org/0.4/ and /0.5/: the attribute ``multiscales`` of a group, since 0.5 within ``ome``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matex_data.errors import FormatError
from matex_data.readers.zarr.arrays import ArrayMetadata


@dataclass(frozen=True)
class Pyramid:
    """Image at levels of resolution.

    Parameters
    ----------
    levels : names of the arrays in the store, the full resolution first.
    axes : their names.
    """

    levels: tuple[str, ...]
    axes: tuple[str, ...]


def pyramids(group: str, attributes: Mapping[str, Any]) -> list[Pyramid]:
    """Return the pyramids of a group; none if its metadata are none of OME-Zarr.

    >>> datasets = {"axes": [{"name": "y"}, {"name": "x"}], "datasets": [{"path": "0"}, {"path": "1"}]}
    >>> pyramids("labels/cells", {"multiscales": [datasets]})[0].levels
    ('labels/cells/0', 'labels/cells/1')
    """
    ome = attributes.get("ome")
    listed = (ome if isinstance(ome, Mapping) else attributes).get("multiscales")
    found = []
    for one in listed if isinstance(listed, list) else []:
        try:
            axes = [axis if isinstance(axis, str) else axis["name"] for axis in one.get("axes") or ()]
            levels = [f"{group}/{dataset['path'].strip('/')}".lstrip("/") for dataset in one["datasets"]]
        except (KeyError, TypeError, AttributeError):
            continue  # arrays as those of any store
        if all(isinstance(axis, str) and axis for axis in axes) and len(set(axes)) == len(axes):
            found.append(Pyramid(tuple(levels), tuple(axes)))
    return found


def of_level(
    path: str,
    arrays: Mapping[str, ArrayMetadata],
    known: Sequence[Pyramid],
    level: int | None,
    names: Sequence[str] | None,
) -> dict[str, ArrayMetadata]:
    """Return the arrays with the names of their axes, and of each pyramid one level alone.

    Parameters
    ----------
    path : of the store.
    arrays : by name.
    known : the pyramids of the store.
    level : number of a level; None: 0, the full resolution.
    names : arrays that the user names, which are kept at whatever level.

    Raises
    ------
    FormatError : there is no such level, or no pyramid.
    """
    kept, wanted = dict(arrays), {name.strip("/") for name in names or ()}
    if level is not None and not any(0 <= level < len(pyramid.levels) for pyramid in known):
        raise FormatError(
            "the store has no such level",
            file=path,
            expected=f"0 to {max(len(pyramid.levels) for pyramid in known) - 1}" if known else "a pyramid of OME-Zarr",
            found=f"level={level}",
        )
    for pyramid in known:
        chosen = pyramid.levels[min(level or 0, len(pyramid.levels) - 1)]
        for name in pyramid.levels:
            array = kept.get(name)
            if array is None:
                continue
            if len(pyramid.axes) == len(array.shape) and not any(array.dimensions):
                kept[name] = replace(array, dimensions=pyramid.axes)
            if name != chosen and name not in wanted:
                del kept[name]
    return kept
