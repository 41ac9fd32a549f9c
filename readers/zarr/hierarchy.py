"""Arrays of a store, by the metadata of its groups or by consolidated metadata."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from matex_data.errors import FormatError
from matex_data.readers.zarr.arrays import ArrayMetadata, UnreadableArray, parse
from matex_data.readers.zarr.multiscales import Pyramid, pyramids
from matex_data.readers.zarr.stores import MARKS, Store
from matex_data.storage.trust import Trust, joined

RESTORE = "the store is damaged: restore it from its source"
MAX_DEPTH = 32  # of groups within groups
ROOT_NAME = "data"  # of an array that is the root of its store
_DAMAGED = (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError, struct.error)

Document = dict[str, Any]


def read_arrays(store: Store) -> tuple[dict[str, ArrayMetadata], dict[str, str], list[Pyramid]]:
    """Return the arrays of a store by name, the reason for each that cannot be read, and the pyramids of images.

    Raises
    ------
    DataError : an array lies outside of the store, where its files are not trusted.
    FormatError : the metadata are damaged, or there are none.
    """
    arrays: dict[str, ArrayMetadata] = {}
    unread: dict[str, str] = {}
    known: list[Pyramid] = []
    is_empty = True
    for name, document in _documents(store):
        is_empty = False
        try:
            if document.get("node_type", "array") == "array" and "shape" in document:
                if store.folder is not None:
                    (store.trust | Trust.of([store.folder])).check(joined(store.folder, name), store.path, name)
                arrays[name] = _checked(parse(document), store)
            else:
                known += pyramids(name, document.get("attributes") or {})
        except UnreadableArray as reason:
            unread[name] = str(reason)
        except _DAMAGED as error:
            problem = "the metadata of an array are damaged"
            raise FormatError(
                problem, file=store.path, field=name or ROOT_NAME, found=repr(error), remedy=RESTORE
            ) from error
    if is_empty:
        raise FormatError("no Zarr store", file=store.path, expected=f"one of {MARKS}", found="none of them")
    return arrays, unread, known


def _checked(array: ArrayMetadata, store: Store) -> ArrayMetadata:
    """Return the metadata of an array that the store has a way to read."""
    if array.shards is not None and store.by_key:
        raise UnreadableArray("shards in a store that reads by key alone, such as an Icechunk repository")
    return array


def _documents(store: Store) -> Iterator[tuple[str, Document]]:
    """Yield name and metadata of each node; the attributes of version 2 are an entry of its metadata."""
    root, consolidated = _json(store, "zarr.json"), None
    if root is not None:
        consolidated = _mapping(_mapping(root.get("consolidated_metadata") or {}).get("metadata") or {})
        if consolidated:
            yield "", root
            yield from ((name, _mapping(document)) for name, document in consolidated.items())
            return
    elif (found := _json(store, ".zmetadata")) is not None:
        yield from _of_version_2(_mapping(found.get("metadata") or {}))
        return
    yield from _walk(store, "", MAX_DEPTH)


def _of_version_2(documents: Document) -> Iterator[tuple[str, Document]]:
    for key, document in documents.items():
        folder, _, kind = key.rpartition("/")
        if kind in (".zarray", ".zgroup"):
            attributes = documents.get(f"{folder}/.zattrs".lstrip("/"), {})
            yield folder, {**_mapping(document), "attributes": attributes}


def _walk(store: Store, folder: str, depth: int) -> Iterator[tuple[str, Document]]:
    """Yield the nodes of a folder and of the folders in it; those of an array are its chunks."""
    prefix = f"{folder}/" if folder else ""
    document = _json(store, f"{prefix}zarr.json")
    if document is None:
        document = _json(store, f"{prefix}.zarray") or _json(store, f"{prefix}.zgroup")
        if document is None:
            return
        document["attributes"] = _json(store, f"{prefix}.zattrs") or {}
    yield folder, document
    if "shape" not in document and depth:
        for name in store.folders(folder):
            yield from _walk(store, f"{prefix}{name}", depth - 1)


def _json(store: Store, key: str) -> Document | None:
    """Return the content of a file of metadata; None if there is no such file."""
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
