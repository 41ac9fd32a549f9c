"""Find datasets in an HDF5 file by name, and say what is there if a name is not."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress

import h5py

from matex_data.errors import FieldNotFound, FormatError, near_matches
from matex_data.machine import environment_without_mpi

MOST_OBJECTS = 20_000  # a file of more objects is not listed to the end
HINT_SECONDS = 20.0  # that the listing for a hint may take
FAILURES = (
    OSError, RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError, ArithmeticError, MemoryError,
)  # fmt: skip
"""What h5py raises where a file is damaged, or has what h5py does not know."""


def find(file: h5py.File, path: str, name: str) -> h5py.Dataset:
    """The dataset of that name; a leading slash makes no difference.

    Raises
    ------
    FieldNotFound : there is no such object.
    FormatError : there is one, but it is no dataset, or cannot be opened.
    """
    try:
        found = file[name]
    except FAILURES as error:
        raise _not_opened(file, path, name, error) from error
    if isinstance(found, h5py.Dataset):
        return found
    kind = "a group" if isinstance(found, h5py.Group) else "a named datatype"
    below = [other for other in _hints(path) if other.startswith(name.strip("/"))]
    remedy = f"name one of its datasets: {near_matches(name, below)}" if below else "name a dataset"
    raise FormatError(
        "the field is not a dataset", file=path, field=name, expected="a dataset", found=kind, remedy=remedy
    )


def _not_opened(file: h5py.File, path: str, name: str, error: Exception) -> FormatError | FieldNotFound:
    try:
        link = file.get(name, getlink=True) if name.strip("/") else None
    except FAILURES:
        link = None
    if isinstance(link, h5py.SoftLink | h5py.ExternalLink):
        to = f"{link.filename}:{link.path}" if isinstance(link, h5py.ExternalLink) else link.path
        return FormatError("the field is a link that leads nowhere", file=path, field=name, expected=to, found=error)
    if link is not None:
        return FormatError("the dataset cannot be opened", file=path, field=name, found=error)
    names = _hints(path)
    expected = f"one of {near_matches(name.strip('/'), names)}" if names else None
    return FieldNotFound("the file has no such dataset", file=path, field=name, expected=expected)


def _hints(path: str) -> list[str]:
    """Names of what is in a file, to show those that are like one that is not; none if they cannot be listed.

    HDF5 does not survive the listing of every damaged file, and a hint is worth no crash: a child process lists them.
    """
    command = [sys.executable, "-m", __name__, path]
    try:
        listed = subprocess.run(
            command, capture_output=True, stdin=subprocess.DEVNULL, timeout=HINT_SECONDS, env=environment_without_mpi()
        )
        return list(json.loads(listed.stdout))
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def _list(path: str) -> None:
    """Print the names of all datasets, and of the links in the root group."""
    names: dict[str, None] = {}
    with h5py.File(path, "r", locking=False) as file, suppress(*FAILURES):
        names.update(dict.fromkeys(_walk(file)))
        names.update(dict.fromkeys(key for key in file if file.get(key, getclass=True, getlink=True) != h5py.HardLink))
    print(json.dumps(list(names)))


def dataset_names(file: h5py.File, path: str) -> list[str]:
    """Every dataset of the file once, by its first hard link.

    Raises
    ------
    FormatError : the file cannot be walked through to its end.
    """
    try:
        return list(_walk(file))
    except FAILURES as error:
        raise FormatError(
            "the objects of the file cannot be listed",
            file=path,
            expected=f"groups that open, no more than {MOST_OBJECTS} objects",
            found=error,
            remedy="name the fields with inputs= and targets=",
        ) from error


def _walk(file: h5py.File) -> Iterator[str]:
    """Names of datasets, depth first.

    Only links and the kinds of objects are looked at: ``h5o.visit`` asks for sizes as well, and so reads the indexes of
    all chunks, which takes long in large files and crashes HDF5 1.14 in damaged ones.
    """
    seen = {h5py.h5g.get_objinfo(file.id, b"/").objno}  # addresses
    waiting = _hard_links(file.id, b"")
    while waiting:
        group, link, name = waiting.pop()
        found = h5py.h5g.get_objinfo(group, link, follow_link=False)
        if found.objno in seen:
            continue
        seen.add(found.objno)
        if len(seen) > MOST_OBJECTS:
            raise ValueError(f"more than {MOST_OBJECTS} objects")
        if found.type == h5py.h5g.DATASET:
            yield name.decode("utf-8", "surrogateescape")
        elif found.type == h5py.h5g.GROUP:
            waiting += _hard_links(h5py.h5g.open(group, link), name + b"/")


def _hard_links(group: h5py.h5g.GroupID, prefix: bytes) -> list[tuple[h5py.h5g.GroupID, bytes, bytes]]:
    """The links of a group to objects of the same file, last name first: group, link, whole name."""
    found = []

    def visit(name: bytes, info: h5py.h5l.LinkInfo) -> int | None:
        if info.type == h5py.h5l.TYPE_HARD:
            found.append((group, name, prefix + name))
        return 1 if len(found) > MOST_OBJECTS else None

    group.links.iterate(visit, info=True)
    return found[::-1]


if __name__ == "__main__":
    _list(sys.argv[1])
