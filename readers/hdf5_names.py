"""Find datasets in an HDF5 file by name, and say what is there if a name is not."""

from __future__ import annotations

from collections.abc import Iterator

import h5py

from matex_data.errors import FieldNotFound, FormatError, near_matches

MOST_OBJECTS = 20_000  # a file of more objects is not listed to the end
MOST_HINTS = 1000  # names of one group that are compared with one that is not there
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
    below = [f"{name.strip('/')}/{link}".strip("/") for link in _links(found)] if isinstance(found, h5py.Group) else []
    remedy = f"name a dataset; the group has {near_matches(name, below)}" if below else "name a dataset"
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
    group, missing = _deepest(file, name.strip("/"))
    inside = group.strip("/")
    near = near_matches(missing, _links(file[group]))
    return FieldNotFound(
        "the file has no such dataset",
        file=path,
        field=name,
        expected=f"in {inside!r} one of {near}" if inside else f"one of {near}",
        remedy="name datasets with the groups that they are in; 'matex inspect' lists them",
    )


def _deepest(file: h5py.File, name: str) -> tuple[str, str]:
    """The longest beginning of a name that is a group, and the next part of the name, which is not there."""
    group = "/"
    for part in name.split("/"):
        below = f"{group}{part}/"
        try:
            if not isinstance(file[below], h5py.Group):
                return group, part
        except FAILURES:
            return group, part
        group = below
    return group, ""


def _links(group: h5py.Group) -> list[str]:
    """Names in one group, whatever they are: for a hint. Nothing is opened, and no group below is looked into."""
    names: list[str] = []

    def visit(name: bytes) -> int | None:
        names.append(name.decode("utf-8", "surrogateescape"))
        return 1 if len(names) >= MOST_HINTS else None

    try:
        group.id.links.iterate(visit)
    except FAILURES:
        return names  # what was seen is good enough
    return names


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
