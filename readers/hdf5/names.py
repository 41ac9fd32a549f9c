"""Datasets of an HDF5 file by name, with near matches for a name that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import h5py
import numpy as np

from matex_data.errors import DataError, FieldNotFound, FormatError, near_matches, wants_hints
from matex_data.machine import without_rank

MAX_OBJECTS = 20_000  # in a file that is listed
HINT_SECONDS = 20.0  # limit for the listing behind a hint
HDF5_ERRORS = (
    OSError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError,
)  # fmt: skip
"""Exceptions of h5py for a damaged file, or one with features that h5py does not support."""


@contextmanager
def reported(
    problem: str, path: str, field: str | None = None, kind: type[DataError] = FormatError, **facts: Any
) -> Iterator[None]:
    """Raise an error with a problem, and what was found, for an exception of h5py; a ``DataError`` stays."""
    try:
        yield
    except DataError:
        raise
    except HDF5_ERRORS as error:
        raise kind(problem, file=path, field=field, found=error, **facts) from error


def has_attribute(item: h5py.HLObject, name: bytes) -> bool:
    """Return whether an object has an attribute; False if its attributes cannot be read: its rows may be intact."""
    with suppress(*HDF5_ERRORS):
        return bool(h5py.h5a.exists(item.id, name))
    return False


def text_of(value: Any) -> str:
    """Return an attribute, or the only element of one, as text; "" if it is none."""
    value = value.reshape(-1)[0] if isinstance(value, np.ndarray) and value.size == 1 else value
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value if isinstance(value, str) else ""


def object_of(file: h5py.Group, name: str) -> Any:
    """Return an object by name; None if there is none, or it cannot be opened."""
    with suppress(*HDF5_ERRORS):
        return file[name]
    return None


def find(file: h5py.File, path: str, name: str) -> h5py.Dataset:
    """Return the dataset of that name, with or without a leading slash.

    Raises
    ------
    FieldNotFound : there is no such object.
    FormatError : the object is no dataset, or cannot be opened.
    """
    try:
        found = file[name]
    except HDF5_ERRORS as error:
        raise _open_error(file, path, name, error) from error
    if isinstance(found, h5py.Dataset):
        return found
    kind = "a group" if isinstance(found, h5py.Group) else "a named datatype"
    datasets = [other for other in _list_in_child(path) if other.startswith(name.strip("/"))]
    remedy = f"name one of its datasets: {near_matches(name, datasets)}" if datasets else "name a dataset"
    raise FormatError(
        "the field is not a dataset", file=path, field=name, expected="a dataset", found=kind, remedy=remedy
    )


def _open_error(file: h5py.File, path: str, name: str, error: Exception) -> FormatError | FieldNotFound:
    try:
        link = file.get(name, getlink=True) if name.strip("/") else None
    except HDF5_ERRORS:
        link = None
    if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
        target = f"{link.filename}:{link.path}" if isinstance(link, h5py.ExternalLink) else link.path
        return FormatError(
            "the target of the link does not exist",
            file=path,
            field=name,
            expected=target,
            found=error,
            remedy="copy the file that it leads to as well, or leave the field out with inputs= and targets=",
        )
    if link is not None:
        return FormatError(
            "the dataset cannot be opened",
            file=path,
            field=name,
            found=error,
            remedy="leave it out with inputs= and targets=",
        )
    names = _list_in_child(path)
    expected = f"one of {near_matches(name.strip('/'), names)}" if names else None
    return FieldNotFound(
        "the file has no such dataset",
        file=path,
        field=name,
        expected=expected,
        remedy="correct the name: matex inspect lists the datasets",
    )


def _list_in_child(path: str) -> list[str]:
    """Return the names in a file for a hint in an error; an empty list if the listing fails.

    A child process lists them, since HDF5 crashes on the listing of some damaged files.
    """
    if not wants_hints():
        return []
    command = [sys.executable, "-m", __name__, path]
    try:
        listed = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=HINT_SECONDS, env=without_rank()
        )
        return list(json.loads(listed.stdout))
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _list(path: str) -> None:
    """Print the names of all datasets, and of the links in the root group, as JSON."""
    names: dict[str, None] = {}
    with h5py.File(path, "r", locking=False) as file, suppress(FormatError, *HDF5_ERRORS):
        names.update(dict.fromkeys(dataset_names(file, path)))
        names.update(dict.fromkeys(key for key in file if file.get(key, getclass=True, getlink=True) != h5py.HardLink))
    print(json.dumps(list(names)))


def dataset_names(file: h5py.File, path: str) -> list[str]:
    """Return the name of every dataset of the file, each dataset once, by its first hard link.

    Raises
    ------
    FormatError : the objects of the file cannot all be listed.
    """
    problem, remedy = "the objects of the file cannot be listed", "name the fields with inputs= and targets="
    with reported(problem, path, expected=f"groups that open, no more than {MAX_OBJECTS} objects", remedy=remedy):
        return [os.fsdecode(name) for kind, *_, name in objects_of(file) if kind == h5py.h5g.DATASET]


def objects_of(file: h5py.File) -> Iterator[tuple[int, h5py.h5g.GroupID, bytes, bytes]]:
    """Yield the objects of a file, depth first: type, the group and the link that lead to each, and its name.

    Only links and the types of objects are read. ``h5o.visit`` reads sizes too, and so all chunk indexes, which is slow
    in large files and crashes HDF5 1.14 in damaged ones.
    """
    seen: set[Any] = set()  # addresses
    pending = [(file.id, b"/", b"")]
    while pending:
        group, link, name = pending.pop()
        found = h5py.h5g.get_objinfo(group, link, follow_link=False)
        if found.objno in seen:
            continue
        seen.add(found.objno)
        if len(seen) > MAX_OBJECTS:
            raise ValueError(f"more than {MAX_OBJECTS} objects")
        yield found.type, group, link, name
        if found.type == h5py.h5g.GROUP:
            pending += links_of(h5py.h5g.open(group, link), name + b"/" * bool(name), MAX_OBJECTS)


def links_of(
    group: h5py.h5g.GroupID, prefix: bytes = b"", most: int | None = None, kind: int = h5py.h5l.TYPE_HARD
) -> list[tuple[h5py.h5g.GroupID, bytes, bytes]]:
    """Return the links of a kind of a group, last name first, as tuples of group, link and full name.

    Parameters
    ----------
    prefix : of the full names.
    most : number of links from which on no more are listed; None: all are.
    kind : of links, of those of ``h5py.h5l``.
    """
    found = []

    def visit(name: bytes, info: h5py.h5l.LinkInfo) -> int | None:
        if info.type == kind:
            found.append((group, name, prefix + name))
        return 1 if most is not None and len(found) > most else None

    group.links.iterate(visit, info=True)
    return found[::-1]


if __name__ == "__main__":
    _list(sys.argv[1])
