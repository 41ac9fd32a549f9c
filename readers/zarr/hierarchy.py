"""Arrays of a store: their metadata, one by one or consolidated, pyramids of images, and names of axes.

Pyramids of OME-Zarr, https://ngff.openmicroscopy.org/0.4/ and /0.5/: the attribute ``multiscales`` of a group, from 0.5
on within ``ome``. Their axes have names, and one of their levels is read.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from matex_data.errors import FormatError
from matex_data.index.stamps import ABSENT, PartState
from matex_data.readers.catalogue import Unreadable
from matex_data.readers.zarr.arrays import ArrayMetadata, parse
from matex_data.readers.zarr.stores import MARKS, Store
from matex_data.storage.trust import Trust, resolved


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


RESTORE = "the store is damaged: restore it from its source"
MAX_DEPTH = 32  # of groups within groups
MAY_BE_ADDED = (".zattrs", "zarr.json")  # metadata that may appear beside others
ROOT_NAME = "data"  # of an array that is the root of its store
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError, struct.error)

Document = dict[str, Any]


States = dict[str, PartState]
"""State of each file of metadata before it was read, by key."""


def read_arrays(
    store: Store, states: States | None = None
) -> tuple[dict[str, ArrayMetadata], dict[str, str], list[Pyramid]]:
    """Return the arrays of a store by name, the reason for each that cannot be read, and the pyramids of images.

    Parameters
    ----------
    states : receives the states of the files that are read, if the store has such files.

    Raises
    ------
    DataError : an array lies outside of the store, where its files are not trusted.
    FormatError : the metadata are damaged, or there are none.
    """
    arrays: dict[str, ArrayMetadata] = {}
    unread: dict[str, str] = {}
    known: list[Pyramid] = []
    is_empty = True
    for name, document in _documents(store, {} if states is None else states):
        is_empty = False
        try:
            if document.get("node_type", "array") == "array" and "shape" in document:
                if store.folder is not None:
                    (store.trust | Trust.of([store.folder])).check(resolved(store.folder, name), store.path, name)
                array = parse(document)
                if array.shards is not None and store.by_key:
                    raise Unreadable("shards in a store that reads by key alone, such as an Icechunk repository")
                arrays[name] = array
            else:
                known += pyramids(name, document.get("attributes") or {})
        except Unreadable as reason:
            unread[name or ROOT_NAME] = str(reason)
        except _DAMAGED as error:
            problem = "the metadata of an array are damaged"
            raise FormatError(
                problem, file=store.path, field=name or ROOT_NAME, found=repr(error), remedy=RESTORE
            ) from error
    if is_empty:
        raise FormatError(
            "no Zarr store",
            file=store.path,
            expected=f"one of {MARKS}",
            found="none of them",
            remedy="give the folder that has one of these files",
        )
    return arrays, unread, known


def _documents(store: Store, states: States) -> Iterator[tuple[str, Document]]:
    """Yield name and metadata of each node; the attributes of version 2 are an entry of its metadata."""
    root, consolidated = _json(store, "zarr.json", states), None
    if root is not None:
        consolidated = _mapping(_mapping(root.get("consolidated_metadata") or {}).get("metadata") or {})
        if consolidated:
            yield "", root
            yield from ((name, _mapping(document)) for name, document in consolidated.items())
            return
    elif (found := _json(store, ".zmetadata", states)) is not None:
        yield from _of_version_2(_mapping(found.get("metadata") or {}))
        return
    yield from _walk(store, "", MAX_DEPTH, states)


def _of_version_2(documents: Document) -> Iterator[tuple[str, Document]]:
    for key, document in documents.items():
        folder, _, kind = key.rpartition("/")
        if kind in (".zarray", ".zgroup"):
            attributes = documents.get(f"{folder}/.zattrs".lstrip("/"), {})
            yield folder, {**_mapping(document), "attributes": attributes}


def _walk(store: Store, folder: str, depth: int, states: States) -> Iterator[tuple[str, Document]]:
    """Yield the nodes of a folder and of the folders in it; those of an array are its chunks."""
    prefix = f"{folder}/" if folder else ""
    document = _json(store, f"{prefix}zarr.json", states)
    if document is None:
        document = _json(store, f"{prefix}.zarray", states) or _json(store, f"{prefix}.zgroup", states)
        if document is None:
            return
        document["attributes"] = _json(store, f"{prefix}.zattrs", states) or {}
    yield folder, document
    if "shape" not in document and depth:
        for name in store.folders(folder):
            yield from _walk(store, f"{prefix}{name}", depth - 1, states)


def states_of(states: Mapping[str, PartState], arrays: Collection[str]) -> States:
    """Return the states of the files that describe arrays and the groups around them.

    >>> there, absent = (9, 1), ABSENT
    >>> states = {"zarr.json": absent, ".zgroup": there, "x/.zarray": there, "x/.zattrs": absent, "y/.zarray": there}
    >>> list(states_of(states, {"x"}))
    ['zarr.json', '.zgroup', 'x/.zarray', 'x/.zattrs']
    """
    kept = {"", *arrays, *(array[:at] for array in arrays for at, letter in enumerate(array) if letter == "/")}
    return {
        key: state
        for key, state in states.items()
        if key.rpartition("/")[0] in kept and (state != ABSENT or key.endswith(MAY_BE_ADDED))
    }


def _json(store: Store, key: str, states: States) -> Document | None:
    """Return the content of a file of metadata; None if there is no such file."""
    state = store.state(key)
    if state is not None:
        states[key] = state
    data = store.get(key)
    if data is None:
        return None
    try:
        return _mapping(json.loads(data))
    except (ValueError, RecursionError) as error:
        problem = "the metadata are damaged"
        raise FormatError(problem, file=f"{store.path}/{key}", found=error, remedy=RESTORE) from error


def _mapping(value: Any) -> Document:
    if not isinstance(value, dict):
        raise FormatError("the metadata are damaged", expected="a JSON object", found=repr(value)[:80], remedy=RESTORE)
    return value


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
