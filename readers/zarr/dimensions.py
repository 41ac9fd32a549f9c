"""Names of the axes of all arrays of a store, equal for axes that are one dimension."""

from __future__ import annotations

from collections.abc import Mapping

Axes = tuple[tuple[int, ...], tuple[str, ...]]
"""Shape of an array, and the names of its axes; "": an axis has none."""


def named_dimensions(arrays: Mapping[str, Axes]) -> dict[str, tuple[str, ...]]:
    """Return the dimensions of each array.

    A dimension of a group is that of the outermost group around it that has one of its name and its length. Arrays of a
    group may give one name to axes that differ in length, such as the levels of a pyramid: the length then becomes a
    part of the name. Axes without names are equal if their lengths are equal.

    Parameters
    ----------
    arrays : by name, with its groups.

    Examples
    --------
    >>> arrays = {"t": ((4,), ("time",)), "a/t": ((4, 9), ("time", "x")), "a/u": ((5,), ("time",)), "b": ((9,), ("",))}
    >>> named_dimensions(arrays)
    {'t': ('time',), 'a/t': ('time', 'a/x'), 'a/u': ('a/time_5',), 'b': ('dim_0',)}
    """
    lengths: dict[tuple[str, str], int] = {}
    for array, (shape, names) in arrays.items():
        for name, length in zip(names, shape, strict=True):
            lengths.setdefault((_group(array), name), length)
    unnamed: dict[tuple[int, int], str] = {}
    found = {}
    for array, (shape, names) in arrays.items():
        dimensions: list[str] = []
        for axis, (name, length) in enumerate(zip(names, shape, strict=True)):
            if name:
                dimensions.append(_outermost(_group(array), name, length, lengths))
            else:
                alike = [
                    n for n, earlier in zip(names[:axis], shape[:axis], strict=True) if not n and earlier == length
                ]
                dimensions.append(unnamed.setdefault((length, len(alike)), f"dim_{len(unnamed)}"))
        found[array] = tuple(dimensions)
    return found


def _group(array: str) -> str:
    return array.rpartition("/")[0]


def _outermost(group: str, name: str, length: int, lengths: Mapping[tuple[str, str], int]) -> str:
    steps = group.split("/") if group else []
    for depth in range(len(steps) + 1):
        outer = "/".join(steps[:depth])
        if lengths.get((outer, name)) == length:
            return f"{outer}/{name}".lstrip("/")
    return f"{group}/{name}_{length}".lstrip("/")
